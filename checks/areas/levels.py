"""Service levels that hold through a burst: `balanced` with a promise beside every opponent of the measurement."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from checks.areas.measure import DEFAULT, ENGINES, SESSIONS, SINGLE, STOCK, TRACE_FILES, left_out, meridian_grid, ratio
from checks.figures import Figure, Part, over_pairs, ranged
from checks.picture import picture
from checks.report import markdown, write_table
from checks.run import ROOT, TRACES, WORK, authored, compared, meridian, recorded, say

# The budget policy that ends thinking as the queue grows, with entropies like recorded ones.
BUDGETS = f"dispatch={DEFAULT},budget=deadline-aware"
PROMISED = (DEFAULT, BUDGETS)
# What others have written, with the same promise.
PAPERS = ("edf", "qoserve", "scorpio", "jitserve")
# What a promise must bring through a day with a burst, over stock vLLM and over its best single flags.
DAYS = (
    ("slo_attainment", "attainment", DEFAULT, 1.8, 1.5),
    ("goodput_rps", "goodput", DEFAULT, 2.0, 1.6),
    ("slo_attainment", "attainment with budgets", BUDGETS, 2.5, 2.0),
    ("goodput_rps", "goodput with budgets", BUDGETS, 2.5, 2.0),
)


def grid(seeds: int) -> Iterator[Figure]:
    """The cells of the measurement with the measured level promised to every request, who is late last; with the first
    seed beside the papers' policies."""
    founds = yield from grids("levels", "--promise", seeds, PAPERS)
    yield from judged(founds)
    shown(founds[0])


def refuse(_: int) -> Iterator[Figure]:
    """The same with one seed, but who is late is refused."""
    founds = yield from grids("levels-refuse", "--promise=refuse", 1)
    for figure in judged(founds):
        yield replace(figure, name=f"refusing: {figure.name}")


def agents(_: int) -> Iterator[Figure]:
    """Sessions of coding agents in closed loop, with the level promised to every request."""
    sessions = ("--trace", SESSIONS, "--part", "1/32", "--promise")
    found, took = meridian_grid("levels-agents", *sessions, policies=(DEFAULT,))
    yield from took
    for key, title, bound in (
        ("slo_attainment", "attainment", ">= 0.99"),
        ("throughput_tok_s", "throughput", ">= 0.99"),
        ("session_mean_s", "mean session", None),
        ("recomputed_tokens", "tokens computed again after preemption", "<= 1.05"),
    ):
        values = [ratio(cell, DEFAULT, STOCK, key) for cell in found["cells"]]
        yield ranged(f"agents: {title} over stock", values, "ratio", bound)


def capacity(_: int) -> Iterator[Figure]:
    """The steady rate at which 95 of 100 requests are in time, over stock's and that of its best flags."""
    over: dict[str, list[float]] = {STOCK: [], SINGLE: []}
    # ServeGen's thoughts are so long that one engine takes ten minutes.
    trace = ("--trace", str(TRACES / "azure2023_conv.csv"), "--think", "bimodal")
    for engine in ENGINES:
        found = meridian("bench", "advise", "--engine", engine, *trace)
        rates = {of["name"]: of["capacity"]["doubled"] for of in found["capacities"] if of["capacity"]}
        say(f"  {found['engine']}: {rates}")
        for against, ratios in over.items():
            if against in rates and "meridian" in rates:
                ratios.append(rates["meridian"] / rates[against])
    for against, least in ((STOCK, None), (SINGLE, ">= 1.1")):
        yield ranged(
            f"capacity at attainment 0.95 over {against}, Azure's conversations", over[against], "ratio", least
        )


RUNNING, WAITING, STEPS = 256, 4096, 400


def cost(pairs: int) -> Iterator[Figure]:
    """Planning a step with a level over the same without, step by step in turn."""
    from meridian import MeridianConfig, PolicyEngine

    def engine(**levels: Any) -> tuple[PolicyEngine, list[str], list[str]]:
        config = MeridianConfig(service_levels=levels)
        made = PolicyEngine(config, think_start=[7], think_end=[8])
        names = [str(i) for i in range(RUNNING + WAITING)]
        for i, name in enumerate(names):
            made.add(name, prompt=[1] * (50 + i % 400) + [7], max_tokens=4000)
        return made, names[:RUNNING], names[RUNNING:]

    def step(of: tuple[PolicyEngine, list[str], list[str]], at: int) -> int:
        made, running, waiting = of
        began = time.perf_counter_ns()
        made.plan(
            running, waiting, token_budget=8192, free_seats=8, now_ms=20.0 * at, free_blocks=10_000, total_blocks=60_000
        )
        took = time.perf_counter_ns() - began
        made.scheduled(dict.fromkeys(running, 1 if at > 0 else 8))
        made.generated({name: [1] for name in running})
        return took

    ratios = []
    for _ in range(pairs):
        plain, promised = engine(), engine(level={"default": True})
        times = [(step(plain, at), step(promised, at)) for at in range(STEPS)]
        ratios.append(median(with_level for _, with_level in times) / median(without for without, _ in times))
    yield over_pairs(
        f"own time with a level, {RUNNING} running, {WAITING} waiting, over without", ratios, "ratio", "<= 1.1"
    )


