"""Sessions of coding agents: policies in the simulator against stock vLLM and a ceiling, and in the real engine; urgent
requests, and the cost of it all."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from statistics import fmean
from typing import Any

from checks.figures import Figure, Part, Row, over_pairs, ranged, table
from checks.report import markdown, write_table
from checks.run import MERIDIAN, RESULTS, SERVEGEN, TRACES, WORK, engine, output, say

TRACE = TRACES / "agentic_sessions.jsonl"
STOCK, DEFAULT, BELADY = "stock", "balanced", "belady"
# The constants of `balanced` were chosen on the sessions 1, 9, 17, ..., of the first half. These are of the second.
PART = "2/8"
# A block of the trace. The engine's own blocks of 16 tokens give the same hits and four times the work.
BLOCK_TOKENS = 64
# Engines with vLLM's defaults and their KV memory in tokens, and how many sessions are under way at once.
ENGINES = {
    "7b-h100": (1_027_104, (4, 8, 16, 32, 48)),
    "8b-h200": (798_336, (4, 8, 16, 32, 48)),
    "8b-a100": (391_696, (4, 8, 16, 32)),
    "32b-h200": (261_296, (4, 8, 16, 32)),
}
# How long users take between two turns, of what they took.
USER_GAPS = (0.1, 1.0)
# Order of admission, then order of eviction.
ZOO = {
    DEFAULT: "balanced",
    "lpm": "dispatch=lpm",
    "t-lru": "dispatch=fcfs,eviction=t-lru",
    "ttl": "dispatch=fcfs,eviction=ttl",
    "wa-lru": "dispatch=fcfs,eviction=wa-lru",
    "next-use": "dispatch=fcfs,eviction=next-use",
    BELADY: "dispatch=fcfs,eviction=belady",
    f"{DEFAULT} and {BELADY}": "dispatch=balanced,eviction=belady",
}
# As many sessions as fit, each until it ends (ConServe), before stock.
PINNED = "sessions pinned"
# What no policy of the zoo may know: Belady with the best number of sessions let in, of these parts of what
# fits on average.
CEILING = "ceiling"
LET_IN = (0.75, 1.25)
METRICS = {
    "session_mean_s": "completion, mean",
    "session_p50_s": "completion, p50",
    "session_p95_s": "completion, p95",
    "computed_again_tokens": "tokens computed again",
    "needed_tokens": "tokens computed again after eviction",
    "ttft_p50_ms": "TTFT p50",
    "ttft_p99_ms": "TTFT p99",
    "gpu_h": "GPU hours a session",
}
BOUNDS = {"session_mean_s": "<= 0.75", "session_p95_s": "<= 0.85", "computed_again_tokens": "<= 0.4"}


def replayed(*args: str, policies: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The metrics of `meridian bench replay`, the baseline's first."""
    args += tuple(word for policy in policies for word in ("--policy", policy))
    say(f"  meridian bench replay {' '.join(args)}")
    return [run["metrics"] for run in json.loads(output(MERIDIAN, "--json", "bench", "replay", *args))["runs"]]


