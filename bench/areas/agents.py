"""Sessions of coding agents: eviction policies in the simulator, against stock vLLM and Belady's bound."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from areas import agents_engine
from areas.bench import MERIDIAN, SERVEGEN, TRACES, write_between
from areas.common import RESULTS, ROOT, WORK, Bound, Figure, say

TRACE = TRACES / "agentic_sessions.jsonl"
STOCK, BELADY = "fcfs", "belady"
# The order of requests stays that of stock vLLM, so that what changes is what eviction does.
ZOO = (
    "tiered-lru",
    "lru",
    "least-computed-first",
    "prefix-value",
    "t-lru",
    "ttl",
    "cost-aware",
    "next-use",
)
# Sessions under way, and the KV blocks of 64 tokens at which stock vLLM hits half of what an unlimited cache would (by
# bisection, `PART=size`). A 7B model on one H200; 52,437 blocks are 3.4 million tokens: 96 GB in
# 8 bits, which is what an H200 has beside the weights. Eight seats: more only share out the same time.
CELLS = ((48, 52_437),)
MAIN = 48
ENGINE = ("--engine", "7b-h200", "--block-tokens", "64", "--max-num-seqs", "8")
TRAIN, TEST = "1/2", "2/2"
METRICS = {
    "hit_rate": "hit rate",
    "computed_again_tokens": "computed again",
    "session_p50_s": "completion p50",
    "session_p95_s": "completion p95",
    "session_work_p50_s": "without users' gaps p50",
    "session_work_p95_s": "without users' gaps p95",
    "ttft_p50_ms": "TTFT p50",
    "ttft_p99_ms": "TTFT p99",
}
# Options to choose from, by mean completion without users' gaps on the training half.
CANDIDATES = {
    "next-use": [{"tool_s": seconds} for seconds in (0, 15, 60, 240, 900)],
    "ttl": [{"ttl_ms": ms} for ms in (10_000, 30_000, 120_000)],
    "t-lru": [{"ttft_ms": ms} for ms in (200, 1000, 5000)],
    "cost-aware": [{}],
}


def replayed(*args: str) -> list[dict[str, Any]]:
    """The runs of `meridian bench replay`, the baseline's first. With MERIDIAN_REUSE_RUNS a run that is there is not
    repeated: the simulator gives the same again."""
    kept = WORK / f"agents-{hashlib.sha256(chr(0).join(args).encode()).hexdigest()[:16]}.json"
    if not (os.environ.get("MERIDIAN_REUSE_RUNS") and kept.exists()):
        say(f"  meridian bench replay {' '.join(args)}")
        command = [MERIDIAN, "--json", "bench", "replay", *args]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"error: meridian bench replay {' '.join(args)}: {done.stdout.strip()[-2000:]}")
        WORK.mkdir(parents=True, exist_ok=True)
        kept.write_text(done.stdout)
    runs: list[dict[str, Any]] = json.loads(kept.read_text())["runs"]
    return runs


def sessions(at_once: int, kv_blocks: int, *args: str, policies: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """The metrics of stock vLLM and of eviction policies, by name."""
    named = [word for policy in policies for word in ("--policy", f"dispatch=fcfs,eviction={policy}")]
    cell = (
        "--trace",
        str(TRACE),
        *ENGINE,
        "--at-once",
        str(at_once),
        "--kv-blocks",
        str(kv_blocks),
    )
    runs = replayed(*cell, *args, *named)
    return {name: run["metrics"] for name, run in zip((STOCK, *policies), runs, strict=True)}


def of_bound(metrics: dict[str, dict[str, Any]], policy: str) -> float:
    """How far a policy is from LRU to Belady's bound, in hit rate."""
    low, high = metrics[STOCK]["hit_rate"], metrics[BELADY]["hit_rate"]
    return (metrics[policy]["hit_rate"] - low) / (high - low)


