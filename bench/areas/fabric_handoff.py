"""Requests that think in one vLLM engine and answer in another, on the real engine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from statistics import mean
from typing import Any

from areas.bench import SERVEGEN, meridian, write_between
from areas.common import ROOT, Bound, Figure, say, seeds

REQUESTS, KILLED = 500, 200
# Engines of the plan, and the ratio whose figures are kept.
PLANNED, BEST_PLAN = 8, "handoff=6:2"
PLAN_COLUMNS = {
    "itl_output_p99_ms": "output ITL p99, ms",
    "ttot_p50_ms": "TTOT p50, ms",
    "ttfo_p50_ms": "TTFO p50, ms",
    "ttft_p50_ms": "TTFT p50, ms",
    "throughput_tok_s": "tokens/s",
    "goodput_rps": "goodput, requests/s",
}


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
    yield Figure("handoff: tokens a second of the stock engine", stock["tokens_per_s"], "tokens/s")


def kills() -> Iterator[Figure]:
    """Answers whose engine is killed while others are pulled."""
    found = measured("kills")["kills"]
    yield Figure("handoff: answers that a kill cut", found["cut"], "answers", Bound(KILLED, at_most=False))
    yield Figure("handoff: requests lost by kills", found["lost"], "requests", Bound(0))
    yield Figure("handoff: outputs that kills changed", found["differing"], "requests", Bound(0))


def plan() -> Iterator[Figure]:
    """Eight simulated engines, below and above what they can do: each ratio of engines that think and that answer,
    beside the same engines without handoffs."""
    rates = {"below capacity": 4.0, "above capacity": 8.0}
    names = ("balanced", *(f"handoff={think}:{PLANNED - think}" for think in range(PLANNED - 1, PLANNED // 2 - 1, -1)))
    flags = ["--trace", str(SERVEGEN), "--requests", "3000", "--engines", str(PLANNED), "--engine", "32b-h200"]
    flags += ["--rate", ",".join(map(str, rates.values())), "--seeds", seeds(3), "--transfer-gb-s", "20"]
    say(f"  meridian bench replay {' '.join(flags)}")
    runs = meridian("replay", *flags, *(word for name in names for word in ("--policy", name)))["runs"]
    lines = []
    for label, rate in rates.items():
        lines += ["", f"{label.capitalize()}, {rate:g} requests a second:", ""]
        lines += [f"| engines | {' | '.join(PLAN_COLUMNS.values())} |", "|---" * (len(PLAN_COLUMNS) + 1) + "|"]
        stock, *others = (mean_metrics(runs, rate, name.replace("=", " ")) for name in ("fcfs", *names))
        cells = [f"{stock[key]:,.0f}" if stock[key] >= 100 else f"{stock[key]:.3g}" for key in PLAN_COLUMNS]
        lines.append(f"| 8 of stock vLLM | {' | '.join(cells)} |")
        for name, metrics in zip(names, others, strict=True):
            ratios = {key: metrics[key] / stock[key] for key in PLAN_COLUMNS}
            engines = "8 with `balanced`" if name == "balanced" else name.removeprefix("handoff=").replace(":", " + ")
            cells = [f"{ratio:,.0f}x" if ratio >= 100 else f"{ratio:.3g}x" for ratio in ratios.values()]
            lines.append(f"| {engines} | {' | '.join(cells)} |")
            if name == BEST_PLAN:
                for key, title in PLAN_COLUMNS.items():
                    yield Figure(f"plan, {label}, {name}: {title} over stock", ratios[key], "ratio")
    write_between(ROOT / "docs" / "src" / "handoff.md", "plan", lines)


def mean_metrics(runs: list[dict[str, Any]], rate: float, policy: str) -> dict[str, float]:
    """A policy's metrics at a rate, mean over the seeds."""
    chosen = [run["metrics"] for run in runs if run["rate"] == rate and run["policy"] == policy]
    return {key: mean(metrics[key] for metrics in chosen) for key in PLAN_COLUMNS}


PARTS = {"handoff": handoff, "handoff-kills": kills, "plan": plan}