Found = dict[str, Any]
# The cells of one traffic, engine and load: one a seed.
Seeds = list[dict[str, Any]]


def grids(
    name: str, flag: str, seeds: int, papers: tuple[str, ...] = ()
) -> Generator[Figure, None, list[dict[str, Any]]]:
    """A grid a seed; the first one with the papers' policies too."""
    traces = [word for trace in TRACE_FILES[:2] for word in ("--trace", trace)]
    founds = []
    for seed in range(1, seeds + 1):
        policies = (*PROMISED, *(papers if seed == 1 else ()))
        found, took = meridian_grid(f"{name}-{seed}", *traces, flag, "--seed", str(seed), policies=policies)
        if seed == 1:
            yield from took
        founds.append(found)
    return founds


def counted(found: Found) -> Seeds:
    """The cells that count."""
    why = {(row["engine"], row["traffic"]): left_out(row) for row in found["rows"]}
    for (engine, traffic), text in why.items():
        if text:
            say(f"  {engine}, {traffic}: {text}")
    return [cell for cell in found["cells"] if cell["converged"] and not why[cell["engine"], cell["traffic"]]]


def over(cells: Seeds, one: str, other: str, key: str) -> float:
    """The median of the seeds of a metric over another contender's."""
    return median(ratio(cell, one, other, key) for cell in cells)


def judged(founds: list[Found]) -> Iterator[Figure]:
    """Figures of grids with a promise: of each cell the median of its seeds, of all cells the median and the range."""
    cells: dict[tuple[str, str, str], Seeds] = {}
    by_seed = [counted(found) for found in founds]
    for of_seed in by_seed:
        for cell in of_seed:
            cells.setdefault((cell["engine"], cell["traffic"], cell["load"]), []).append(cell)
    days, steady = ([of for of in cells.values() if bool(of[0].get("burst_s")) is is_day] for is_day in (True, False))
    yield Figure("seeds", len(founds), "seeds")
    yield Figure("days", len(days), "cells")
    yield Figure("steady loads", len(steady), "cells")
    names = {label: next(name for name in days[0][0]["contenders"] if same(name, label)) for label in PROMISED}
    for key, title, policy, over_stock, over_flags in DAYS:
        for against, least in ((STOCK, over_stock), (SINGLE, over_flags)):
            values = [over(of, names[policy], against, key) for of in days]
            yield ranged(f"days: {title} over {against}", values, "ratio", f">= {least}")
            if policy == DEFAULT and key == "slo_attainment":
                yield Figure(f"days: {title} over {against}, least", min(values), "ratio", ">= 1.0")
                of_seeds = [
                    median(ratio(cell, policy, against, key) for cell in of_seed if cell.get("burst_s"))
                    for of_seed in by_seed
                ]
                yield ranged(f"days: {title} over {against}, a seed's median", of_seeds, "ratio")
    for key, title, bound in (
        ("recovery_s", "time until the level is met again", "<= 0.5"),
        ("ttfo_p50_ms", "TTFO p50", None),
        ("ttfo_p99_ms", "TTFO p99", None),
        ("throughput_tok_s", "throughput", ">= 1.0"),
        ("fairness_jain", "fairness of tenants", ">= 0.95"),
    ):
        # A trace without tenants has no fairness.
        both = [
            [c for c in of if all(key in c["contenders"][name]["metrics"] for name in (DEFAULT, STOCK))] for of in days
        ]
        values = [over(of, DEFAULT, STOCK, key) for of in both if of]
        if values:
            yield ranged(f"days: {title} over stock", values, "ratio", bound)
    worst_ms = max(cell["contenders"][DEFAULT]["metrics"]["ttfo_p99_ms"] for of in days for cell in of)
    longest_ms = 3_600_000.0  # `longest_wait_ms` of a level that does not say it
    yield Figure("days: TTFO p99 of the longest wait, most", worst_ms / longest_ms, "ratio", "<= 1")
    bounds = [
        median(cell["contenders"][DEFAULT]["metrics"]["slo_attainment"] / cell["most_in_time"] for cell in of)
        for of in days
    ]
    yield ranged("days: attainment of what any scheduler could have, at most", bounds, "ratio", ">= 0.85")
    for against, most in ((STOCK, 0), (SINGLE, 5)):
        broken = [
            [line for line in verdict["broken"] if ", day" not in line["cell"]]
            for found in founds
            for verdict in found["verdicts"]
            if verdict["policy"] == DEFAULT and verdict["against"] == against
        ]
        floors = median(len(lines) for lines in broken)
        yield Figure(f"steady loads: floors broken against {against}", floors, "floors", f"<= {most}")
        for line in broken[0]:
            say(f"  {line['cell']}: {line['metric']} {line['ratio']:.2f} of {against}'s")
    again = max(over(of, DEFAULT, STOCK, "recomputed_tokens") for of in cells.values())
    yield Figure("tokens computed again, most over stock", again, "ratio", "<= 1.05")


