"""`balanced` beside every opponent of `meridian bench grid`, for the area `levels`: as it is, with a service level that
is promised to every request, and with agents' sessions."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from checks.figures import Figure, ranged
from checks.report import markdown, write_table
from checks.run import RESULTS, SERVEGEN, TRACES, WORK, meridian, provenance, say

DEFAULT = "balanced"
CPU = WORK / "cpu.toml"
ENGINES = ("7b-h100", "8b-a100", "32b-h200", "r1-8xh200", str(CPU))
# Chat traces without phases get thinking from the two modes of ServeGen's reasoning traffic.
TRACE_FILES = (
    str(SERVEGEN),
    f"{TRACES / 'azure2023_conv.csv'}:bimodal",
    str(TRACES / "azure2023_code.csv"),
    str(TRACES / "mooncake_conversation.jsonl"),
)
SESSIONS = TRACES / "agentic_sessions.jsonl"
# The shipped dispatch policies that order requests whether or not levels are promised.
ZOO = (DEFAULT, "output-first", "priority", "pascal", "srpt", "fair-share", "edf", "qoe", "mlfq")
# As `meridian bench grid` names the opponents.
STOCK, SINGLE, ORACLE = "stock", "stock, best flags", "stock, oracle flags"
OPPONENTS = (STOCK, SINGLE, ORACLE, "stock, chunks of 512", "EDF, lengths known", "SRPT, lengths known")
THROUGHPUT, GOODPUT = 0.9, 0.8  # of stock's, the least of a shipped policy in any cell
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
# The product that decides what these figures are.
SUBJECT = ("bench/src/grid", "bench/src/sim", "bench/src/load.rs", "host/core/src", "policies/shipped/src")

Found = dict[str, Any]
# The cells of one traffic, engine and load: one a seed.
Seeds = list[dict[str, Any]]


@dataclass(frozen=True)
class Size:
    """How much of the grid is run."""

    engines: tuple[str, ...] = ENGINES
    traces: tuple[str, ...] = TRACE_FILES
    more: tuple[str, ...] = ()


WHOLE = Size()
# Two engines, two traffics; below their capacity, and through a day with a burst.
SMALL = Size(("8b-a100", "32b-h200"), TRACE_FILES[:2], ("--loads", "0.95", "--bursts", "15"))


def run_grid(
    name: str, size: Size, *more: str | Path, policies: tuple[str, ...] = (DEFAULT,)
) -> tuple[Found, Iterator[Figure]]:
    """A grid by the command that anybody can run, an interrupted one of this commit from where it was; and what a fresh
    one took. With MERIDIAN_REUSE_RUNS a grid that is there is not repeated: for tables of another form."""
    shutil.copy(RESULTS / "fidelity-engine.toml", CPU)
    saved = WORK / f"{name}-{provenance()['commit']}.json"
    said = WORK / f"{name}.found.json"
    if os.environ.get("MERIDIAN_REUSE_RUNS") and said.exists():
        return json.loads(said.read_text()), iter(())
    is_fresh, before = not saved.with_suffix(".json.rows").exists(), resource.getrusage(resource.RUSAGE_CHILDREN)
    found = meridian(
        *("bench", "grid", "--engine", ",".join(size.engines), *size.more, *more),
        *(flag for trace in size.traces for flag in ("--trace", trace)),
        *(flag for policy in policies for flag in ("--policy", policy)),
        *("--save", saved, "--html", WORK / f"{name}.html"),
    )
    said.write_text(json.dumps(found))
    # Time of the processors: what else the machine does has little to say in it.
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    took = (
        Figure(f"{name}: the whole grid, both cores busy", seconds / 60 / 2, "minutes"),
        # Linux counts kilobytes.
        Figure(f"{name}: most memory", after.ru_maxrss / 1024, "MiB"),
    )
    return found, iter(took if is_fresh else ())


def ratio(cell: dict[str, Any], one: str, other: str, key: str) -> float:
    """A contender's metric over another's; where that has none, with one more of each."""
    ours, theirs = (cell["contenders"][name]["metrics"][key] for name in (one, other))
    return ours / theirs if theirs else ours + 1.0


def left_out(row: dict[str, Any]) -> str:
    """Why the cells of a row enter no median (`Row::left_out` in bench/src/grid/mod.rs)."""
    capacity = row["capacity"]
    if capacity is None:
        return "" if row["at_once"] else "no rate is served"
    if not capacity["converged"]:
        return f"not converged: {100 * (capacity['doubled'] / capacity['rate'] - 1):+.1f} %"
    return f"idle: {capacity['busy']:.2f} busy" if capacity["busy"] < 0.5 else ""


def reasons(found: Found) -> dict[tuple[str, str], str]:
    """Of each engine and traffic, why it enters no median."""
    why = {(row["engine"], row["traffic"]): left_out(row) for row in found["rows"]}
    for (engine, traffic), text in why.items():
        if text:
            say(f"  {engine}, {traffic}: {text}")
    return why


def counted(found: Found) -> Seeds:
    """The cells that count."""
    why = reasons(found)
    return [cell for cell in found["cells"] if cell["converged"] and not why[cell["engine"], cell["traffic"]]]


def policies(_: int) -> Iterator[Figure]:
    """Every cell of traffic that arrives by itself, without a promise; with the tables of the book."""
    found, took = run_grid("grid", WHOLE, "--workload", "multi-turn", policies=ZOO)
    yield from took
    cells, why = counted(found), reasons(found)
    yield Figure("grid: cells", len(found["cells"]), "cells")
    yield Figure("grid: rows left out: idle", sum("idle" in text for text in why.values()), "rows")
    unsettled = sum("not converged" in text for text in why.values())
    yield Figure(
        "grid: rows whose capacity moves by 2 % or more when runs are twice as long", unsettled, "rows", "<= 0"
    )
    yield from judged(found)
    for policy in ZOO:
        for key, title, least in (("throughput_tok_s", "throughput", THROUGHPUT), ("goodput_rps", "goodput", GOODPUT)):
            worst = min(ratio(cell, policy, STOCK, key) for cell in cells)
            yield Figure(f"zoo: {policy}: least {title} in a cell", worst, "of stock's", f">= {least}")
    keep_grid(found, cells)
    write_capacities(found["rows"], why)
    write_medians(found)
    write_floors(found, len(cells))


def policies_quick(_: int) -> Iterator[Figure]:
    """The default in a few cells."""
    yield from judged(run_grid("grid-quick", SMALL)[0])


def judged(found: Found) -> Iterator[Figure]:
    """`balanced` over every opponent."""
    yield Figure("grid: cells that count", len(counted(found)), "cells")
    verdicts = verdicts_of(found)
    for against in OPPONENTS:
        yield Figure(f"grid: floors that balanced breaks against {against}", len(verdicts[against]["broken"]), "floors")
        for gain in verdicts[against]["medians"]:
            name = f"grid: balanced over {against}, hard cells: {gain['title']}"
            yield Figure(name, gain["median"], "ratio, 95 % interval of the median", None, *gain["interval"])
    for against, key in ((STOCK, "goodput_rps"), (STOCK, "itl_output_p99_ms"), (SINGLE, "goodput_rps")):
        gain = next(gain for gain in verdicts[against]["medians"] if gain["key"] == key)
        name = f"grid: balanced over {against}, range: {gain['title']}"
        yield Figure(name, gain["median"], "ratio, lowest and highest cell", None, gain["low"], gain["high"])


def verdicts_of(found: Found) -> dict[str, dict[str, Any]]:
    """What the command says of `balanced`, by opponent."""
    return {v["against"]: v for v in found["verdicts"] if v["policy"] == DEFAULT}


def keep_grid(found: Found, counts: Seeds) -> None:
    """The grid among the results: the cells that count, and of each engine one day over time."""
    drawn = set()
    cells = []
    for cell in counts:
        is_day = bool(cell["contenders"][STOCK].get("levels"))
        whole = is_day and cell["engine"] not in drawn
        if whole:
            drawn.add(cell["engine"])
        over_time = () if whole else ("levels", "waiting")
        contenders = {
            name: {key: value for key, value in of.items() if key not in over_time}
            for name, of in cell["contenders"].items()
        }
        cells.append({**cell, "contenders": contenders})
    kept = {key: value for key, value in found.items() if key != "verdicts"}
    (RESULTS / "grid.json").write_text(json.dumps({**kept, "cells": cells}) + "\n")


def write_capacities(rows: list[dict[str, Any]], why: dict[tuple[str, str], str]) -> None:
    """What stock vLLM serves, and the best single set of flags."""
    shown = []
    for row in rows:
        found, at_once = row["capacity"], row["at_once"]
        served = f"{at_once} sessions at once" if at_once else "none" if found is None else f"{found['rate']:.3g}"
        doubled = "" if found is None else f"{found['doubled']:.3g}"
        flags = f"`{row['best_flags']}`" if row["best_flags"] else "its own"
        shown.append([row["engine"], row["traffic"], served, doubled, why[row["engine"], row["traffic"]] or flags])
    head = ("engine", "traffic", "requests/s", "in runs twice as long", "best single flags, or why it is left out")
    write_table("results", "capacity", markdown(head, shown))


def write_medians(found: Found) -> None:
    """`balanced` over every opponent."""
    verdicts = verdicts_of(found)
    titles = {gain["key"]: gain["title"] for v in verdicts.values() for gain in v["medians"]}
    rows = []
    for key, title in titles.items():
        row = [title]
        for against in OPPONENTS:
            gain = next((gain for gain in verdicts[against]["medians"] if gain["key"] == key), None)
            low, high = gain["interval"] if gain else (0.0, 0.0)
            row.append(f"{gain['median']:.2f} ({low:.2f}-{high:.2f})" if gain else "-")
        rows.append(row)
    write_table("results", "medians", markdown(("`balanced` over", *OPPONENTS), rows))


def write_floors(found: Found, cells: int) -> None:
    """The losses, a row a metric."""
    verdicts = {against: v["broken"] for against, v in verdicts_of(found).items()}
    metrics = sorted({line["metric"] for broken in verdicts.values() for line in broken})
    rows = []
    for metric in metrics:
        row = [metric]
        for against in (STOCK, SINGLE, ORACLE):
            broken = [line for line in verdicts[against] if line["metric"] == metric]
            worst = max(broken, key=lambda line: max(line["ratio"], 1 / max(line["ratio"], 1e-9)), default=None)
            row.append(f"{len(broken)}: {worst['ratio']:.2f} in {worst['cell']}" if worst else "none")
        rows.append(row)
    head = ("floor", *(f"cells of {cells} against {against}, the worst" for against in (STOCK, SINGLE, ORACLE)))
    write_table("results", "floors", markdown(head, rows))


def days(seeds: int) -> Iterator[Figure]:
    """The cells of the grid with the measured level promised to every request, who is late last; with the first seed
    beside the papers' policies."""
    founds = yield from promised("levels", "--promise", seeds, PAPERS)
    yield from judged_days(founds)
    write_levels(founds[0])