def size() -> Iterator[Figure]:
    """The KV memory of each cell: where stock hits half of what an unlimited cache would."""
    for at_once, kv_blocks in CELLS:
        low, high = int(0.6 * kv_blocks), int(1.4 * kv_blocks)
        while high - low > 400:
            middle = (low + high) // 2
            metrics = sessions(at_once, middle)[STOCK]
            below = metrics["hit_rate"] < metrics["hit_rate_unlimited"] / 2
            low, high = (middle, high) if below else (low, middle)
        yield Figure(f"sessions: KV blocks for half the hits, {at_once} at once", high, "blocks of 64 tokens")


def tune() -> Iterator[Figure]:
    """The options of each policy, chosen on the training half."""
    for name, candidates in CANDIDATES.items():
        if len(candidates) < 2:
            continue
        policies = tuple(name + json.dumps(options) for options in candidates)
        found = sessions(MAIN, dict(CELLS)[MAIN], "--part", TRAIN, policies=policies)
        for policy in policies:
            ratio = found[policy]["session_work_mean_s"] / found[STOCK]["session_work_mean_s"]
            title = f"tuning: {policy}: mean completion without users' gaps over stock, training half"
            yield Figure(title, ratio, "ratio")


def simulator() -> Iterator[Figure]:
    """All 560 sessions under every policy, at several numbers of sessions; the bounds are those of the main cell."""
    rows: list[str] = []
    kept: dict[str, Any] = {}
    for at_once, kv_blocks in CELLS:
        metrics = sessions(at_once, kv_blocks, policies=(*ZOO, BELADY))
        kept[str(at_once)] = {"kv_blocks": kv_blocks, "metrics": metrics}
        rows += table(at_once, kv_blocks, metrics)
        stock = metrics[STOCK]
        best = min(ZOO, key=lambda name: metrics[name]["session_work_mean_s"])
        is_main = at_once == MAIN
        where = f"sessions, {at_once} at once"
        half = stock["hit_rate"] / stock["hit_rate_unlimited"]
        yield Figure(f"{where}: stock's hits, of an unlimited cache's", half, "share")
        yield Figure(f"{where}: hit rate of Belady's bound", metrics[BELADY]["hit_rate"], "share")
        bounds = {
            "computed_again_tokens": Bound(0.6),
            "session_p50_s": Bound(0.75),
            "session_p95_s": Bound(0.7),
        }
        for name in ZOO:
            label = f"{where}: {name}{' (best)' if name == best else ''}"
            for key, title in METRICS.items():
                if key == "hit_rate":
                    continue
                bound = bounds.get(key) if is_main and name == best else None
                yield Figure(
                    f"{label}: {title} over stock",
                    metrics[name][key] / stock[key],
                    "ratio",
                    bound,
                )
            bound = Bound(0.6, at_most=False) if is_main and name == best else None
            yield Figure(
                f"{label}: hit rate, from LRU to Belady",
                of_bound(metrics, name),
                "share of the way",
                bound,
            )
    (RESULTS / "agents.json").write_text(json.dumps(kept, indent=1) + "\n")
    write_between(ROOT / "docs" / "src" / "policies.md", "agents", rows)


def table(at_once: int, kv_blocks: int, metrics: dict[str, dict[str, Any]]) -> list[str]:
    """Every policy of a cell, for the documentation."""
    stock = metrics[STOCK]
    titles = " | ".join(METRICS.values())
    unlimited = f"an unlimited cache hits {100 * stock['hit_rate_unlimited']:.1f} %"
    rows = [
        "",
        f"**{at_once} sessions at once, {kv_blocks:,} KV blocks of 64 tokens; {unlimited}**",
        "",
        f"| eviction | {titles} | LRU to Belady |",
        "|---" * (len(METRICS) + 2) + "|",
    ]
    for name, of in metrics.items():
        cells = [f"{100 * of['hit_rate']:.1f} %"]
        cells += [f"{of[key] / stock[key]:.2f}" for key in METRICS if key != "hit_rate"]
        shown = {STOCK: "stock vLLM", BELADY: "Belady's bound"}.get(name, f"`{name}`")
        rows.append(f"| {shown} | {' | '.join(cells)} | {of_bound(metrics, name):.2f} |")
    return rows


