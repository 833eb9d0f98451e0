"""Blocks that were never matched again go first, the end of a chain before its head."""

from wit_world import exports
from wit_world.exports.eviction import Column, Memory, Ranking
from wit_world.exports.lifecycle import Description, Slot, Targets

from componentize_py_types import Err


class Lifecycle(exports.Lifecycle):
    def describe(self) -> Description:
        summary = "Blocks with few matches and far from the head of their chain go first."
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


class Eviction(exports.Eviction):
    def inputs(self) -> list[Column]:
        return [Column.HITS, Column.POSITION]

    def rank(self, memory: Memory, candidates: int, columns: list[float]) -> Ranking:
        hits, position = columns[:candidates], columns[candidates:]
        # Lower goes first; the host sorts.
        keys = [h - p for h, p in zip(hits, position)]
        # No block is kept for a time.
        return Ranking(keys, [])
