"""Requests that think in one vLLM engine and answer in another, on the real engine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from areas.common import ROOT, Bound, Figure, say

REQUESTS, KILLED = 500, 200


def measured(part: str) -> dict[str, Any]:
    """The object that the script prints for a part."""
    say(f"  handoff.py --part {part}")
    build = ["cargo", "build", "--release", "--locked", "-q", "--workspace", "--bin", "meridian"]
    subprocess.run(build, cwd=ROOT, check=True)
    command = [sys.executable, str(ROOT / "bench" / "vllm" / "handoff.py"), "--part", part]
    command += ["--requests", str(REQUESTS), "--killed", str(KILLED)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"error: handoff.py --part {part}: failed, see above")
    return json.loads(done.stdout.splitlines()[-1])


def handoff() -> Iterator[Figure]:
    """Tokens beside those of one engine, the gaps between the tokens of an answer, and the cost in throughput."""
    found = measured("equal")
    equal, times = found["equal"], found["itl"]
    stock, both = times["stock"], times["handoff"]
    yield Figure("handoff: requests", equal["requests"], "requests", Bound(REQUESTS, at_most=False))
    yield Figure("handoff: requests lost", equal["lost"], "requests", Bound(0))
    yield Figure("handoff: outputs that differ from one engine's", equal["differing"], "requests", Bound(0))
    yield Figure("handoff: answers written by the second engine", equal["handed_over"], "requests")
    for key, name in {
        "output_itl_p99_ms": "p99 output ITL",
        "output_itl_p50_ms": "median output ITL",
        "ttot_p50_ms": "median time from the end of thinking to the next token",
        "tokens_per_s": "tokens a second",
    }.items():
        yield Figure(f"handoff: {name} over one stock engine of both cores", both[key] / stock[key], "ratio")
    yield Figure("handoff: p99 output ITL of the stock engine", stock["output_itl_p99_ms"], "ms")


def kills() -> Iterator[Figure]:
    """Answers whose engine is killed while others are pulled."""
    found = measured("kills")["kills"]
    yield Figure("handoff: answers that a kill cut", found["cut"], "answers", Bound(KILLED, at_most=False))
    yield Figure("handoff: requests lost by kills", found["lost"], "requests", Bound(0))
    yield Figure("handoff: outputs that kills changed", found["differing"], "requests", Bound(0))


PARTS = {"handoff": handoff, "handoff-kills": kills}
