"""Sessions of agents, urgent requests and the cost of it all in the real vLLM engine. `agents.py` names these parts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from areas.bench import TRACES
from areas.common import ROOT, Bound, Figure, say

VLLM = ROOT / "bench" / "vllm"
# Keeps the order of the engine, so that only the eviction policy differs.
FCFS = str(ROOT / "target" / "policies" / "fcfs.wasm")
TRACE = TRACES / "agentic_sessions.jsonl"
ZOO = (
    "native:next-use",
    "native:cost-aware",
    "native:ttl",
    "native:t-lru",
    "native:tiered-lru",
    "native:lru",
    "native:prefix-value",
)
# Stock finds about half of what an unlimited cache would: 0.34 of it with 1,600 blocks, 0.93 with 1,900.
KV_BLOCKS = 1680


def ran(script: str, *args: str) -> dict[str, Any]:
    """A script of bench/vllm: the JSON object that it prints."""
    say(f"  {script} {' '.join(args)}")
    done = subprocess.run([sys.executable, str(VLLM / script), *args], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"error: bench/vllm/{script} failed with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def sessions(*args: str) -> dict[str, Any]:
    """One run of the scaled sessions."""
    return ran(
        "agent_sessions.py",
        "--trace",
        str(TRACE),
        "--kv-blocks",
        str(KV_BLOCKS),
        "--outputs",
        *args,
    )


def closed_loop() -> Iterator[Figure]:
    """The scaled sessions under stock and under each policy of the zoo; float32, so that outputs can be compared."""
    stock = sessions("--scheduler", "stock")
    yield Figure(
        "engine: hit rate over unlimited, stock",
        stock["hit_rate"] / stock["hit_rate_unlimited"],
        "ratio",
    )
    for eviction in ZOO:
        ours = sessions("--scheduler", FCFS, "--eviction", eviction)
        name = f"engine, {eviction.removeprefix('native:')}:"
        yield Figure(
            f"{name} recomputed tokens over stock",
            ours["recomputed_tokens"] / stock["recomputed_tokens"],
            "ratio",
        )
        yield Figure(
            f"{name} hit rate above stock",
            100 * (ours["hit_rate"] - stock["hit_rate"]),
            "points",
        )
        for key in (
            "completion_p50_s",
            "completion_p95_s",
            "ttft_p50_ms",
            "ttft_p95_ms",
        ):
            yield Figure(
                f"{name} {key.rpartition('_')[0].replace('_', ' ')} over stock",
                ours[key] / stock[key],
                "ratio",
            )
        differ = sum(
            a != b
            for one, other in zip(stock["outputs"], ours["outputs"], strict=True)
            for a, b in zip(one, other, strict=True)
        )
        yield Figure(
            f"{name} turns whose outputs differ",
            differ,
            f"of {stock['turns']} turns",
            Bound(0),
        )


def accounting() -> Iterator[Figure]:
    """The invariants of the block pool over many requests, under policies whose order depends on time."""
    for eviction in ("native:cost-aware", "native:ttl"):
        report = ran("pool_soak.py", "--requests", "50000", "--eviction", eviction)
        name = eviction.removeprefix("native:")
        yield Figure(
            f"block pool, {name}: requests",
            report["requests"],
            "requests",
            Bound(5e4, at_most=False),
        )
        yield Figure(
            f"block pool, {name}: violations",
            report["violations"],
            "violations",
            Bound(0),
        )


def urgent() -> Iterator[Figure]:
    """An urgent request's first token while the engine is full, against vLLM's own priority policy."""
    stock = ran("urgent_requests.py", "--scheduler", "stock", "--outputs")
    ours = ran("urgent_requests.py", "--scheduler", "native:priority", "--preempt", "--outputs")
    yield Figure("urgent: TTFT p99, stock", stock["urgent_ttft_p99_ms"], "ms")
    yield Figure("urgent: TTFT p99, Meridian", ours["urgent_ttft_p99_ms"], "ms")
    yield Figure(
        "urgent: TTFT p99 over stock",
        ours["urgent_ttft_p99_ms"] / stock["urgent_ttft_p99_ms"],
        "ratio",
        Bound(0.1),
    )
    yield Figure(
        "urgent: throughput over stock",
        ours["throughput_tok_s"] / stock["throughput_tok_s"],
        "ratio",
        Bound(0.97, at_most=False),
    )
    yield Figure(
        "urgent: most preemptions of a request",
        ours["most_preemptions_of_a_request"],
        "preemptions",
        Bound(3),
    )
    yield Figure("urgent: preemptions", ours["preemptions"], "preemptions")
    differ = sum(a != b for a, b in zip(stock["outputs"], ours["outputs"], strict=True))
    yield Figure(
        "urgent: requests whose outputs differ",
        differ,
        f"of {len(stock['outputs'])} requests",
        Bound(0),
    )


def cost() -> Iterator[Figure]:
    """Meridian's share of a step with 128 running, 1e5 cached blocks and 2,000 sessions."""
    for eviction in ("native:tiered-lru", "native:cost-aware", "native:ttl"):
        runs = [ran("step_share.py", "--eviction", eviction)]
        name = f"cost, {eviction.removeprefix('native:')}:"
        bound = Bound(0.05)
        yield Figure(
            f"{name} share of a step",
            median(run["share_of_step"] for run in runs),
            "ratio",
            bound,
        )
        yield Figure(
            f"{name} own time of a step, mean",
            median(run["own_ms_mean"] for run in runs),
            "ms",
        )
        yield Figure(
            f"{name} own time of a step, p99",
            median(run["own_ms_p99"] for run in runs),
            "ms",
        )
        yield Figure(f"{name} step, median", median(run["step_ms_p50"] for run in runs), "ms")
        yield Figure(
            f"{name} cached blocks",
            min(run["cached_blocks"] for run in runs),
            "blocks",
            Bound(1e5, at_most=False),
        )


def parts() -> dict[str, Callable[[], Iterator[Figure]]]:
    return {
        "engine": closed_loop,
        "accounting": accounting,
        "urgent": urgent,
        "cost": cost,
    }
