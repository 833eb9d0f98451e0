"""What operators rely on: a machine that is short of time, and what it does to a policy."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from checks.figures import Figure, Part
from checks.run import POLICIES, RELEASE, build, example, say

# The period of Linux's CPU quotas.
PERIOD_S = 0.1
SECONDS = 60
SHARES = (0.1, 0.2, 0.5)


def on_a_share(share: float, *args: str) -> dict[str, float]:
    """The lines of `quota_figures` while its process gets this share of each period, and is stopped for the rest."""
    build()
    program = RELEASE / "examples" / "quota_figures"
    say(f"  {program.name} {' '.join(args)}, on {share:.0%} of each {PERIOD_S * 1e3:.0f} ms")
    with subprocess.Popen((program, *args), stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            time.sleep(PERIOD_S * share)
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(PERIOD_S * (1 - share))
            os.kill(process.pid, signal.SIGCONT)
        said = process.stdout.read() if process.stdout else ""
    if process.returncode != 0:
        sys.exit(f"error: {program.name}: exit code {process.returncode}")
    return {line["name"]: line["value"] for line in map(json.loads, said.splitlines())}


def quota(_: int) -> Iterator[Figure]:
    """A good policy on a share of a core, with itself in shadow; and policies that never end, on a whole one."""
    for share in SHARES:
        values = on_a_share(share, "good", str(POLICIES / "srpt.wasm"), str(SECONDS))
        name = f"good policy on {share:.0%} of a core"
        yield Figure(f"{name}: quarantines", values["quarantines"], "quarantines", "<= 0")
        yield Figure(f"{name}: faults", values["faults"] + values["faults in shadow"], "faults", "<= 0")
        yield Figure(f"{name}: longest decision", values["longest decision"], "ms")
        yield Figure(f"{name}: steps", values["steps"], "steps")
    lines = example("quota_figures", "endless")
    deadline = next(line["value"] for line in lines if line["name"] == "deadline")
    for line in lines:
        if line["name"] != "deadline":
            yield Figure(line["name"], line["value"], "ms", f"<= {3 * deadline}")


PARTS: dict[str, Part] = {"quota": quota}
