"""Sessions of coding agents: eviction policies in the simulator, against stock vLLM and Belady's bound, and in the real
engine; urgent requests, and the cost of it all."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any

from checks.figures import Figure, Part, Row, ranged, read, table
from checks.report import markdown, write_table
from checks.run import MERIDIAN, POLICIES, RESULTS, SERVEGEN, TRACES, WORK, engine, output, say

TRACE = TRACES / "agentic_sessions.jsonl"
STOCK, BELADY = "fcfs", "belady"
# The order of requests stays that of stock vLLM, so that what changes is what eviction does.
ZOO = ("tiered-lru", "lru", "least-computed-first", "prefix-value", "t-lru", "ttl", "cost-aware", "next-use")
# Sessions under way, and the KV blocks of 64 tokens at which stock vLLM hits half of what an unlimited cache would (by
# bisection). A 7B model on one H200; 52,437 blocks are 3.4 million tokens: 96 GB in
# 8 bits, which is what an H200 has beside the weights. Eight seats: more only share out the same time.
AT_ONCE, KV_BLOCKS = 48, 52_437
ENGINE = ("--engine", "7b-h200", "--block-tokens", "64", "--max-num-seqs", "8")
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
HEADLINES = ("computed_again_tokens", "session_p50_s", "session_p95_s")
# Of the best policy.
BOUNDS = {"computed_again_tokens": "<= 0.6", "session_p50_s": "<= 0.75", "session_p95_s": "<= 0.7"}


def replayed(*args: str, policies: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The metrics of `meridian bench replay`, the baseline's first. With MERIDIAN_REUSE_RUNS a run that is there is not
    repeated: the simulator gives the same again."""
    args += tuple(word for policy in policies for word in ("--policy", f"dispatch=fcfs,eviction={policy}"))
    kept = WORK / f"agents-{hashlib.sha256(chr(0).join(args).encode()).hexdigest()[:16]}.json"
    if not (os.environ.get("MERIDIAN_REUSE_RUNS") and kept.exists()):
        say(f"  meridian bench replay {' '.join(args)}")
        kept.write_text(output(MERIDIAN, "--json", "bench", "replay", *args))
    return [run["metrics"] for run in json.loads(kept.read_text())["runs"]]


