"""Repair: the scheduler survives defects of Meridian, stock stays stock, priorities are vLLM's."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from statistics import median
from typing import Any

from areas.common import ROOT, Bound, Figure, over_pairs, say
from areas.slice import own_times, write_trace


def _found(what: str) -> dict[str, Any]:
    say(f"  stock_and_defects.py {what}")
    command = [sys.executable, str(ROOT / "bench" / "vllm" / "stock_and_defects.py"), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode:
        sys.exit(f"error: stock_and_defects.py failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def defects() -> Iterator[Figure]:
    """A defect at every kind of call that Meridian makes in a step of the real engine: native, and in Python."""
    found = _found("defects")
    injected = found["injected"]
    yield Figure("defects: kinds of calls", found["points"], "calls")
    yield Figure("defects: injected", injected, "defects", Bound(found["points"], at_most=False))
    yield Figure(
        "defects: survived as stock, with equal outputs and nothing left in vLLM's objects",
        found["survived"],
        f"of {injected}",
        Bound(injected, at_most=False),
    )


def stock() -> Iterator[Figure]:
    """`native:fcfs` under tight KV memory with metrics, admin interface, recording and shadow, beside stock vLLM."""
    found = _found("stock")
    unit = f"of {found['requests']} requests"
    yield Figure("following in stock mode: outputs that differ from stock", found["outputs_differing"], unit, Bound(0))
    steps = f"of {found['steps']} steps"
    yield Figure("following in stock mode: steps that differ from stock", found["steps_differing"], steps, Bound(0))
    across = found["outputs_differing_across_swaps"]
    yield Figure("following in stock mode: outputs that differ across 4 swaps away and back", across, unit, Bound(0))

    rng = random.Random(0)
    rows = [(rng.randint(16, 48), rng.randint(60, 160), rng.randint(160, 220)) for _ in range(128)]
    trace = write_trace("own-time.csv", rows)
    shares, own = own_times("own-time-stock", "native:fcfs", trace)
    title = "following in stock mode: own time over vLLM's in schedule(), 128 running"
    yield over_pairs(title, shares, "ratio", Bound(0.10))
    yield Figure("following in stock mode: own time in schedule(), 128 running", median(own), "us")


def priority() -> Iterator[Figure]:
    """Random sequences of arrivals, aborts and preemptions with `--scheduling-policy priority`."""
    found = _found("priority")
    sequences = found["sequences"]
    yield Figure("priority: random sequences", sequences, "sequences")
    yield Figure("priority: preemptions in them", found["preemptions"], "preemptions", Bound(1, at_most=False))
    equal = Bound(sequences, at_most=False)
    yield Figure("priority: equal to stock in every step, native:fcfs", found["equal"], f"of {sequences}", equal)