def shown(found: Found) -> None:
    """Every contender through the days of a grid, in one table."""
    days = [cell for cell in counted(found) if cell.get("burst_s")]
    rows = []
    for name in days[0]["contenders"]:
        of = [cell["contenders"][name]["metrics"] for cell in days]
        in_time = [metrics["slo_attainment"] for metrics in of]
        ratios = (
            median(ratio(cell, name, STOCK, key) for cell in days)
            for key in ("slo_attainment", "ttfo_p50_ms", "ttfo_p99_ms", "throughput_tok_s")
        )
        cells = (fmean(in_time), min(in_time), *ratios)
        rows.append([name if name.startswith(("stock", "EDF", "SRPT")) else f"`{name}`", *(f"{x:.2f}" for x in cells)])
    rows.sort(key=lambda row: row[1], reverse=True)
    most = [cell["most_in_time"] for cell in days]
    rows.insert(0, ["any scheduler, at most", f"{fmean(most):.2f}", f"{min(most):.2f}", *4 * [""]])
    head = ("", "in time, mean", "least", "in time over stock", "TTFO p50", "TTFO p99", "throughput")
    write_table("results", "levels", markdown(head, rows))


def same(name: str, label: str) -> bool:
    """Whether a contender is the one that was asked for: it is shown without the word of its first slot."""
    return name == label or (label == BUDGETS and "deadline-aware" in name)


# Requests of the simulator's check, but as a Poisson process: the course alone makes the burst.
WORKLOAD = ROOT / "checks" / "engine" / "fidelity.toml"
POISSON = "\n[arrivals]\ngap_cv = 1.0\n"
# Factors of what stock vLLM serves, and seconds. The burst leaves 9 s of work; 0.4 of the engine clears it in 23 s.
DAY, CALM = "0.6x10,1.6x15,0.6x35", "0.6x30"
SPEED_REQUESTS = 160
# In float32, outputs do not depend on the batch; in bfloat16, sums of another batch round differently.
ENGINE = ("--max-num-seqs", "32", "--dtype", "float32")
# A token of the prompt, the thinking and the answer may take so many times what it takes alone, about as in the default
# level on 7b-h100. Beside these, TTFO may take the allowance of so many tokens of thinking.
SLOWDOWN, BASE_TOKENS = 6.0, 25
# Steps of so many tokens are prompts but for a few percent.
PROMPT_TOKENS = 512
# Longer than the burst and the time that clears its backlog, 38 s.
LONGEST_WAIT_MS = 45_000.0
# The interpreter's memory is that of a new folder's `policy.toml`; a busy machine says nothing about a policy.
PYTHON_LIMITS = {"memory_mib": 128, "deadline_ms": 100}


