"""Against the vLLM that people run: its own defaults, its best flags, steady loads and days with a burst."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

from checks.areas.bench import RANKED_POLICIES, calibrated, real_run, spread
from checks.areas.setup import VERSIONS
from checks.figures import Figure, Part
from checks.report import markdown, write_table
from checks.run import RESULTS, ROOT, SERVEGEN, TRACES, WORK, meridian, output, say

DEFAULT = "balanced"
ENGINES = ("7b-h100", "8b-a100", "32b-h200", "r1-8xh200", str(WORK / "cpu.toml"))
# Chat traces without phases get thinking from the two modes of ServeGen's reasoning traffic.
TRACE_FILES = (
    SERVEGEN,
    f"{TRACES / 'azure2023_conv.csv'}:bimodal",
    TRACES / "azure2023_code.csv",
    TRACES / "mooncake_conversation.jsonl",
)
SESSIONS = TRACES / "agentic_sessions.jsonl"
# The shipped dispatch policies that order requests whether or not levels are promised.
ZOO = (DEFAULT, "output-first", "priority", "pascal", "srpt", "fair-share", "edf", "qoe", "mlfq")
# As `meridian bench grid` names the opponents.
STOCK, SINGLE, ORACLE = "stock", "stock, best flags", "stock, oracle flags"
OPPONENTS = (STOCK, SINGLE, ORACLE, "stock, chunks of 512", "EDF, lengths known", "SRPT, lengths known")
THROUGHPUT, GOODPUT = 0.9, 0.8  # of stock's, the least of a shipped policy in any cell


def presets(_: int) -> Iterator[Figure]:
    """Presets beside what the installed vLLM answers for the same devices, in every supported version."""
    test = ROOT / "python" / "tests" / "vllm" / "test_presets.py"
    equal = 0
    for version in VERSIONS:
        python = output(ROOT / "scripts" / "fetch.sh", "vllm", env={"MERIDIAN_VLLM": version})
        # Of the plugin it needs nothing.
        args = ("-q", "--noconftest", "-c", ROOT / "python" / "pyproject.toml", "--rootdir", ROOT)
        output(python, "-m", "pytest", *args, test)
        equal += 1
    yield Figure("presets: versions of vLLM whose defaults they have", equal, "versions", f">= {len(VERSIONS)}")
    yield Figure("presets: engines", len(meridian("bench", "engines")), "engines")


def meridian_grid(
    name: str, *more: str | Path, policies: tuple[str, ...] = ZOO
) -> tuple[dict[str, Any], Iterator[Figure]]:
    """A grid by the command that anybody can run, an interrupted one from where it was; and what a fresh one took. With
    MERIDIAN_REUSE_RUNS a grid that is there is not repeated: for tables of another form."""
    shutil.copy(RESULTS / "fidelity-engine.toml", WORK / "cpu.toml")
    saved, said = WORK / f"{name}.json", WORK / f"{name}.found.json"
    if os.environ.get("MERIDIAN_REUSE_RUNS") and said.exists():
        return json.loads(said.read_text()), iter(())
    is_fresh, before = not saved.with_suffix(".json.rows").exists(), resource.getrusage(resource.RUSAGE_CHILDREN)
    found = meridian(
        *("bench", "grid", "--engine", ",".join(ENGINES), *more),
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


def grid(_: int) -> Iterator[Figure]:
    """Every cell of traffic that arrives by itself."""
    traces = (flag for trace in TRACE_FILES for flag in ("--trace", trace))
    found, took = meridian_grid("grid", *traces, "--workload", "multi-turn")
    yield from took
    keep(found)
    yield from judged(found)


def sessions(_: int) -> Iterator[Figure]:
    """Agents' sessions in closed loop, so many at a time that stock vLLM has half of an unlimited cache's hits."""
    # A run of one in eight takes minutes, and a row is more than twenty runs.
    found, took = meridian_grid("sessions", "--trace", SESSIONS, "--part", "1/32", policies=(DEFAULT,))
    yield from took
    for cell in found["cells"]:
        for key, title in (("session_mean_s", "mean session"), ("computed_again_tokens", "tokens computed again")):
            name = f"sessions: {cell['engine']}, {cell['load']}: {title}, balanced over stock"
            yield Figure(name, ratio(cell, DEFAULT, STOCK, key), "ratio")


def keep(found: dict[str, Any]) -> None:
    """The grid among the results: the cells that count, and of each engine one day over time."""
    drawn = set()
    cells = []
    why = {(row["engine"], row["traffic"]): left_out(row) for row in found["rows"]}
    for cell in found["cells"]:
        if why[cell["engine"], cell["traffic"]] or not cell["converged"]:
            continue
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


def judged(found: dict[str, Any]) -> Iterator[Figure]:
    """The figures of a grid, and its tables."""
    rows, cells = found["rows"], found["cells"]
    why = {(row["engine"], row["traffic"]): left_out(row) for row in rows}
    counted = [cell for cell in cells if cell["converged"] and not why[cell["engine"], cell["traffic"]]]
    yield Figure("grid: cells", len(cells), "cells")
    yield Figure("grid: cells that count", len(counted), "cells")
    yield Figure("grid: rows left out: idle", sum("idle" in text for text in why.values()), "rows")
    unsettled = [at for at, text in why.items() if "not converged" in text]
    yield Figure(
        "grid: rows whose capacity moves by 2 % or more when runs are twice as long", len(unsettled), "rows", "<= 0"
    )
    for (engine, traffic), text in why.items():
        if text:
            say(f"  {engine}, {traffic}: {text}")
    capacities(rows, why)
    medians(found)
    floors(found, len(counted))
    verdicts = {v["against"]: v for v in found["verdicts"] if v["policy"] == DEFAULT}
    for against in OPPONENTS:
        yield Figure(f"grid: floors that balanced breaks against {against}", len(verdicts[against]["broken"]), "floors")
        for gain in verdicts[against]["medians"]:
            name = f"grid: balanced over {against}, hard cells: {gain['title']}"
            yield Figure(name, gain["median"], "ratio, 95 % interval of the median", None, *gain["interval"])
    for against, key in ((STOCK, "goodput_rps"), (STOCK, "itl_output_p99_ms"), (SINGLE, "goodput_rps")):
        gain = next(gain for gain in verdicts[against]["medians"] if gain["key"] == key)
        name = f"grid: balanced over {against}, range: {gain['title']}"
        yield Figure(name, gain["median"], "ratio, lowest and highest cell", None, gain["low"], gain["high"])
    for policy in ZOO:
        for key, title, least in (("throughput_tok_s", "throughput", THROUGHPUT), ("goodput_rps", "goodput", GOODPUT)):
            worst = min(ratio(cell, policy, STOCK, key) for cell in counted)
            yield Figure(f"zoo: {policy}: least {title} in a cell", worst, "of stock's", f">= {least}")


def left_out(row: dict[str, Any]) -> str:
    """Why the cells of a row enter no median (`Row::left_out` in bench/src/grid/mod.rs)."""
    capacity = row["capacity"]
    if capacity is None:
        return "" if row["at_once"] else "no rate is served"
    if not capacity["converged"]:
        return f"not converged: {100 * (capacity['doubled'] / capacity['rate'] - 1):+.1f} %"
    return f"idle: {capacity['busy']:.2f} busy" if capacity["busy"] < 0.5 else ""


def ratio(cell: dict[str, Any], one: str, other: str, key: str) -> float:
    """A contender's metric over another's; where that has none, with one more of each."""
    ours, theirs = (cell["contenders"][name]["metrics"][key] for name in (one, other))
    return ours / theirs if theirs else ours + 1.0


def capacities(rows: list[dict[str, Any]], why: dict[tuple[str, str], str]) -> None:
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


def medians(found: dict[str, Any]) -> None:
    """`balanced` over every opponent."""
    verdicts = {v["against"]: v for v in found["verdicts"] if v["policy"] == DEFAULT}
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


def floors(found: dict[str, Any], cells: int) -> None:
    """The losses, a row a metric."""
    verdicts = {v["against"]: v["broken"] for v in found["verdicts"] if v["policy"] == DEFAULT}
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


# Requests a second of the workload of checks/engine/fidelity.toml at the factor 1, which this engine about serves.
DAY_RATE, DAY = 9.0, "0.6x15,1.6x25,0.6x30"
# The headline metrics by which policies are ranked.
RANKED = {"TTFO": "ttfo_mean_ms", "end to end": "e2e_mean_ms"}


def day(_: int) -> Iterator[Figure]:
    """A day with a burst in the real engine, under stock vLLM and seven policies, beside the simulator.

    The machine's own speed drifts by several percent within minutes, so stock vLLM runs right between the two runs
    that the model is fitted to, and twice more: nothing can be nearer than its repetitions are to each other.
    """
    traces = {}
    for seed in (11, 12, 13):
        workload = WORK / "fidelity-day.toml"
        text = (ROOT / "checks" / "engine" / "fidelity.toml").read_text()
        workload.write_text(text.replace("requests_per_s = 6.0", f"requests_per_s = {DAY_RATE}"))
        traces[seed] = str(WORK / f"day-{seed}.csv")
        meridian("bench", "generate", "--workload", workload, "--seed", str(seed), "--day", DAY, "--out", traces[seed])

    def fit(seed: int) -> str:
        return real_run(f"day-fit-{seed}", seed, "stock", requests=traces[seed])

    def stock(turn: int) -> str:
        return real_run(f"day-stock-{turn}", 12, "stock", requests=traces[12])

    fits, tests = [fit(11)], [stock(1)]
    fits.append(fit(13))
    for number, name in enumerate(RANKED_POLICIES):
        tests.append(real_run(f"day-{name}", 12, f"native:{name}", requests=traces[12]))
        if number == len(RANKED_POLICIES) // 2:
            tests.append(stock(2))
    tests.append(stock(3))
    errors = calibrated(fits, tests)
    first, repeated = errors[0], [each for each in errors if each["scheduler"] == "stock"]
    for title, key, bound in (("TTFO", "ttfo", "<= 3"), ("ITL", "itl", "<= 2.5"), ("end to end", "e2e", "<= 1.5")):
        yield Figure(f"day: MAPE {title}, stock", first[key], "%", bound)
    for title in ("real", "simulated"):
        yield Figure(f"day: attainment, stock, {title}", 100 * first[title]["slo_attainment"], "%")
    apart = abs(first["real"]["slo_attainment"] - first["simulated"]["slo_attainment"])
    yield Figure("day: attainment, real and simulated apart", 100 * apart, "points", "<= 2")
    ranked = [*[each for each in errors if each["scheduler"] != "stock"], first]
    for title, key in RANKED.items():
        noise = spread([each["real"][key] for each in repeated])
        yield Figure(f"day: {title} of stock in the real engine, repeated: spread", noise, "%")
        far = max(3.0, noise) / 100
        pairs = [(a, b) for a, b in combinations(ranked, 2) if abs(a["real"][key] / b["real"][key] - 1.0) > far]
        alike = [
            (a, b) for a, b in pairs if (a["real"][key] < b["real"][key]) == (a["simulated"][key] < b["simulated"][key])
        ]
        yield Figure(f"day: pairs of policies further apart in {title} than that", len(pairs), "pairs")
        yield Figure(f"day: of these, ordered alike ({title})", len(alike) / max(len(pairs), 1), "share", ">= 1")


PARTS: dict[str, Part] = {"presets": presets, "grid": grid, "sessions": sessions, "day": day}