def days_quick(_: int) -> Iterator[Figure]:
    """The default in a few cells."""
    yield from judged_days([run_grid("levels-quick", SMALL, "--promise")[0]])


def refuse(_: int) -> Iterator[Figure]:
    """The same with one seed, but who is late is refused."""
    founds = yield from promised("levels-refuse", "--promise=refuse", 1)
    for figure in judged_days(founds):
        yield replace(figure, name=f"refusing: {figure.name}")


def promised(name: str, flag: str, seeds: int, papers: tuple[str, ...] = ()) -> Generator[Figure, None, list[Found]]:
    """A grid a seed; the first one with the papers' policies too."""
    founds, size = [], replace(WHOLE, traces=TRACE_FILES[:2])
    for seed in range(1, seeds + 1):
        policies = (*PROMISED, *(papers if seed == 1 else ()))
        found, took = run_grid(f"{name}-{seed}", size, flag, "--seed", str(seed), policies=policies)
        if seed == 1:
            yield from took
        founds.append(found)
    return founds


def agents(_: int) -> Iterator[Figure]:
    """Sessions of coding agents in closed loop, with the level promised to every request."""
    size = replace(WHOLE, traces=(str(SESSIONS),), more=("--part", "1/32"))
    found, took = run_grid("levels-agents", size, "--promise")
    yield from took
    for key, title, bound in (
        ("slo_attainment", "attainment", ">= 0.99"),
        ("throughput_tok_s", "throughput", ">= 0.99"),
        ("session_mean_s", "mean session", None),
        ("recomputed_tokens", "tokens computed again after preemption", "<= 1.05"),
    ):
        values = [ratio(cell, DEFAULT, STOCK, key) for cell in found["cells"]]
        yield ranged(f"agents: {title} over stock", values, "ratio", bound)


