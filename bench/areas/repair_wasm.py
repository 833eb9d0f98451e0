"""Repairs of the component runtime: what the longest decision costs, small stacks, imports."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator

from areas.common import ROOT, Bound, Figure, say

Line = tuple[str, float, str]

# Of each component. A median is of what the component costs, a longest one also of where the machine stopped it.
FIGURES = (
    "longest step, median of runs",
    "longest step",
    "median call",
    "p99 of the calls",
    "median start after a fault",
)
# A step with a fault: the deadline and its grain, and the longest start of a new instance, milliseconds.
STEP_MS = 2 + 2 * 0.5 + 5


def measured(what: str) -> list[Line]:
    """Run a part of the example `bulk_figures`: names, values and units."""
    # The whole workspace, as the tests build it: another selection would compile wasmtime again.
    subprocess.run(["cargo", "build", "--release", "--locked", "-q", "--workspace", "--examples"], cwd=ROOT, check=True)
    say(f"  bulk_figures {what}")
    example = ROOT / "target" / "release" / "examples" / "bulk_figures"
    done = subprocess.run([example, what], stdout=subprocess.PIPE, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return [(line["name"], line["value"], line["unit"]) for line in lines]


def decisions() -> Iterator[Figure]:
    """10,000 steps of each component that spends its time where nothing stops it, and as many calls as fit."""
    lines = measured("decisions")
    values = {name: value for name, value, _ in lines}
    yield Figure("deadline of a decision", values["deadline"], "ms")
    # By instruction and memory, the longest over all sizes.
    longest: dict[str, list[float]] = {}
    for name, value, _ in lines:
        component, _, what = name.partition(": ")
        if what in FIGURES:
            kind = component.rsplit(" of ", 1)
            instruction = kind[0].removesuffix(" MiB").rstrip("0123456789 ").removesuffix(" over and over")
            longest.setdefault(f"{instruction} in {kind[1]}: {what}", []).append(value)
    bounds = {"longest step, median of runs": Bound(STEP_MS), "median call": Bound(values["deadline and its grain"])}
    for name, of_sizes in longest.items():
        yield Figure(name, max(of_sizes), "ms", bounds.get(name.rpartition(": ")[2]))
    steps = [value for name, value, _ in lines if name.endswith(": steps")]
    yield Figure("steps of each component, in five runs", min(steps), "steps", Bound(50_000, at_most=False))


def stack() -> Iterator[Figure]:
    """Endless recursion on small stacks."""
    for name, value, unit in measured("stack"):
        yield Figure(name, value, unit, Bound(100, at_most=False))


def imports() -> Iterator[Figure]:
    """A component with an import is refused before it is compiled."""
    for name, value, unit in measured("imports"):
        yield Figure(name, value, unit, Bound(1000) if name.endswith("with an import") else None)


def parts(_pairs: int) -> dict[str, Callable[[], Iterator[Figure]]]:
    """Parts of the area by name."""
    return {"decisions": decisions, "stack": stack, "imports": imports}
