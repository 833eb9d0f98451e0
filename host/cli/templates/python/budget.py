"""Long thoughts end while other requests wait."""

from wit_world import exports
from wit_world.exports.budget import Column, Load, Thresholds, Verdict
from wit_world.exports.lifecycle import Description, Slot, Targets

from componentize_py_types import Err

LONG_TOKENS = 2048
QUEUE = 8


class Lifecycle(exports.Lifecycle):
    def describe(self) -> Description:
        summary = "Ends thoughts of more than 2048 tokens while more than 8 requests wait."
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


class Budget(exports.Budget):
    def inputs(self) -> list[Column]:
        return [Column.THINK_TOKENS]

    def start(self, load: Load, candidates: int, columns: list[float]) -> list[Thresholds]:
        # An empty list stands for the configured thresholds.
        return []

    def probe(self, load: Load, candidates: int, columns: list[float]) -> list[Verdict]:
        is_busy = load.waiting > QUEUE
        return [Verdict.END_NOW if is_busy and tokens > LONG_TOKENS else Verdict.DEFAULT for tokens in columns]