@dataclass(frozen=True)
class Promised:
    """What stock vLLM serves in this engine, requests a second, and the level, as in `[service_levels]`."""

    rate: float
    ttfo_ms: float
    prompt_ms_per_token: float
    think_ms_per_token: float
    tpot_ms: float

    def due_ms(self, row: dict[str, Any]) -> float:
        """The longest TTFO. The marker is a token of thinking, as in `bench replay`."""
        thought = self.think_ms_per_token * (row["think_tokens"] + 1)
        return self.ttfo_ms + self.prompt_ms_per_token * row["prompt_tokens"] + thought

    def in_time(self, rows: list[dict[str, Any]]) -> float:
        """The share of requests that have the level."""

        def is_kept(row: dict[str, Any]) -> bool:
            tpot_ms = (row["e2e_ms"] - row["ttfo_ms"]) / max(1, row["output_tokens"] - 1)
            return row["ttfo_ms"] <= self.due_ms(row) and tpot_ms <= self.tpot_ms

        return fmean(map(is_kept, rows))

    def slo(self) -> tuple[str, ...]:
        """For `meridian bench replay`: the level."""
        level = {
            "ttfo-ms": self.ttfo_ms,
            "prompt-ms": self.prompt_ms_per_token,
            "think-ms": self.think_ms_per_token,
            "tpot-ms": self.tpot_ms,
        }
        return tuple(word for key, value in level.items() for word in (f"--slo-{key}", str(value)))

    def flags(self) -> tuple[str, ...]:
        """For `meridian bench vllm`: the level for every request, and what a policy in Python needs."""
        level = {key: value for key, value in vars(self).items() if key != "rate"}
        level |= {"longest_wait_ms": LONGEST_WAIT_MS, "default": "true"}
        settings = {f"service_levels.all.{key}": value for key, value in level.items()}
        settings |= {f"policy.dispatch.{key}": value for key, value in PYTHON_LIMITS.items()}
        return tuple(word for key, value in settings.items() for word in ("--set", f"{key}={value}"))


@dataclass(frozen=True)
class Ran:
    """A run of the real engine: where it is kept, what it recorded, its metrics."""

    path: str
    document: dict[str, Any]
    metrics: dict[str, float]


def engine(pairs: int) -> Iterator[Figure]:
    """The real engine on the CPU through a day of a minute: stock vLLM, Meridian with a level, and a policy in Python
    with the same level. Then a load of 0.6 throughout.

    Rate and level are multiples of what this engine serves, and of what a request takes alone in it. The offline bound
    is that of the engine as fitted to the pair's runs.
    """
    level, component = measured_level(), keeps_levels()
    python = component.name
    days, calms, mosts = [], [], []
    for pair in range(pairs):
        found = ran(f"levels-day-{pair}", pair, level, DAY, (STOCK, DEFAULT, str(component)))
        days.append(found)
        mosts.append(most_in_time(f"levels-day-{pair}", found.values(), level))
        calms.append(ran(f"levels-calm-{pair}", pair, level, CALM, (STOCK, DEFAULT)))
        shares = {name: round(level.in_time(of.document["rows"]), 3) for name, of in found.items()}
        say(f"  pair {pair + 1} of {pairs}: in time: {shares}, any scheduler at most {mosts[-1]:.3f}")
    yield Figure("engine: requests that stock vLLM serves", level.rate, "requests/s")
    yield Figure("engine: allowance of a thinking token", level.think_ms_per_token, "ms")
    yield ranged("engine: attainment that any scheduler could have, at most", mosts, "share")
    yield ranged("engine: attainment of stock", [level.in_time(of[STOCK].document["rows"]) for of in days], "share")
    for name, prefix in ((DEFAULT, "engine: "), (python, "engine, a policy in Python: ")):
        yield ranged(f"{prefix}attainment", [level.in_time(of[name].document["rows"]) for of in days], "share")
        late = []
        for of, most in zip(days, mosts, strict=True):
            ours, theirs = (most - level.in_time(of[which].document["rows"]) for which in (name, STOCK))
            # A day through which stock vLLM has nobody late has nothing to show.
            if theirs > 0:
                late.append(ours / theirs)
        yield over_pairs(f"{prefix}late requests beyond the offline bound, over stock's", late, "ratio", "<= 0.5")
        waits = [of[name].metrics["ttfo_p99_ms"] / LONGEST_WAIT_MS for of in days]
        yield over_pairs(f"{prefix}TTFO p99, of the longest wait", waits, "share", "<= 1.0")
        runs = [of for of in (*days, *calms) if name in of]
        sides = [tuple(of[which].document["outputs"] for which in (name, STOCK)) for of in runs]
        differ = sum(one != other for ours, theirs in sides for one, other in zip(ours, theirs, strict=True))
        count = sum(len(theirs) for _, theirs in sides)
        yield Figure(f"{prefix}outputs that differ from stock's", differ, f"of {count}", "<= 0")
        faults = sum(of[name].metrics["faults"] for of in runs)
        yield Figure(f"{prefix}faults of the policies", faults, "faults", "<= 0")
    decided = [of[python].metrics["decided_by_policy"] / of[python].metrics["decisions"] for of in days]
    yield over_pairs("engine, a policy in Python: decisions by it", decided, "share", ">= 1")
    for title, key, bound in (
        ("throughput", "throughput_tok_s", ">= 0.99"),
        ("attainment", "", ">= 0.99"),
        ("TTFT p99", "ttft_p99_ms", "<= 1.15"),
        ("output ITL p99", "itl_output_p99_ms", "<= 1.03"),
    ):
        values = []
        for of in calms:
            ours, theirs = (
                of[which].metrics[key] if key else level.in_time(of[which].document["rows"])
                for which in (DEFAULT, STOCK)
            )
            values.append(ours / theirs)
        yield over_pairs(f"engine, below capacity: {title} over stock's", values, "ratio", bound)


