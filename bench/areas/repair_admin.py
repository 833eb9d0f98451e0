"""The admin interface under attack: how long a rollback takes while somebody is in its way."""

from __future__ import annotations

import json
import resource
import subprocess
from collections.abc import Callable, Iterator

from areas.common import ROOT, Bound, Figure, say

# A rollback is what an operator does when something is wrong: in less than a second, whatever else goes on.
LONGEST_MS = Bound(1000)
# Both ends of the idle connections are in one process.
OPEN_FILES = 4096


def measured(what: str) -> dict[str, tuple[float, str]]:
    """Run a part of the example `admin_figures`; returns values and units by name."""
    # The whole workspace, as the tests build it: another selection would compile wasmtime again.
    subprocess.run(["cargo", "build", "--release", "--locked", "-q", "--workspace", "--examples"], cwd=ROOT, check=True)
    say(f"  admin_figures {what}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, hard))
    example = ROOT / "target" / "release" / "examples" / "admin_figures"
    done = subprocess.run([example, what], stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["name"]: (line["value"], line["unit"]) for line in lines}


def figures(what: str) -> Iterator[Figure]:
    """Those of one attack."""
    for name, (value, unit) in measured(what).items():
        bound = LONGEST_MS if name.endswith("longest") else Bound(0) if "reached who took it" in name else None
        yield Figure(f"admin, {name}", value, unit, bound)


def taken() -> Iterator[Figure]:
    """Another process has the configured port."""
    yield from figures("taken")


def idle() -> Iterator[Figure]:
    """2,000 connections that send nothing, replaced by new ones as fast as they can be opened."""
    yield from figures("idle")


def compiling() -> Iterator[Figure]:
    """A component of another slot is being compiled."""
    yield from figures("compile")


def parts(_pairs: int) -> dict[str, Callable[[], Iterator[Figure]]]:
    """Parts of the area by name."""
    return {"admin-taken": taken, "admin-idle": idle, "admin-compile": compiling}
