"""The core by itself: router, scheduler, KV blocks, budget state. No engine, no component."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from areas.common import ROOT, Bound, Figure, say

CRITERION = ROOT / "target" / "criterion"
LIVE = 4096


@dataclass(frozen=True)
class Timed:
    """A criterion benchmark: median and its 95 % confidence interval, nanoseconds an iteration."""

    median_ns: float
    low_ns: float
    high_ns: float

    def over(self, other: Timed) -> tuple[float, float, float]:
        """Ratio of the medians, and how far the intervals let it lie."""
        return (
            self.median_ns / other.median_ns,
            self.low_ns / other.high_ns,
            self.high_ns / other.low_ns,
        )


def bench(group: str) -> Callable[[str], Timed]:
    """Run a group of the benchmark; returns a reader of its results."""
    say(f"  cargo bench --bench core -- {group}/")
    # The whole workspace, as the tests build it: another selection would compile wasmtime again.
    command = ["cargo", "bench", "--locked", "-q", "--workspace", "--bench", "core", "--", f"{group}/"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)

    def read(name: str) -> Timed:
        estimates = json.loads((CRITERION / group / name / "new" / "estimates.json").read_text())
        middle = estimates["median"]
        interval = middle["confidence_interval"]
        return Timed(middle["point_estimate"], interval["lower_bound"], interval["upper_bound"])

    return read


def ratio(name: str, of: Timed, over: Timed, bound: Bound | None = None) -> Figure:
    value, low, high = of.over(over)
    return Figure(name, value, "ratio", bound, low, high)


def router() -> Iterator[Figure]:
    """A token through the router."""
    read = bench("router")
    batch, plain = read("batch"), read("hashmap")
    name = "router: a token in a batch, 4,096 live requests"
    yield Figure(name, batch.median_ns / LIVE, "ns", Bound(40), batch.low_ns / LIVE, batch.high_ns / LIVE)
    yield ratio("router: a batch over a plain HashMap of the same trackers", batch, plain)
    one, two, apart = read("one-thread"), read("two-threads"), read("two-threads-apart")
    yield ratio("router: throughput on two threads over one", one, two)
    yield ratio("router: the same for two routers that share nothing (what the machine gives)", one, apart)
    # Linear is twice; a machine that shares its cores may not give even two threads that share nothing so much.
    linear = min(2.0, one.median_ns / apart.median_ns)
    share = one.median_ns / two.median_ns / linear
    yield Figure("router: two threads on one router, share of linear", share, "ratio", Bound(0.8, at_most=False))


def scheduler() -> Iterator[Figure]:
    """A step of the scheduler."""
    read = bench("schedule_batch")
    for live in (1024, 16384):
        meridian, plain = read(f"meridian/{live}"), read(f"vec/{live}")
        low, high = meridian.low_ns / 1e3, meridian.high_ns / 1e3
        yield Figure(f"schedule_batch: {live:,} requests", meridian.median_ns / 1e3, "us", None, low, high)
        yield ratio(f"schedule_batch: {live:,} requests, over sorting a Vec by phase and age", meridian, plain)


def blocks() -> Iterator[Figure]:
    """One eviction."""
    read = bench("evict_for")
    few, many = read("meridian/1000"), read("meridian/100000")
    yield Figure("evict_for: a block of 100,000", many.median_ns, "ns", None, many.low_ns, many.high_ns)
    # log2 grows by 1.67 from 1,000 to 100,000, a scan by 100; what is between is the cache of the machine.
    yield ratio("evict_for: a block of 100,000 over a block of 1,000", many, few, Bound(5))
    yield ratio("evict_for: a block of 100,000, over the scan of a Vec", many, read("vec/100000"))


def properties() -> Iterator[Figure]:
    """Operations that the property tests generate, counted by themselves."""
    total = 0
    for test, title in (("router", "router"), ("scheduler", "scheduler"), ("blocks_model", "KV blocks")):
        command = ["cargo", "test", "--release", "--locked", "-q", "--workspace", "--test", test, "--", "--nocapture"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        count = sum(int(n) for n in re.findall(r"operations: (\d+)", done.stdout)) if done.returncode == 0 else 0
        total += count
        yield Figure(f"property tests: operations on the {title}, all invariants kept", count, "operations")
    yield Figure("property tests: operations in all", total, "operations", Bound(1e6, at_most=False))


def budget() -> Iterator[Figure]:
    """EAT and RPDI against the reference of the tests (NumPy, float64), on random series."""
    import meridian.budget
    import numpy as np

    sys.path.insert(0, str(ROOT / "python" / "tests"))
    from test_budget_reference import eat_reference, rpdi_reference

    rng = np.random.default_rng(3)
    eat_error = rpdi_error = 0.0
    for _ in range(100):
        values = rng.gamma(0.5, 1.5, size=4000)
        for alpha in (0.05, 0.1, 0.3):
            for got, expected in zip(
                meridian.budget.eat(values.tolist(), alpha), eat_reference(values, alpha), strict=True
            ):
                eat_error = max(eat_error, float(np.max(np.abs(np.array(got) - expected))))
        values = values.astype(np.float32).astype(np.float64)
        difference = np.abs(np.array(meridian.budget.rpdi(values.tolist(), 512)) - rpdi_reference(values, 512))
        rpdi_error = max(rpdi_error, float(np.nanmax(difference)))
    yield Figure("EAT: largest difference from NumPy, 100 series of 4,000", eat_error, "bits or bits^2", Bound(1e-9))
    yield Figure("RPDI: largest difference from NumPy, 100 series of 4,000", rpdi_error, "ratio", Bound(1e-9))


def parts(_pairs: int) -> dict[str, Callable[[], Iterator[Figure]]]:
    """Parts of the area by name."""
    return {"router": router, "scheduler": scheduler, "blocks": blocks, "budget": budget, "properties": properties}