@dataclass(frozen=True)
class Cell:
    """Sessions in an engine: how many at once, and of the time that users took, what they take."""

    engine: str
    at_once: int
    user_gaps: float

    def fits(self) -> float:
        """Of what the sessions have on average, the part that fits into the KV memory."""
        return ENGINES[self.engine][0] / (self.at_once * tokens_of_a_session())

    def run(self) -> dict[str, dict[str, float]]:
        """The metrics of stock, of the policies, and of the ceiling, by name. With MERIDIAN_REUSE_RUNS only those are
        simulated that were not kept: the simulator gives the same again."""
        args = ("--trace", str(TRACE), "--part", PART, "--engine", self.engine, "--block-tokens", str(BLOCK_TOKENS))
        args += ("--at-once", str(self.at_once), "--scale-user-gaps", str(self.user_gaps))

        def run(*more: str, policies: Sequence[str] = ()) -> list[dict[str, Any]]:
            runs = replayed(*args, *more, policies=policies)
            for metrics in runs:
                metrics["needed_tokens"] = metrics["computed_again_tokens"] - metrics["recomputed_tokens"]
                metrics["gpu_h"] = metrics["busy"] * metrics["makespan_s"] / metrics["sessions"] / 3600
            return runs

        found = dict(kept_runs().get(self, {})) if os.environ.get("MERIDIAN_REUSE_RUNS") else {}
        missing = [name for name in ZOO if name not in found]
        if missing or STOCK not in found:
            runs = run(policies=[ZOO[name] for name in missing])
            found |= dict(zip((STOCK, *missing), runs, strict=True))
        if PINNED not in found:
            (found[PINNED],) = run("--admit-sessions", "pinned", "--baseline", "dispatch=fcfs")
        if CEILING not in found:
            let_in = sorted({max(1, round(part * self.fits() * self.at_once)) for part in LET_IN})
            few = [found[BELADY]]
            for most in (most for most in let_in if most < self.at_once):
                few += run("--admit-sessions", str(most), "--baseline", ZOO[BELADY])
            found[CEILING] = min(few, key=lambda metrics: metrics["session_mean_s"])
        return found


@cache
def kept_runs() -> dict[Cell, dict[str, dict[str, float]]]:
    """What was kept of each cell, by the name of the run."""
    kept = RESULTS / "agents.json"
    rows = json.loads(kept.read_text()) if kept.exists() else []
    return {Cell(row["engine"], row["at_once"], row["user_gaps"]): row["runs"] for row in rows}


@cache
def tokens_of_a_session() -> float:
    """Tokens of a prompt, the mean of the trace."""
    with TRACE.open() as rows:
        return fmean(request[1] for row in rows for request in json.loads(row)["requests"])


def ratio(ours: float, stock: float) -> float:
    """Ours over stock's; 1 where both have nothing."""
    return 1.0 if ours == stock else ours / stock if stock > 0 else float("inf")


def grid(_: int) -> Iterator[Figure]:
    """Sessions at once in engines with vLLM's defaults, from all that fit to a few, under every policy."""
    cells = [Cell(e, n, gaps) for e, (_, at_once) in ENGINES.items() for n in at_once for gaps in USER_GAPS]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = dict(zip(cells, pool.map(Cell.run, cells), strict=True))
    groups = {
        "a third to two thirds fit": [cell for cell in cells if 1 / 3 <= cell.fits() <= 2 / 3],
        "less than a third fits": [cell for cell in cells if cell.fits() < 1 / 3],
        "more than two thirds fit": [cell for cell in cells if 2 / 3 < cell.fits() < 1.5],
        "all fit": [cell for cell in cells if cell.fits() >= 1.5],
    }

    def over(cell: Cell, name: str, key: str, base: str = STOCK) -> float:
        return ratio(runs[cell][name][key], runs[cell][base][key])

    for group, members in groups.items():
        for name in (*ZOO, PINNED, CEILING):
            ours = name == DEFAULT
            for key in METRICS if ours else ("session_mean_s", "computed_again_tokens"):
                bounds = BOUNDS if ours and group.startswith("a third") else {}
                if ours and group == "all fit" and key == "session_mean_s":
                    bounds = {key: "<= 1.02"}
                values = [over(cell, name, key) for cell in members]
                what = f"{len(members)} cells where {group}: {name}: {METRICS[key]} over stock"
                yield ranged(what, values, "ratio, lowest and highest", bounds.get(key))
        values = [over(cell, DEFAULT, "session_mean_s", CEILING) for cell in members]
        bound = "<= 1.15" if group.startswith("a third") else None
        what = f"{len(members)} cells where {group}: {DEFAULT}: completion, mean, over the ceiling's"
        yield ranged(what, values, "ratio, lowest and highest", bound)
    all_of = f"{len(cells)} cells: {DEFAULT}"
    attained = [runs[cell][DEFAULT]["slo_attainment"] - runs[cell][STOCK]["slo_attainment"] for cell in cells]
    yield ranged(f"{all_of}: turns in time, above stock", attained, "share of all, lowest and highest")
    worst = max(over(cell, DEFAULT, "session_mean_s") for cell in cells)
    yield Figure(f"{all_of}: completion, mean, over stock, the worst", worst, "ratio", "<= 1.02")
    more = max(runs[cell][DEFAULT]["preemptions_prefill"] - runs[cell][STOCK]["preemptions_prefill"] for cell in cells)
    yield Figure(f"{all_of}: preemptions of prompts beyond stock's, at most", more, "preemptions", "<= 0")
    again = max(over(cell, DEFAULT, "recomputed_tokens") for cell in cells)
    yield Figure(f"{all_of}: tokens computed again after preemption over stock, at most", again, "ratio", "<= 1.05")
    keys = (*METRICS, "hit_rate", "slo_attainment", "preemptions_prefill", "recomputed_tokens")
    rows = [
        {
            **asdict(cell),
            "fits": cell.fits(),
            "runs": {name: {key: of[key] for key in keys} for name, of in found.items()},
        }
        for cell, found in runs.items()
    ]
    (RESULTS / "agents.json").write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    write_tables(runs)