def over(cells: Seeds, one: str, other: str, key: str) -> float:
    """The median of the seeds of a metric over another contender's."""
    return median(ratio(cell, one, other, key) for cell in cells)


def judged_days(founds: list[Found]) -> Iterator[Figure]:
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
    contenders = days[0][0]["contenders"]
    for key, title, label, over_stock, over_flags in DAYS:
        policy = next((name for name in contenders if same(name, label)), "")
        for against, least in ((STOCK, over_stock), (SINGLE, over_flags)) if policy else ():
            values = [over(of, policy, against, key) for of in days]
            yield ranged(f"days: {title} over {against}", values, "ratio", f">= {least}")
            if (label, key) == (DEFAULT, "slo_attainment"):
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
            [line for line in verdicts_of(found)[against]["broken"] if ", day" not in line["cell"]] for found in founds
        ]
        floors = median(len(lines) for lines in broken)
        yield Figure(f"steady loads: floors broken against {against}", floors, "floors", f"<= {most}")
        for line in broken[0]:
            say(f"  {line['cell']}: {line['metric']} {line['ratio']:.2f} of {against}'s")
    again = max(over(of, DEFAULT, STOCK, "recomputed_tokens") for of in cells.values())
    yield Figure("tokens computed again, most over stock", again, "ratio", "<= 1.05")


def write_levels(found: Found) -> None:
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