def held_out() -> Iterator[Figure]:
    """The half of the sessions that no option is chosen on."""
    kv_blocks = dict(CELLS)[MAIN]
    metrics = sessions(MAIN, kv_blocks, "--part", TEST, policies=(*ZOO, BELADY))
    stock = metrics[STOCK]
    for name in ZOO:
        for key in ("computed_again_tokens", "session_p50_s", "session_p95_s"):
            title = f"held-out half, {MAIN} at once: {name}: {METRICS[key]} over stock"
            yield Figure(title, metrics[name][key] / stock[key], "ratio")
        title = f"held-out half, {MAIN} at once: {name}: hit rate, from LRU to Belady"
        yield Figure(title, of_bound(metrics, name), "share of the way")


# Orders: other sessions meet.
SEEDS = (1, 2, 3, 4, 5)


def orders() -> Iterator[Figure]:
    """The same sessions in other orders."""
    ratios: dict[str, list[float]] = {}
    for seed in SEEDS:
        policies = ("next-use", "cost-aware", BELADY)
        metrics = sessions(MAIN, dict(CELLS)[MAIN], "--seeds", str(seed), policies=policies)
        for name in policies[:-1]:
            for key in ("computed_again_tokens", "session_p50_s", "session_p95_s"):
                title = f"five orders: {name}: {METRICS[key]} over stock"
                ratios.setdefault(title, []).append(metrics[name][key] / metrics[STOCK][key])
            ratios.setdefault(f"five orders: {name}: hit rate, from LRU to Belady", []).append(of_bound(metrics, name))
    for title, values in ratios.items():
        unit = "ratio, lowest and highest" if title.endswith("stock") else "share of the way, lowest and highest"
        yield Figure(title, median(values), unit, low=min(values), high=max(values))


# Traffic without sessions of agents, where nothing may be lost: seeds, rates below and above what stock completes.
OTHERS = {
    "ServeGen": (("--trace", str(SERVEGEN), "--requests", "3000", "--engine", "7b-h100"), ("2.1", "2.6")),
    "multi-turn": (
        ("--workload", "multi-turn", "--requests", "2000", "--engine", "8b-a100"),
        ("0.5", "1.5"),
    ),
}
NO_WORSE = (
    "ttft_p50_ms",
    "ttfo_p50_ms",
    "ttfo_p99_ms",
    "itl_output_p99_ms",
    "e2e_mean_ms",
)
WITHIN = Bound(1.02)


def others() -> Iterator[Figure]:
    """ServeGen and multi-turn: the policies against stock vLLM. `tiered-lru` tells the effect of eviction from that of
    Meridian's other rules for KV memory."""
    policies = ("tiered-lru", "cost-aware", "next-use")
    for name, (args, rates) in OTHERS.items():
        for rate in rates:
            named = [word for policy in policies for word in ("--policy", f"dispatch=fcfs,eviction={policy}")]
            runs = replayed(*args, "--rate", rate, "--seeds", "1,2", *named)
            every = len(policies) + 1
            stock = [run["metrics"] for run in runs[::every]]
            for number, policy in enumerate(policies):
                ours = [run["metrics"] for run in runs[number + 1 :: every]]
                for key in (*NO_WORSE, "throughput_tok_s"):
                    of = [a[key] / b[key] for a, b in zip(ours, stock, strict=True)]
                    of = [1 / ratio for ratio in of] if key == "throughput_tok_s" else of
                    what = "throughput, inverse" if key == "throughput_tok_s" else key
                    bound = WITHIN if policy != "tiered-lru" else None
                    title = f"{name}, {rate}/s: {policy}: {what} over stock"
                    yield Figure(
                        title,
                        median(of),
                        "ratio, lowest and highest",
                        bound,
                        min(of),
                        max(of),
                    )


def parts(pairs: int) -> dict[str, Callable[[], Iterator[Figure]]]:
    """The parts of the area; the simulator's runs do not vary, so `pairs` is for the real engine."""
    return {
        "size": size,
        "tune": tune,
        "simulator": simulator,
        "held-out": held_out,
        "orders": orders,
        "others": others,
        **agents_engine.parts(),
    }