def write_tables(runs: dict[Cell, dict[str, dict[str, float]]]) -> None:
    """The tables of the book: how long sessions take under each policy, and more of the default."""
    others = [name for name in (*ZOO, PINNED, CEILING) if name != DEFAULT]
    completion, more = [], []
    for cell, found in runs.items():
        place = [cell.engine, str(cell.at_once), f"{cell.user_gaps:g}", f"{cell.fits():.2f}"]
        means = [f"{ratio(found[name]['session_mean_s'], found[STOCK]['session_mean_s']):.2f}" for name in others]
        stock, ours = found[STOCK], found[DEFAULT]
        ours_over = [f"{ratio(ours[key], stock[key]):.2f}" for key in METRICS]
        completion.append([*place, f"**{ours_over[0]}**", *means])
        seconds = [f"{stock[key] / 1e3:.3g} / {ours[key] / 1e3:.3g}" for key in ("ttft_p50_ms", "ttft_p99_ms")]
        hits = f"{100 * stock['hit_rate']:.0f} / {100 * ours['hit_rate']:.0f} %"
        more.append([*place, *ours_over[1:4], hits, *seconds, ours_over[-1]])
    head = ("engine", "at once", "gaps", "fits")
    write_table("results", "agents", markdown((*head, DEFAULT, *others), completion))
    titles = ("completion p50", "p95", "computed again", "hit rate", "TTFT p50, s", "TTFT p99, s", "GPU hours")
    write_table("results", "agents-default", markdown((*head, *titles), more))


