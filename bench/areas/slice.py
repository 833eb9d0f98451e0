"""The slice: a component in the real vLLM engine."""

from __future__ import annotations

import csv
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from areas.common import ROOT, WORK, Bound, Figure, compared, metrics_of, over_pairs, recorded, say, seeds

POLICIES = ROOT / "target" / "policies"
OUTPUT_FIRST = str(POLICIES / "output-first.wasm")
FCFS = str(POLICIES / "fcfs.wasm")


def write_trace(name: str, rows: list[tuple[int, int, int]]) -> str:
    """A trace of requests that arrive together: (prompt, think, output) tokens each."""
    WORK.mkdir(parents=True, exist_ok=True)
    path = WORK / name
    with path.open("w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(("arrival_s", "prompt_tokens", "think_tokens", "output_tokens"))
        writer.writerows((0, *row) for row in rows)
    return str(path)


def stock_equality() -> Iterator[Figure]:
    """64 greedy requests under tight KV: outputs, steps and preemptions of stock, native:fcfs and fcfs.wasm.

    bfloat16 on purpose: its rounding depends on the batch, so equal outputs also show equal batches.
    """
    rng = random.Random(7)
    rows = [(rng.randint(20, 120), rng.randint(10, 120), rng.randint(10, 80)) for _ in range(64)]
    trace = write_trace("equality.csv", rows)

    # Whom to preempt is the eviction policy's to say, unless KV memory is left to vLLM.
    args = (
        "--trace",
        trace,
        "--at-once",
        "--kv-blocks",
        "80",
        "--max-num-seqs",
        "64",
        "--dtype",
        "bfloat16",
        "--compare-outputs",
    )
    args += ("--set", "kv_memory.enabled=false", "--policy", "native:fcfs", "--policy", FCFS)
    (comparison,) = compared("equality", *args)
    (stock,) = metrics_of(comparison, "stock")
    bound = Bound(1, at_most=False)
    yield Figure("stock equality: preemptions in the stock run", preemptions(stock), "preemptions", bound)
    for name, label in (("native:fcfs", "fcfs"), ("fcfs.wasm", "fcfs.wasm")):
        (other,) = metrics_of(comparison, label)
        yield Figure(
            f"stock equality: {name}, outputs that differ", other["outputs_differ"], "of 64 requests", Bound(0)
        )
        steps = abs(other["steps"] - stock["steps"])
        yield Figure(f"stock equality: {name}, difference in steps", steps, "steps", Bound(0))
        preempted = abs(preemptions(other) - preemptions(stock))
        yield Figure(f"stock equality: {name}, difference in preemptions", preempted, "preemptions", Bound(0))


def preemptions(metrics: dict[str, Any]) -> float:
    """In all phases together."""
    return sum(metrics[f"preemptions_{phase}"] for phase in ("prefill", "think", "output"))


def pairs_of(scenario: str, pairs: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Metrics of stock and output-first.wasm, side by side, in both orders; a seed a pair."""
    (comparison,) = compared(scenario, "--scenario", scenario, "--seeds", seeds(pairs), "--policy", OUTPUT_FIRST)
    stock, wasm = (metrics_of(comparison, policy) for policy in ("stock", "output-first.wasm"))
    if any(run["faults"] or not run["decided_by_policy"] for run in wasm):
        sys.exit("error: the policy did not decide this run")
    return list(zip(stock, wasm, strict=True))


def ratios(runs: list[tuple[dict[str, Any], dict[str, Any]]], key: str) -> list[float]:
    return [wasm[key] / stock[key] for stock, wasm in runs]


def loaded(pairs: int) -> Iterator[Figure]:
    """KV ample, the batch full: what output-first.wasm does to the tail, and what it costs."""
    runs = pairs_of("loaded", pairs)
    for title, key, bound in (
        ("p99 output ITL", "itl_output_p99_ms", Bound(0.35)),
        ("p99 TTOT", "ttot_p99_ms", Bound(0.35)),
        ("throughput", "throughput_tok_s", Bound(0.98, at_most=False)),
        ("TTFO p50", "ttfo_p50_ms", Bound(1.0)),
        ("TTFO p99", "ttfo_p99_ms", None),
        ("TTFT p50", "ttft_p50_ms", None),
        ("TTFT p99", "ttft_p99_ms", None),
        ("output ITL p50", "itl_output_p50_ms", None),
        ("think ITL p99", "itl_think_p99_ms", None),
    ):
        yield over_pairs(f"loaded: {title}, output-first.wasm over stock", ratios(runs, key), "ratio", bound)
    for title, key, unit in (
        ("p99 output ITL", "itl_output_p99_ms", "ms"),
        ("p99 TTOT", "ttot_p99_ms", "ms"),
        ("TTFT p50", "ttft_p50_ms", "ms"),
        ("TTFO p50", "ttfo_p50_ms", "ms"),
        ("throughput", "throughput_tok_s", "tok/s"),
    ):
        yield over_pairs(f"loaded: {title}, stock", [stock[key] for stock, _ in runs], unit)
        yield over_pairs(f"loaded: {title}, output-first.wasm", [wasm[key] for _, wasm in runs], unit)


def kv_tight(pairs: int) -> Iterator[Figure]:
    """KV short: who is preempted."""
    runs = pairs_of("kv-tight", pairs)
    worst = max(wasm["preempted_avoidably"] for _, wasm in runs)
    yield Figure("kv-tight: output-phase preempted while thinking held blocks, worst run", worst, "requests", Bound(0))
    yield over_pairs("kv-tight: the same, stock", [stock["preempted_avoidably"] for stock, _ in runs], "requests")
    bound = Bound(0.97, at_most=False)
    key = "throughput_tok_s"
    yield over_pairs("kv-tight: throughput, output-first.wasm over stock", ratios(runs, key), "ratio", bound)
    for name, side in (("stock", 0), ("output-first.wasm", 1)):
        yield over_pairs(f"kv-tight: preemptions, {name}", [preemptions(run[side]) for run in runs], "preemptions")
    yield over_pairs(
        "kv-tight: p99 output ITL, output-first.wasm over stock", ratios(runs, "itl_output_p99_ms"), "ratio"
    )


def deciding() -> Iterator[Figure]:
    """What deciding costs: in isolation, and as a share of the real `schedule()`."""
    say("  meridian bench micro")
    meridian = [str(ROOT / "target" / "release" / "meridian"), "bench", "micro", "--json"]
    done = subprocess.run([*meridian, "--policies", str(POLICIES)], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    yield Figure("deciding: no-op call", report["noop_call_ns"], "ns", Bound(150))
    bounds = {1024: Bound(1.5), 4096: Bound(1.3)}
    rows = [row for row in report["rows"] if row["slot"] == "dispatch"]
    for row in rows:
        n = row["candidates"]
        name = f"deciding: WebAssembly over native, N={n}"
        yield Figure(name, row["ratio"], "ratio", bounds.get(n), row["ratio_low"], row["ratio_high"])
    for row in rows:
        yield Figure(f"deciding: WebAssembly, N={row['candidates']}", row["policy_ns"] / 1e3, "us")

    rng = random.Random(0)
    rows = [(rng.randint(16, 48), rng.randint(60, 160), rng.randint(160, 220)) for _ in range(128)]
    trace = write_trace("own-time.csv", rows)
    for name, policy in (("output-first.wasm", OUTPUT_FIRST), ("native:output-first", "native:output-first")):
        shares, own = own_times(f"own-time-{'wasm' if policy == OUTPUT_FIRST else 'native'}", policy, trace)
        title = f"deciding: Meridian's own time over vLLM's in schedule(), 128 running, {name}"
        yield over_pairs(title, shares, "ratio", Bound(0.10))
        yield Figure(f"deciding: Meridian's own time in schedule(), 128 running, {name}", median(own), "us")


def own_times(label: str, policy: str, trace: str) -> tuple[list[float], list[float]]:
    """Of each step with 128 running requests: Meridian's own time over vLLM's in the same `schedule()`, and in us."""
    compared(label, "--trace", trace, "--at-once", "--max-num-seqs", "128", "--without-stock", "--policy", policy)
    _, document = recorded(label, policy.rpartition("/")[2].removeprefix("native:"))
    steps, own_ns = document["steps"], document["meridian"]["own_ns"]
    own_us = [ns / 1e3 for ns in own_ns[-len(steps["running"]) :]]
    full = [i for i, running in enumerate(steps["running"]) if running == 128]
    # What is left of schedule() without Meridian's part is vLLM's own code, timed in the same step.
    shares = [own_us[i] / (steps["schedule_us"][i] - own_us[i]) for i in full]
    return shares, [own_us[i] for i in full]


def hostile() -> Iterator[Figure]:
    """Hostile components inside the real engine: kinds after which every request had finished, with equal tokens."""
    test = "python/tests/vllm/test_engine.py::test_every_hostile_component_is_survived"
    config = str(ROOT / "python" / "pyproject.toml")
    folder = ROOT / "target" / "hostile"
    folder.mkdir(parents=True, exist_ok=True)
    # The whole workspace, as the tests build it: another selection would compile wasmtime again.
    subprocess.run(["cargo", "build", "--release", "--locked", "-q", "--workspace", "--examples"], cwd=ROOT, check=True)
    hostile = ROOT / "target" / "release" / "examples" / "hostile"
    kinds = subprocess.run([hostile, folder], capture_output=True, text=True, check=True).stdout
    (folder / "kinds.txt").write_text(kinds)
    command = [sys.executable, "-m", "pytest", "-q", "-c", config, "--rootdir", str(ROOT), str(ROOT / test)]
    done = subprocess.run(command, capture_output=True, text=True)
    count = len(kinds.splitlines())
    survived = count if done.returncode == 0 else 0
    yield Figure("hostile components survived in the engine", survived, f"of {count}", Bound(count, at_most=False))


def parts(pairs: int) -> dict[str, Callable[[], Iterator[Figure]]]:
    return {
        "equality": stock_equality,
        "deciding": deciding,
        "hostile": hostile,
        "loaded": lambda: loaded(pairs),
        "kv-tight": lambda: kv_tight(pairs),
    }
