"""The core by itself: router, scheduler, KV blocks, budget state. No engine, no component."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from typing import NamedTuple

from checks.figures import Figure, Part
from checks.run import ROOT, output, say

LIVE = 4096


class Timed(NamedTuple):
    """A criterion benchmark: median and its 95 % confidence interval, nanoseconds an iteration."""

    median: float
    low: float
    high: float

    def figure(self, name: str, unit: str = "ns", scale: float = 1.0, bound: str | None = None) -> Figure:
        """The time in a unit of so many nanoseconds."""
        return Figure(name, self.median / scale, unit, bound, self.low / scale, self.high / scale)

    def over(self, other: Timed, name: str, bound: str | None = None) -> Figure:
        """Ratio of the medians, and how far the intervals let it lie."""
        return Figure(name, self.median / other.median, "ratio", bound, self.low / other.high, self.high / other.low)


def bench(group: str) -> Callable[[str], Timed]:
    """Run a group of the benchmark; returns a reader of its results."""
    say(f"  cargo bench --bench core -- {group}/")
    # The whole workspace, as the tests build it: another selection would compile wasmtime again.
    output("cargo", "bench", "--locked", "-q", "--workspace", "--bench", "core", "--", f"{group}/")

    def of(name: str) -> Timed:
        kept = ROOT / "target" / "criterion" / group / name / "new" / "estimates.json"
        middle = json.loads(kept.read_text())["median"]
        interval = middle["confidence_interval"]
        return Timed(middle["point_estimate"], interval["lower_bound"], interval["upper_bound"])

    return of


def router(_: int) -> Iterator[Figure]:
    """A token through the router."""
    of = bench("router")
    batch = of("batch")
    yield batch.figure("router: a token in a batch, 4,096 live requests", scale=LIVE, bound="<= 40")
    yield batch.over(of("hashmap"), "router: a batch over a plain HashMap of the same trackers")
    one, two, apart = of("one-thread"), of("two-threads"), of("two-threads-apart")
    yield one.over(two, "router: throughput on two threads over one")
    yield one.over(apart, "router: the same for two routers that share nothing (what the machine gives)")
    # Linear is twice; a machine that shares its cores may not give even two threads that share nothing so much.
    share = one.median / two.median / min(2.0, one.median / apart.median)
    yield Figure("router: two threads on one router, share of linear", share, "ratio", ">= 0.8")


def scheduler(_: int) -> Iterator[Figure]:
    """A step of the scheduler."""
    of = bench("schedule_batch")
    for live in (1024, 16384):
        name = f"schedule_batch: {live:,} requests"
        yield of(f"meridian/{live}").figure(name, "us", 1e3)
        yield of(f"meridian/{live}").over(of(f"vec/{live}"), f"{name}, over sorting a Vec by phase and age")


def blocks(_: int) -> Iterator[Figure]:
    """One eviction."""
    of = bench("evict_for")
    many, name = of("meridian/100000"), "evict_for: a block of 100,000"
    yield many.figure(name)
    # log2 grows by 1.67 from 1,000 to 100,000, a scan by 100; what is between is the cache of the machine.
    yield many.over(of("meridian/1000"), f"{name} over a block of 1,000", "<= 5")
    yield many.over(of("vec/100000"), f"{name}, over the scan of a Vec")


def properties(_: int) -> Iterator[Figure]:
    """Operations that the property tests generate, counted by themselves."""
    total = 0
    for test, title in (("router", "router"), ("scheduler", "scheduler"), ("blocks_model", "KV blocks")):
        command = ["cargo", "test", "--release", "--locked", "-q", "--workspace", "--test", test, "--", "--nocapture"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        count = sum(int(n) for n in re.findall(r"operations: (\d+)", done.stdout)) if done.returncode == 0 else 0
        total += count
        yield Figure(f"property tests: operations on the {title}, all invariants kept", count, "operations")
    yield Figure("property tests: operations in all", total, "operations", ">= 1e6")


PARTS: dict[str, Part] = {"router": router, "scheduler": scheduler, "blocks": blocks, "properties": properties}