def ran(label: str, seed: int, level: Promised | None, course: str | None, policies: tuple[str, ...]) -> dict[str, Ran]:
    """The runs of these policies over the same requests, with every second seed from the last to the first. Without a
    course, all requests are there from the start. With MERIDIAN_REUSE_RUNS, runs that are there are not repeated."""
    results = WORK / label / f"{label}.csv.results.json"
    if not (os.environ.get("MERIDIAN_REUSE_RUNS") and results.exists()):
        workload, trace = WORK / f"{label}.toml", WORK / f"{label}.csv"
        text = WORKLOAD.read_text().replace("requests_per_s = 6.0", f"requests_per_s = {level.rate if level else 6.0}")
        workload.write_text(text + POISSON)
        length = ("--day", course) if course else ("--requests", str(SPEED_REQUESTS))
        meridian("bench", "generate", "--workload", workload, "--seed", str(seed + 1), *length, "--out", trace)
        order = policies[:: -1 if seed % 2 else 1]
        args = (*(level.flags() if level else ()), *(() if course else ("--at-once",)))
        named = (word for policy in order for word in ("--policy", policy))
        compared(label, "--trace", trace, *ENGINE, *args, *named)
    metrics = {run["policy"]: run["metrics"] for run in json.loads(results.read_text())["runs"]}
    found = {}
    for policy in (Path(policy).name for policy in policies):
        path, document = recorded(label, policy)
        found[policy] = Ran(str(path), document, metrics[policy])
    return found


def measured_level() -> Promised:
    """The level, by a run of stock vLLM with every request there from the start: at its end, one is left alone."""
    run = ran("levels-speed", 0, None, None, (STOCK,))[STOCK]
    rows, steps = run.document["rows"], run.document["steps"]
    work = list(zip(steps["ms"], steps["requests"], steps["tokens"], strict=True))
    pace_ms = round(SLOWDOWN * median(ms for ms, requests, tokens in work if requests == tokens == 1), 1)
    prompt_ms = SLOWDOWN * median(ms / tokens for ms, _, tokens in work if tokens >= PROMPT_TOKENS)
    return Promised(
        rate=round(len(rows) / run.document["makespan_s"], 2),
        ttfo_ms=BASE_TOKENS * pace_ms,
        prompt_ms_per_token=round(prompt_ms, 2),
        think_ms_per_token=pace_ms,
        tpot_ms=pace_ms,
    )


def keeps_levels() -> Path:
    """The policy in Python as a component."""
    name = "keeps-levels"
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    authored("policy", "new", name, "--lang", "python", cwd=WORK)
    shutil.copy(ROOT / "checks" / "engine" / "policies" / "keeps_levels.py", folder / "policy.py")
    authored("policy", "build", name, "--out", WORK, cwd=WORK)
    return WORK / f"{name}.wasm"


def most_in_time(label: str, runs: Iterable[Ran], level: Promised) -> float:
    """The share of these requests that any scheduler could have in time, at most, in the engine that is fitted to these
    runs (bench/src/bound.rs)."""
    fitted = WORK / f"{label}.toml"
    meridian("bench", "calibrate", *(of.path for of in runs), "--out", fitted)
    trace = ("--trace", WORK / f"{label}.csv", "--engine", fitted, "--promise")
    found = meridian("bench", "replay", *trace, *level.slo())
    return found["most_in_time"]


PARTS: dict[str, Part] = {
    "grid": grid,
    "refuse": refuse,
    "agents": agents,
    "capacity": capacity,
    "cost": cost,
    "engine": engine,
    "picture": picture,
}
