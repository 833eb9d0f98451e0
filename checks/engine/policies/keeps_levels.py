"""A dispatch policy in Python: late requests go after those that can still keep their service level.

`checks.areas.levels` compiles it in the folder that `meridian policy new --lang python` makes.
"""

# `wit_world` is made from `wit/` when the component is compiled.
# pyright: reportMissingImports=false

from __future__ import annotations

from componentize_py_types import Err
from wit_world import exports
from wit_world.exports.dispatch import Column, Decision, Step
from wit_world.exports.lifecycle import Description, Slot, Targets

RUNNING = 1.0  # of the column `state`
# Milliseconds, longer than any wait; a key of this size is an f32 that still tells milliseconds apart.
LATE_MS = 1e7


class Lifecycle(exports.Lifecycle):
    def describe(self) -> Description:
        summary = "Waiting requests that can still keep their level first, then late ones: the longest wait first."
        return Description("keeps-levels", "0.1.0", summary)

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
        return [Column.STATE, Column.WAIT_MS, Column.LEVEL_SLACK_MS]

    def decide(self, step: Step, candidates: int, columns: list[float]) -> Decision:
        states, waits, slacks = (columns[i * candidates : (i + 1) * candidates] for i in range(3))
        # Lower goes first. The host orders running and waiting requests apart.
        keys = [
            (LATE_MS if state != RUNNING and slack < 0.0 else 0.0) - wait_ms
            for state, wait_ms, slack in zip(states, waits, slacks, strict=True)
        ]
        return Decision(keys, None, [], [])
