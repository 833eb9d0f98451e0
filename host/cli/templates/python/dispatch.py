"""The request with the fewest prompt tokens left to compute goes first."""

from wit_world import exports
from wit_world.exports.dispatch import Column, Decision, Step
from wit_world.exports.lifecycle import Description, Slot, Targets

from componentize_py_types import Err


class Lifecycle(exports.Lifecycle):
    def describe(self) -> Description:
        summary = "Fewest prompt tokens to compute first: lowers mean TTFT, delays long prompts."
        return Description("{{name}}", "0.1.0", summary)

    def init(self, slot: Slot, targets: Targets, config_json: str) -> None:
        if config_json.strip(" {}"):
            raise Err("config: this policy takes no options")

    def finished(self, requests: list[int]) -> None:
        """This policy keeps no state of requests."""

    def snapshot(self) -> bytes:
        return b""

    def restore(self, state: bytes) -> None:
        pass


class Dispatch(exports.Dispatch):
    def inputs(self) -> list[Column]:
        return [Column.PROMPT_TOKENS, Column.CACHED_TOKENS]

    def decide(self, step: Step, candidates: int, columns: list[float]) -> Decision:
        prompt, cached = columns[:candidates], columns[candidates:]
        # Lower goes first; the host sorts.
        return Decision([p - c for p, c in zip(prompt, cached)], None, [], [])
