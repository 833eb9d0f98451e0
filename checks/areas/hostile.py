"""Hostile components and clients: how long a decision takes at worst, and a rollback while somebody is in its way."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from functools import partial

from checks.figures import Figure, Part, printed
from checks.run import example

# Of each component. A median is of what the component costs, a longest one also of where the machine stopped it.
SHOWN = (
    "longest step, median of runs",
    "longest step",
    "median call",
    "p99 of the calls",
    "median start after a fault",
)
# A step with a fault: the deadline and its grain, and the longest start of a new instance, milliseconds.
STEP_MS = 2 + 2 * 0.5 + 5
# Both ends of the idle connections are in one process.
OPEN_FILES = 4096


def decisions(_: int) -> Iterator[Figure]:
    """10,000 steps of each component that spends its time where nothing stops it, and as many calls as fit."""
    lines = example("bulk_figures", "decisions")
    values = {line["name"]: line["value"] for line in lines}
    yield Figure("deadline of a decision", values["deadline"], "ms")
    # By instruction and memory, the longest over all sizes.
    longest: dict[str, float] = {}
    for line in lines:
        component, _, what = line["name"].partition(": ")
        if what in SHOWN:
            kind, memory = component.rsplit(" of ", 1)
            instruction = kind.removesuffix(" MiB").rstrip("0123456789 ").removesuffix(" over and over")
            name = f"{instruction} in {memory}: {what}"
            longest[name] = max(line["value"], longest.get(name, 0.0))
    bounds = {"longest step, median of runs": STEP_MS, "median call": values["deadline and its grain"]}
    for name, value in longest.items():
        limit = bounds.get(name.rpartition(": ")[2])
        yield Figure(name, value, "ms", None if limit is None else f"<= {limit}")
    steps = min(line["value"] for line in lines if line["name"].endswith(": steps"))
    yield Figure("steps of each component, in five runs", steps, "steps", ">= 50000")


def attacked(what: str) -> list[dict[str, object]]:
    """Rollbacks under one attack on the admin interface."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, hard))
    return example("admin_figures", what)


# A rollback is what an operator does when something is wrong: in less than a second, whatever else goes on.
PARTS: dict[str, Part] = {
    "decisions": decisions,
    # Another process has the port; 2,000 connections send nothing; a component of another slot is compiled.
    **{
        f"admin-{what}": printed(
            partial(attacked, what), "admin, ", {"longest": "<= 1000", "reached who took it": "<= 0"}
        )
        for what in ("taken", "idle", "compile")
    },
}