def sessions(*args: str, policies: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """The metrics of stock vLLM and of eviction policies, by name."""
    cell = ("--trace", str(TRACE), *ENGINE, "--at-once", str(AT_ONCE), "--kv-blocks", str(KV_BLOCKS))
    return dict(zip((STOCK, *policies), replayed(*cell, *args, policies=policies), strict=True))


def of_bound(metrics: dict[str, dict[str, Any]], policy: str) -> float:
    """How far a policy is from LRU to Belady's bound, in hit rate."""
    low, high = metrics[STOCK]["hit_rate"], metrics[BELADY]["hit_rate"]
    return (metrics[policy]["hit_rate"] - low) / (high - low)


def simulator(_: int) -> Iterator[Figure]:
    """All 560 sessions under every policy; the bounds are those of the best."""
    metrics = sessions(policies=(*ZOO, BELADY))
    stock = metrics[STOCK]
    best = min(ZOO, key=lambda name: metrics[name]["session_work_mean_s"])
    where = f"sessions, {AT_ONCE} at once"
    half = stock["hit_rate"] / stock["hit_rate_unlimited"]
    yield Figure(f"{where}: stock's hits, of an unlimited cache's", half, "share")
    yield Figure(f"{where}: hit rate of Belady's bound", metrics[BELADY]["hit_rate"], "share")
    for name in ZOO:
        label = f"{where}: {name}{' (best)' if name == best else ''}"
        bounds = {**BOUNDS, "hit_rate": ">= 0.6"} if name == best else {}
        for key in (key for key in METRICS if key != "hit_rate"):
            ratio = metrics[name][key] / stock[key]
            yield Figure(f"{label}: {METRICS[key]} over stock", ratio, "ratio", bounds.get(key))
        share = of_bound(metrics, name)
        yield Figure(f"{label}: hit rate, from LRU to Belady", share, "share of the way", bounds.get("hit_rate"))
    kept = {str(AT_ONCE): {"kv_blocks": KV_BLOCKS, "metrics": metrics}}
    (RESULTS / "agents.json").write_text(json.dumps(kept, indent=1) + "\n")
    rows = []
    for name, of in metrics.items():
        shown = {STOCK: "stock vLLM", BELADY: "Belady's bound"}.get(name, f"`{name}`")
        ratios = [f"{of[key] / stock[key]:.2f}" for key in METRICS if key != "hit_rate"]
        rows.append([shown, f"{100 * of['hit_rate']:.1f} %", *ratios, f"{of_bound(metrics, name):.2f}"])
    unlimited = f"an unlimited cache hits {100 * stock['hit_rate_unlimited']:.1f} %"
    head = f"**{AT_ONCE} sessions at once, {KV_BLOCKS:,} KV blocks of 64 tokens; {unlimited}**"
    shown = markdown(("eviction", *METRICS.values(), "LRU to Belady"), rows)
    write_table("results", "agents", [head, "", *shown])


def held_out(_: int) -> Iterator[Figure]:
    """The half of the sessions that no option is chosen on."""
    metrics = sessions("--part", "2/2", policies=(*ZOO, BELADY))
    for name in ZOO:
        label = f"held-out half, {AT_ONCE} at once: {name}"
        for key in HEADLINES:
            yield Figure(f"{label}: {METRICS[key]} over stock", metrics[name][key] / metrics[STOCK][key], "ratio")
        yield Figure(f"{label}: hit rate, from LRU to Belady", of_bound(metrics, name), "share of the way")


def orders(_: int) -> Iterator[Figure]:
    """The same sessions in five other orders, in which other sessions meet."""
    policies = ("next-use", "cost-aware", BELADY)
    runs = [sessions("--seeds", str(seed), policies=policies) for seed in range(1, 6)]
    for name in policies[:-1]:
        for key in HEADLINES:
            ratios = [metrics[name][key] / metrics[STOCK][key] for metrics in runs]
            yield ranged(f"five orders: {name}: {METRICS[key]} over stock", ratios, "ratio, lowest and highest")
        shares = [of_bound(metrics, name) for metrics in runs]
        title = f"five orders: {name}: hit rate, from LRU to Belady"
        yield ranged(title, shares, "share of the way, lowest and highest")


# Traffic without sessions of agents, where nothing may be lost: rates below and above what stock completes.
OTHERS = {
    "ServeGen": (("--trace", str(SERVEGEN), "--requests", "3000", "--engine", "7b-h100"), ("2.1", "2.6")),
    "multi-turn": (("--workload", "multi-turn", "--requests", "2000", "--engine", "8b-a100"), ("0.5", "1.5")),
}
NO_WORSE = ("ttft_p50_ms", "ttfo_p50_ms", "ttfo_p99_ms", "itl_output_p99_ms", "e2e_mean_ms", "throughput_tok_s")


def others(_: int) -> Iterator[Figure]:
    """ServeGen and multi-turn: the policies against stock vLLM. `tiered-lru` tells the effect of eviction from that of
    Meridian's other rules for KV memory."""
    policies = ("tiered-lru", "cost-aware", "next-use")
    every = len(policies) + 1
    for name, (args, rates) in OTHERS.items():
        for rate in rates:
            runs = replayed(*args, "--rate", rate, "--seeds", "1,2", policies=policies)
            for number, policy in enumerate(policies, 1):
                pairs = list(zip(runs[number::every], runs[::every], strict=True))
                bound = "<= 1.02" if policy != "tiered-lru" else None
                for key in NO_WORSE:
                    inverse = key == "throughput_tok_s"
                    ratios = [b[key] / a[key] if inverse else a[key] / b[key] for a, b in pairs]
                    what = "throughput, inverse" if inverse else key
                    title = f"{name}, {rate}/s: {policy}: {what} over stock"
                    yield ranged(title, ratios, "ratio, lowest and highest", bound)


# In the real engine; float32, so that outputs can be compared.
ENGINE_ZOO = ("next-use", "cost-aware", "ttl", "t-lru", "tiered-lru", "lru", "prefix-value")
# Stock finds about half of what an unlimited cache would: 0.34 of it with 1,600 blocks, 0.93 with 1,900.
ENGINE_KV_BLOCKS = 1680


def differing(one: list[Any], other: list[Any]) -> int:
    """Outputs that are not the same."""
    return sum(a != b for a, b in zip(one, other, strict=True))


def over(key: str) -> Any:
    """Ours over stock's."""
    return lambda m: m["ours"][key] / m["stock"][key]


CLOSED_LOOP = (
    Row("engine, {name}: recomputed tokens over stock", over("recomputed_tokens"), "ratio"),
    Row(
        "engine, {name}: hit rate above stock",
        lambda m: 100 * (m["ours"]["hit_rate"] - m["stock"]["hit_rate"]),
        "points",
    ),
    *(
        Row(f"engine, {{name}}: {key.rpartition('_')[0].replace('_', ' ')} over stock", over(key), "ratio")
        for key in ("completion_p50_s", "completion_p95_s", "ttft_p50_ms", "ttft_p95_ms")
    ),
    Row(
        "engine, {name}: turns whose outputs differ",
        lambda m: sum(differing(*pair) for pair in zip(m["stock"]["outputs"], m["ours"]["outputs"], strict=True)),
        "of {stock[turns]} turns",
        "<= 0",
    ),
)


def closed_loop(_: int) -> Iterator[Figure]:
    """The scaled sessions under stock and under each policy of the zoo."""
    stock = engine("agent_sessions", trace=TRACE, kv_blocks=ENGINE_KV_BLOCKS)
    ratio = stock["hit_rate"] / stock["hit_rate_unlimited"]
    yield Figure("engine: hit rate over unlimited, stock", ratio, "ratio")
    for name in ENGINE_ZOO:
        # The dispatch policy keeps the order of the engine, so that only the eviction policy differs.
        by = {"scheduler": POLICIES / "fcfs.wasm", "eviction": f"native:{name}"}
        ours = engine("agent_sessions", trace=TRACE, kv_blocks=ENGINE_KV_BLOCKS, **by)
        yield from read({"name": name, "stock": stock, "ours": ours}, CLOSED_LOOP)


def urgents(_: int) -> list[dict[str, Any]]:
    """An urgent request's first token while the engine is full, against vLLM's own priority policy."""
    stock = engine("urgent_requests", scheduler="stock")
    return [{"stock": stock, "ours": engine("urgent_requests", scheduler="native:priority", preempt=True)}]


def blocks_of_prompts(_: int) -> Iterator[Figure]:
    """Who is preempted when a long prompt and short requests run short of blocks; steps that are empty for it."""
    found = engine("preemptions")
    title = "a prompt of 32,000 tokens beside 50 short requests"
    yield Figure(f"{title}: its time to the end over stock, at most", max(found["over"]), "ratio", "<= 1.1")
    yield Figure(f"{title}: its preemptions", found["preemptions"], "preemptions", "<= 0")
    what = f"violations in {found['sequences']:,} random sequences, empty steps among them"
    yield Figure(what, len(found["violations"]), "violations", "<= 0")


def of_zoo(script: str, *names: str, **options: Any) -> list[dict[str, Any]]:
    """A script under some policies."""
    return [{"name": name, **engine(script, eviction=f"native:{name}", **options)} for name in names]


PARTS: dict[str, Part] = {
    "simulator": simulator,
    "held-out": held_out,
    "orders": orders,
    "others": others,
    "engine": closed_loop,
    "prompts": blocks_of_prompts,
    # The invariants of the block pool over many requests, under policies whose order depends on time.
    "accounting": table(
        lambda _: of_zoo("pool_soak", "cost-aware", "ttl", requests=50_000),
        Row("block pool, {name}: requests", "requests", "requests", ">= 5e4"),
        Row("block pool, {name}: violations", "violations", "violations", "<= 0"),
    ),
    "urgent": table(
        urgents,
        Row("urgent: TTFT p99, stock", "stock.urgent_ttft_p99_ms", "ms"),
        Row("urgent: TTFT p99, Meridian", "ours.urgent_ttft_p99_ms", "ms"),
        Row("urgent: TTFT p99 over stock", over("urgent_ttft_p99_ms"), "ratio", "<= 0.1"),
        Row("urgent: throughput over stock", over("throughput_tok_s"), "ratio", ">= 0.97"),
        Row("urgent: most preemptions of a request", "ours.most_preemptions_of_a_request", "preemptions", "<= 3"),
        Row("urgent: preemptions", "ours.preemptions", "preemptions"),
        Row(
            "urgent: requests whose outputs differ",
            lambda m: differing(m["stock"]["outputs"], m["ours"]["outputs"]),
            "of {stock[requests]} requests",
            "<= 0",
        ),
    ),
    # Meridian's share of a step with 128 running, 1e5 cached blocks and 2,000 sessions.
    "cost": table(
        lambda _: of_zoo("step_share", "tiered-lru", "cost-aware", "ttl"),
        Row("cost, {name}: share of a step", "share_of_step", "ratio", "<= 0.05"),
        Row("cost, {name}: own time of a step, mean", "own_ms_mean", "ms"),
        Row("cost, {name}: own time of a step, p99", "own_ms_p99", "ms"),
        Row("cost, {name}: step, median", "step_ms_p50", "ms"),
        Row("cost, {name}: cached blocks", "cached_blocks", "blocks", ">= 1e5"),
    ),
}
