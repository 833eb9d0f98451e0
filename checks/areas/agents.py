"""Sessions of coding agents, for the area `levels`: policies in the simulator against stock vLLM and a ceiling, and the
real engine, with vLLM's offloading too."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

from checks.figures import Figure, over_pairs, ranged
from checks.report import markdown, write_table
from checks.run import TRACES, engine, meridian

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
# Where a third to two thirds of the sessions fit.
QUICK_CELLS = (("7b-h100", 16), ("8b-h200", 16), ("8b-a100", 8), ("32b-h200", 4))
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
    named = (word for policy in policies for word in ("--policy", policy))
    return [run["metrics"] for run in meridian("bench", "replay", *args, *named)["runs"]]


@dataclass(frozen=True)
class Cell:
    """Sessions in an engine: how many at once, and of the time that users took, what they take."""

    engine: str
    at_once: int
    user_gaps: float

    def fits(self) -> float:
        """Of what the sessions have on average, the part that fits into the KV memory."""
        return ENGINES[self.engine][0] / (self.at_once * tokens_of_a_session())

    def run(self, zoo: dict[str, str]) -> dict[str, dict[str, float]]:
        """The metrics of stock and of these policies, by name."""
        return dict(zip((STOCK, *zoo), self.replay(policies=list(zoo.values())), strict=True))

    def replay(self, *more: str, policies: Sequence[str] = ()) -> list[dict[str, Any]]:
        """The metrics of the baseline and of these policies."""
        args = ("--trace", str(TRACE), "--part", PART, "--engine", self.engine, "--block-tokens", str(BLOCK_TOKENS))
        args += ("--at-once", str(self.at_once), "--scale-user-gaps", str(self.user_gaps))
        runs = replayed(*args, *more, policies=policies)
        for metrics in runs:
            metrics["needed_tokens"] = metrics["computed_again_tokens"] - metrics["recomputed_tokens"]
            metrics["gpu_h"] = metrics["busy"] * metrics["makespan_s"] / metrics["sessions"] / 3600
        return runs

    def run_all(self) -> dict[str, dict[str, float]]:
        """Those of the whole zoo, of pinned sessions, and of the ceiling."""
        found = self.run(ZOO)
        (found[PINNED],) = self.replay("--admit-sessions", "pinned", "--baseline", "dispatch=fcfs")
        let_in = sorted({max(1, round(part * self.fits() * self.at_once)) for part in LET_IN})
        few = [found[BELADY]]
        for most in (most for most in let_in if most < self.at_once):
            few += self.replay("--admit-sessions", str(most), "--baseline", ZOO[BELADY])
        found[CEILING] = min(few, key=lambda metrics: metrics["session_mean_s"])
        return found


@cache
def tokens_of_a_session() -> float:
    """Tokens of a prompt, the mean of the trace."""
    with TRACE.open() as rows:
        return fmean(request[1] for row in rows for request in json.loads(row)["requests"])


def ratio(ours: float, stock: float) -> float:
    """Ours over stock's; 1 where both have nothing."""
    return 1.0 if ours == stock else ours / stock if stock > 0 else float("inf")


Runs = dict[Cell, dict[str, dict[str, float]]]


def together(cells: list[Cell], run: Callable[[Cell], dict[str, dict[str, float]]]) -> Runs:
    """The runs of cells, as many at once as there are cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(cells, pool.map(run, cells), strict=True))


def grid(_: int) -> Iterator[Figure]:
    """Sessions at once in engines with vLLM's defaults, from all that fit to a few, under every policy."""
    cells = [Cell(e, n, gaps) for e, (_, at_once) in ENGINES.items() for n in at_once for gaps in USER_GAPS]
    runs = together(cells, Cell.run_all)
    yield from judged(runs)
    write_tables(runs)


def grid_quick(_: int) -> Iterator[Figure]:
    """The default beside stock, where a third to two thirds of the sessions fit."""
    cells = [Cell(engine, at_once, USER_GAPS[0]) for engine, at_once in QUICK_CELLS]
    yield from judged(together(cells, lambda cell: cell.run({DEFAULT: ZOO[DEFAULT]})))


def judged(runs: Runs) -> Iterator[Figure]:
    """Policies over stock, by how many of the sessions fit."""
    groups = {
        "a third to two thirds fit": [cell for cell in runs if 1 / 3 <= cell.fits() <= 2 / 3],
        "less than a third fits": [cell for cell in runs if cell.fits() < 1 / 3],
        "more than two thirds fit": [cell for cell in runs if 2 / 3 < cell.fits() < 1.5],
        "all fit": [cell for cell in runs if cell.fits() >= 1.5],
    }
    names = [name for name in next(iter(runs.values())) if name != STOCK]

    def over(cell: Cell, name: str, key: str, base: str = STOCK) -> float:
        return ratio(runs[cell][name][key], runs[cell][base][key])

    for group, members in groups.items():
        unit = f"ratio, lowest and highest of {len(members)} cells"
        for name in names if members else ():
            ours = name == DEFAULT
            for key in METRICS if ours else ("session_mean_s", "computed_again_tokens"):
                bounds = BOUNDS if ours and group.startswith("a third") else {}
                if ours and group == "all fit" and key == "session_mean_s":
                    bounds = {key: "<= 1.02"}
                values = [over(cell, name, key) for cell in members]
                yield ranged(f"cells where {group}: {name}: {METRICS[key]} over stock", values, unit, bounds.get(key))
        if members and CEILING in names:
            values = [over(cell, DEFAULT, "session_mean_s", CEILING) for cell in members]
            bound = "<= 1.15" if group.startswith("a third") else None
            yield ranged(f"cells where {group}: {DEFAULT}: completion, mean, over the ceiling's", values, unit, bound)
    attained = [of[DEFAULT]["slo_attainment"] - of[STOCK]["slo_attainment"] for of in runs.values()]
    unit = f"share of all, lowest and highest of {len(runs)} cells"
    yield ranged(f"all cells: {DEFAULT}: turns in time, above stock", attained, unit)
    worst = max(over(cell, DEFAULT, "session_mean_s") for cell in runs)
    yield Figure(f"all cells: {DEFAULT}: completion, mean, over stock, the worst", worst, "ratio", "<= 1.02")
    more = max(of[DEFAULT]["preemptions_prefill"] - of[STOCK]["preemptions_prefill"] for of in runs.values())
    yield Figure(f"all cells: {DEFAULT}: preemptions of prompts beyond stock's, at most", more, "preemptions", "<= 0")
    again = max(over(cell, DEFAULT, "recomputed_tokens") for cell in runs)
    what = "tokens computed again after preemption over stock, at most"
    yield Figure(f"all cells: {DEFAULT}: {what}", again, "ratio", "<= 1.05")


def write_tables(runs: Runs) -> None:
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