@dataclass(frozen=True)
class Shape:
    """Sessions that are generated: turns and tokens in the mean, seconds until a tool answers and until a user does."""

    turns: int
    first_tokens: int
    added_tokens: int
    output_tokens: int
    tool_s: float
    user_s: float
    tool_turns: float
    """Share of the turns that stop for a tool."""

    def write(self, sessions: int = 70) -> tuple[str, float]:
        """Write sessions in the form of the trace; the file, and the share of their prompts' tokens that the turn
        before had."""
        rng = random.Random(repr(self))
        prompts = new = 0
        lines = []
        for number in range(sessions):
            tokens, at_s, rows = round(rng.lognormvariate(0.0, 0.5) * self.first_tokens / 1.13), 0.0, []
            new += tokens
            for turn in range(max(2, round(rng.gauss(self.turns, self.turns / 4)))):
                gap_s = 0.0
                if turn > 0:
                    added = round(rng.expovariate(1.0) * self.added_tokens)
                    tokens, new = tokens + added, new + added
                    gap_s = rng.expovariate(1.0) * (self.tool_s if rows[-1][5] == "tool_use" else self.user_s)
                at_s += gap_s
                stop = "tool_use" if rng.random() < self.tool_turns else "end_turn"
                blocks = [[1, max(1, tokens // BLOCK_TOKENS)]]
                rows.append([round(at_s, 1), tokens, self.output_tokens, 1.0, round(gap_s, 1), stop, 1, blocks])
                prompts += tokens
            about = {"id": f"generated_{number:04}", "block_size": BLOCK_TOKENS, "system_tokens": 0, "tool_tokens": 0}
            lines.append(json.dumps({**about, "requests": rows}))
        path = WORK / f"agents-shape-{hashlib.sha256(repr(self).encode()).hexdigest()[:8]}.jsonl"
        path.write_text("\n".join(lines) + "\n")
        return str(path), 1.0 - new / prompts


# Of Copilot's traces (arXiv 2608.00101) one figure is known: 86 % of the prompts' tokens are in the cache. Of chats
# such as Bailian's, that a step carries their prompts. The rest is made up.
SHAPES = {
    "agents of 86 % cached prompts": Shape(12, 16_000, 6_200, 400, 6.0, 60.0, 0.85),
    "chats": Shape(5, 1_200, 700, 600, 0.0, 60.0, 0.0),
}
SHAPES_AT_ONCE = {"agents of 86 % cached prompts": (8, 16, 32), "chats": (70,)}


def shapes(_: int) -> Iterator[Figure]:
    """Generated sessions of other shapes than the trace's, on the engine with the least KV memory for its tokens."""
    policies = (DEFAULT, "lpm", "next-use", BELADY)
    for name, shape in SHAPES.items():
        path, cached = shape.write()
        yield Figure(f"{name}: tokens of prompts that the turn before had", cached, "share")
        for at_once in SHAPES_AT_ONCE[name]:
            args = ("--trace", path, "--engine", "32b-h200", "--block-tokens", str(BLOCK_TOKENS))
            args += ("--at-once", str(at_once))
            stock, *runs = replayed(*args, policies=[ZOO[policy] for policy in policies])
            for policy, found in zip(policies, runs, strict=True):
                keys = METRICS if policy == DEFAULT else ("session_mean_s",)
                for key in keys:
                    if key in stock:
                        what = f"{name}, {at_once} at once: {policy}: {METRICS[key]} over stock"
                        bound = "<= 1.02" if (policy, key) == (DEFAULT, "session_mean_s") else None
                        yield Figure(what, ratio(found[key], stock[key]), "ratio", bound)


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
            evictions = [f"dispatch=fcfs,eviction={policy}" for policy in policies]
            runs = replayed(*args, "--rate", rate, "--seeds", "1,2", policies=evictions)
            for number, policy in enumerate(policies, 1):
                pairs = list(zip(runs[number::every], runs[::every], strict=True))
                bound = "<= 1.02" if policy != "tiered-lru" else None
                for key in NO_WORSE:
                    inverse = key == "throughput_tok_s"
                    ratios = [b[key] / a[key] if inverse else a[key] / b[key] for a, b in pairs]
                    what = "throughput, inverse" if inverse else key
                    title = f"{name}, {rate}/s: {policy}: {what} over stock"
                    yield ranged(title, ratios, "ratio, lowest and highest", bound)


# In the real engine; float32, so that outputs can be compared. Half of the sessions fit, on average.
ENGINE_KV_BLOCKS = 1680


def differing(one: list[Any], other: list[Any]) -> int:
    """Outputs that are not the same."""
    return sum(a != b for a, b in zip(one, other, strict=True))


def over(key: str) -> Any:
    """Ours over stock's."""
    return lambda m: m["ours"][key] / m["stock"][key]


def in_turns(pairs: int, stock: dict[str, Any], ours: dict[str, Any]) -> list[dict[str, Any]]:
    """The scaled sessions under stock and under the default, in turns, with these options."""

    def run(**options: Any) -> dict[str, Any]:
        return engine("agent_sessions", trace=TRACE, kv_blocks=ENGINE_KV_BLOCKS, **options)

    return [{"stock": run(**stock), "ours": run(scheduler="native:balanced", **ours)} for _ in range(pairs)]


def hits_and_outputs(title: str, found: list[dict[str, Any]], of_stock: str) -> Iterator[Figure]:
    """What the pairs found in the prefix cache, and whether they generated the same."""
    hits = [100 * (pair["ours"]["hit_rate"] - pair["stock"]["hit_rate"]) for pair in found]
    yield over_pairs(f"{title}: hit rate above {of_stock}", hits, "points")
    others = [differing(*both) for m in found for both in zip(m["stock"]["outputs"], m["ours"]["outputs"], strict=True)]
    yield Figure(f"{title}: turns whose outputs differ", sum(others), "turns", "<= 0")


def closed_loop(pairs: int) -> Iterator[Figure]:
    """The scaled sessions in the engine's own KV memory."""
    title, found = f"engine, {DEFAULT}", in_turns(pairs, {}, {})
    bounds = {"completion_mean_s": "<= 0.87", "recomputed_tokens": "<= 0.7"}
    for key in ("completion_mean_s", "completion_p95_s", "recomputed_tokens", "ttft_p50_ms", "ttft_p95_ms"):
        what = key.removesuffix("_s").removesuffix("_ms").replace("_", " ")
        yield over_pairs(f"{title}: {what} over stock", [over(key)(pair) for pair in found], "ratio", bounds.get(key))
    yield from hits_and_outputs(title, found, "stock")


def offloaded(pairs: int) -> Iterator[Figure]:
    """The same beside vLLM's offloading connector, whose host memory is short, or holds all sessions."""
    for size, blocks in (("as much as the engine has", ENGINE_KV_BLOCKS), ("for all sessions", 4 * ENGINE_KV_BLOCKS)):
        orders = ({"offload": order, "offload_blocks": blocks} for order in ("lru", "PhaseAwareCachePolicy"))
        title, found = f"engine with CPU offload, {size}", in_turns(pairs, *orders)
        for key, what in (("completion_mean_s", "completion mean"), ("ttft_p50_ms", "TTFT p50")):
            yield over_pairs(f"{title}: {what} over stock with it", [over(key)(pair) for pair in found], "ratio")
        yield from hits_and_outputs(title, found, "stock with it")


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
    "grid": grid,
    "shapes": shapes,
    "others": others,
    "engine": closed_loop,
    "offload": offloaded,
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
    "memory": table(
        lambda _: [engine("many_turns", turns=1_000_000)],
        Row(
            "host, {turns} turns of {sessions} sessions: memory beyond that of the first 200,000",
            "growth_mib",
            "MiB",
            "<= 16",
        ),
        Row("host, {turns} turns: blocks evicted", "evictions", "blocks", ">= 1e6"),
        Row("host: memory after 200,000 turns", "settled_mib", "MiB"),
    ),
    # Meridian's share of a step with 1e5 cached blocks and 2,000 sessions.
    "cost": table(
        lambda _: [
            *({"seats": 128, **found} for found in of_zoo("step_share", "tiered-lru", "cost-aware", "ttl")),
            *({"seats": 1024, **found} for found in of_zoo("step_share", "tiered-lru", seats=1024, steps=100)),
        ],
        Row("cost, {name}, {seats} seats: share of a step", "share_of_step", "ratio", "<= 0.03"),
        Row("cost, {name}, {seats} seats: own time of a step, mean", "own_ms_mean", "ms"),
        Row("cost, {name}, {seats} seats: own time of a step, p99", "own_ms_p99", "ms"),
        Row("cost, {name}, {seats} seats: step, median", "step_ms_p50", "ms"),
        Row("cost, {name}, {seats} seats: cached blocks", "cached_blocks", "blocks", ">= 1e5"),
    ),
}
