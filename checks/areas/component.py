"""A component in the real vLLM engine: equal to stock where it must be, what it gains, and what deciding costs."""

from __future__ import annotations

import csv
import random
import sys
from collections.abc import Iterator
from statistics import median
from typing import Any

from checks.figures import Figure, Part, Row, over_pairs, read
from checks.run import POLICIES, WORK, compared, meridian, metrics_of, preemptions, recorded, seeds

OUTPUT_FIRST = POLICIES / "output-first.wasm"
# Who decides in an engine whose own time is measured.
OWN_TIME = {
    "deciding: Meridian's own time{over} in schedule(), 128 running, output-first.wasm": str(OUTPUT_FIRST),
    "deciding: Meridian's own time{over} in schedule(), 128 running, native:output-first": "native:output-first",
    "following in stock mode: own time{over} in schedule(), 128 running": "native:fcfs",
}
MICRO_BOUNDS = {1024: "<= 1.5", 4096: "<= 1.3"}
Pair = tuple[dict[str, Any], dict[str, Any]]


def write_trace(name: str, rows: list[tuple[int, int, int]]) -> str:
    """A trace of requests that arrive together: (prompt, think, output) tokens each."""
    path = WORK / name
    with path.open("w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(("arrival_s", "prompt_tokens", "think_tokens", "output_tokens"))
        writer.writerows((0, *row) for row in rows)
    return str(path)


def equality(_: int) -> Iterator[Figure]:
    """64 greedy requests under tight KV: outputs, steps and preemptions of stock, native:fcfs and fcfs.wasm.

    bfloat16 on purpose: its rounding depends on the batch, so equal outputs also show equal batches.
    """
    rng = random.Random(7)
    rows = [(rng.randint(20, 120), rng.randint(10, 120), rng.randint(10, 80)) for _ in range(64)]
    args = ["--trace", write_trace("equality.csv", rows), "--at-once", "--kv-blocks", "80", "--max-num-seqs", "64"]
    # Whom to preempt is the eviction policy's to say, unless KV memory is left to vLLM.
    args += ["--dtype", "bfloat16", "--compare-outputs", "--set", "kv_memory.enabled=false"]
    args += ["--policy", "native:fcfs", "--policy", str(POLICIES / "fcfs.wasm")]
    (comparison,) = compared("equality", *args)
    (stock,) = metrics_of(comparison, "stock")
    yield Figure("stock equality: preemptions in the stock run", preemptions(stock), "preemptions", ">= 1")
    for name, label in (("native:fcfs", "fcfs"), ("fcfs.wasm", "fcfs.wasm")):
        (other,) = metrics_of(comparison, label)
        measured = {
            "outputs that differ": (other["outputs_differ"], "of 64 requests"),
            "difference in steps": (abs(other["steps"] - stock["steps"]), "steps"),
            "difference in preemptions": (abs(preemptions(other) - preemptions(stock)), "preemptions"),
        }
        for what, (value, unit) in measured.items():
            yield Figure(f"stock equality: {name}, {what}", value, unit, "<= 0")


def pairs_of(scenario: str, pairs: int) -> list[Pair]:
    """Metrics of stock and output-first.wasm, side by side, in both orders; a seed a pair."""
    (comparison,) = compared(scenario, "--scenario", scenario, "--seeds", seeds(pairs), "--policy", OUTPUT_FIRST)
    stock, wasm = (metrics_of(comparison, policy) for policy in ("stock", "output-first.wasm"))
    if any(run["faults"] or not run["decided_by_policy"] for run in wasm):
        sys.exit("error: the policy did not decide this run")
    return list(zip(stock, wasm, strict=True))


LOADED_RATIOS = {
    "p99 output ITL": ("itl_output_p99_ms", "<= 0.35"),
    "p99 TTOT": ("ttot_p99_ms", "<= 0.35"),
    "throughput": ("throughput_tok_s", ">= 0.98"),
    "TTFO p50": ("ttfo_p50_ms", "<= 1"),
    "TTFO p99": ("ttfo_p99_ms", None),
    "TTFT p50": ("ttft_p50_ms", None),
    "TTFT p99": ("ttft_p99_ms", None),
    "output ITL p50": ("itl_output_p50_ms", None),
    "think ITL p99": ("itl_think_p99_ms", None),
}
LOADED_VALUES = {"p99 output ITL": "ms", "p99 TTOT": "ms", "TTFT p50": "ms", "TTFO p50": "ms", "throughput": "tok/s"}


def ratio(scenario: str, runs: list[Pair], title: str, key: str, bound: str | None = None) -> Figure:
    """A metric of the component over stock's, of each pair."""
    name = f"{scenario}: {title}, output-first.wasm over stock"
    return over_pairs(name, [wasm[key] / stock[key] for stock, wasm in runs], "ratio", bound)


def loaded(pairs: int) -> Iterator[Figure]:
    """KV ample, the batch full: what output-first.wasm does to the tail, and what it costs."""
    runs = pairs_of("loaded", pairs)
    for title, (key, bound) in LOADED_RATIOS.items():
        yield ratio("loaded", runs, title, key, bound)
    for title, unit in LOADED_VALUES.items():
        for side, name in enumerate(("stock", "output-first.wasm")):
            yield over_pairs(f"loaded: {title}, {name}", [run[side][LOADED_RATIOS[title][0]] for run in runs], unit)


def kv_tight(pairs: int) -> Iterator[Figure]:
    """KV short: who is preempted."""
    runs = pairs_of("kv-tight", pairs)
    worst = max(wasm["preempted_avoidably"] for _, wasm in runs)
    yield Figure("kv-tight: output-phase preempted while thinking held blocks, worst run", worst, "requests", "<= 0")
    yield over_pairs("kv-tight: the same, stock", [stock["preempted_avoidably"] for stock, _ in runs], "requests")
    yield ratio("kv-tight", runs, "throughput", "throughput_tok_s", ">= 0.97")
    for side, name in enumerate(("stock", "output-first.wasm")):
        yield over_pairs(f"kv-tight: preemptions, {name}", [preemptions(run[side]) for run in runs], "preemptions")
    yield ratio("kv-tight", runs, "p99 output ITL", "itl_output_p99_ms")


def deciding(_: int) -> Iterator[Figure]:
    """What deciding costs: in isolation, and as a share of the real `schedule()`."""
    report = meridian("bench", "micro", "--policies", POLICIES)
    yield Figure("deciding: no-op call", report["noop_call_ns"], "ns", "<= 150")
    rows = [row for row in report["rows"] if row["slot"] == "dispatch"]
    for row in rows:
        name = f"deciding: WebAssembly over native, N={row['candidates']}"
        bound = MICRO_BOUNDS.get(row["candidates"])
        yield Figure(name, row["ratio"], "ratio", bound, row["ratio_low"], row["ratio_high"])
    micro = Row("deciding: WebAssembly, N={candidates}", lambda row: row["policy_ns"] / 1e3, "us")
    for row in rows:
        yield from read(row, (micro,))
    rng = random.Random(0)
    trace = [(rng.randint(16, 48), rng.randint(60, 160), rng.randint(160, 220)) for _ in range(128)]
    path = write_trace("own-time.csv", trace)
    for title, policy in OWN_TIME.items():
        shares, own_us = own_times(policy, path)
        yield over_pairs(title.format(over=" over vLLM's"), shares, "ratio", "<= 0.1")
        yield Figure(title.format(over=""), median(own_us), "us")


def own_times(policy: str, trace: str) -> tuple[list[float], list[float]]:
    """Of each step with 128 running requests: Meridian's own time over vLLM's in the same `schedule()`, and in us."""
    name = policy.rpartition("/")[2].removeprefix("native:")
    label = f"own-time-{name}"
    compared(label, "--trace", trace, "--at-once", "--max-num-seqs", "128", "--without-stock", "--policy", policy)
    _, document = recorded(label, name)
    steps, own_ns = document["steps"], document["meridian"]["own_ns"]
    own_us = [ns / 1e3 for ns in own_ns[-len(steps["running"]) :]]
    full = [i for i, running in enumerate(steps["running"]) if running == 128]
    # What is left of schedule() without Meridian's part is vLLM's own code, timed in the same step.
    return [own_us[i] / (steps["schedule_us"][i] - own_us[i]) for i in full], [own_us[i] for i in full]


PARTS: dict[str, Part] = {"equality": equality, "deciding": deciding, "loaded": loaded, "kv-tight": kv_tight}
