"""The CUDA kernels: what they answer on the emulated device, and what a GPU measured."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

from checks.figures import Figure, Part
from checks.gpu.answers import check
from checks.gpu.driver import Failed, Kernels
from checks.run import RESULTS, ROOT, WORK, say

# Exit code of checks.gpu.entropy.
NOT_MEASURED = 3


def emulated(_: int) -> Iterator[Figure]:
    """The kernels' own text run on the CPU, thread by thread, against float64."""
    import torch

    for found in check(Kernels.emulated(torch), seed=20261122, small=True):
        yield Figure(f"emulated on the CPU: {found['name']}", found["value"], found["unit"], found["bound"])


def gpu(_: int) -> Iterator[Figure]:
    """What `checks.gpu.entropy` measures on a GPU, here or, where there is none, where it was run before."""
    kept, out = RESULTS / "gpu.json", WORK / "gpu.json"
    out.unlink(missing_ok=True)
    command = (sys.executable, "-m", "checks.gpu.entropy", "--out", str(out))
    code = subprocess.run(command, cwd=ROOT, stdout=sys.stderr).returncode
    if code != NOT_MEASURED:
        if not out.exists():
            sys.exit(f"error: checks.gpu.entropy failed with exit code {code}")
        kept.write_text(out.read_text())
    elif not kept.exists():
        say("  not measured: no GPU here, and none was measured before")
        return
    found = json.loads(kept.read_text())
    for line in found["figures"]:
        name = f"{found['machine']}, {found['commit']}: {line['name']}"
        yield Figure(name, line["value"], line["unit"], line["bound"], line.get("low"), line.get("high"))


def or_end(part: Part) -> Part:
    """The part; ends the program with what a compiler or the driver says."""

    def run(pairs: int) -> Iterator[Figure]:
        try:
            yield from part(pairs)
        except Failed as why:
            sys.exit(f"error: {why}")

    return run


PARTS: dict[str, Part] = {"emulated": or_end(emulated), "gpu": or_end(gpu)}
