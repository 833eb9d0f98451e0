"""The default dispatch policy over engines, traffic and load, against stock vLLM, as it is and tuned."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from areas.bench import COMPONENTS, SERVEGEN, TRACES, meridian, write_between
from areas.common import RESULTS, ROOT, WORK, Bound, Figure, compared, metrics_of, over_pairs, say, seeds

DEFAULT = "balanced"
# The same with thresholds of early exit that follow the queue; entropies are drawn from recorded ones (simulator.md).
EARLY_EXIT = "balanced, budget deadline-aware.wasm"
EARLY_EXIT_SLOTS = f"dispatch=native:balanced,budget={COMPONENTS / 'deadline-aware.wasm'}"
ENGINES = ("7b-h100", "8b-a100", "32b-h200", str(RESULTS / "fidelity-engine.toml"))
# Chat traces without phases get thinking from the two modes of ServeGen's reasoning traffic.
TRACE_FILES = (
    str(SERVEGEN),
    f"{TRACES / 'azure2023_conv.csv'}:bimodal",
    f"{TRACES / 'mooncake_conversation.jsonl'}:bimodal",
)
WORKLOAD = "multi-turn"
REQUESTS = 1500
STOCK, TUNED = "stock", "tuned"
# Of the gains at 0.95 of the capacity and more: key, title, bound against stock, bound against tuned stock.
GAINS = (
    ("itl_output_p99_ms", "p99 output ITL", Bound(0.40), Bound(0.85)),
    ("ttfo_p50_ms", "TTFO p50", Bound(0.85), Bound(0.90)),
    ("goodput_rps", "goodput", Bound(1.10, at_most=False), Bound(1.08, at_most=False)),
    ("throughput_tok_s", "throughput", None, None),
    ("ttfo_p99_ms", "TTFO p99", None, None),
    ("ttft_p50_ms", "TTFT p50", None, None),
    ("recomputed_tokens", "recomputed tokens", None, Bound(0.6)),
)
# What an order costs and gains over that of arrival.
FORECAST = {
    "ttfo_p50_ms": "TTFO p50",
    "ttfo_p99_ms": "TTFO p99",
    "ttft_p50_ms": "TTFT p50",
    "itl_output_p99_ms": "output ITL p99",
    "goodput_rps": "goodput",
    "throughput_tok_s": "throughput",
}
ORACLE, OURS, TUNED_FLAGS = "oracle (`srpt`, lengths known)", "`mlfq`", "stock, tuned flags"


def thresholds() -> Path:
    """Thresholds of EAT that area `budget` chose on recorded thoughts, as a configuration."""
    chosen = json.loads((RESULTS / "early-exit.json").read_text())["tuning"]["choices"]["eat"]["setting"]
    names = {
        "ema_alpha": "alpha",
        "eat_variance_threshold": "delta",
        "min_probes": "min_probes",
        "eat_max_bits": "max_bits",
    }
    path = WORK / "early-exit.toml"
    path.write_text(
        "[model]\nstrips_reasoning = true\n[entropy]\n"
        + "".join(f"{field} = {chosen[name]}\n" for field, name in names.items())
    )
    return path


def meridian_grid(runs: int, *more: str) -> dict[str, Any]:
    """All cells, by the command that anybody can run."""
    WORK.mkdir(parents=True, exist_ok=True)
    args = ["--engine", ",".join(ENGINES), "--workload", WORKLOAD, "--requests", str(REQUESTS), "--seeds", seeds(runs)]
    args += [flag for trace in TRACE_FILES for flag in ("--trace", trace)]
    args += more
    say(f"  meridian bench grid {' '.join(args)}")
    return meridian("grid", *args)


def pages(found: dict[str, Any], verdicts: dict[str, dict[str, Any]]) -> None:
    """Every floor that does not hold, by name, and the capacities, in the page of the policies."""
    page = Path(ROOT / "docs" / "src" / "policies.md")
    rows = ["", "| cell | against | metric | ratio | bound |", "|---|---|---|---|---|"]
    for against in (STOCK, TUNED):
        for broken in verdicts[against]["broken"]:
            cells = (broken["cell"], against, broken["metric"], f"{broken['ratio']:.2f}", f"{broken['bound']:g}")
            rows.append(f"| {' | '.join(cells)} |")
    write_between(page, "broken", rows)
    capacities(found["rows"])


def capacities(found: list[dict[str, Any]], names: tuple[str, ...] = (DEFAULT,)) -> None:
    """The highest rates that are served, in the page of the policies."""
    page = ROOT / "docs" / "src" / "policies.md"
    titles = {DEFAULT: "`balanced`", EARLY_EXIT: "with early exit"}
    head = ("engine", "traffic", "tuned stock", *(word for name in names for word in (titles[name], "ratio")))
    rows = ["", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in found:
        rates = [row["capacity"].get(name) for name in (TUNED, *names)]
        shown = ["none" if rate is None else f"{rate:.3g}" for rate in rates]
        ratios = ["-" if rates[0] is None else f"{(rate or 0.0) / rates[0]:.2f}" for rate in rates]
        cells = [row["engine"], row["traffic"], shown[0]]
        cells += [text for pair in zip(shown[1:], ratios[1:], strict=True) for text in pair]
        rows.append(f"| {' | '.join(cells)} |")
    write_between(page, "capacity", rows)


def keep(found: dict[str, Any]) -> None:
    """The cells among the results, with the metrics that are judged: a seed has sixty."""
    keys = {key for key, *_ in GAINS} | {"ttft_p99_ms", "fairness_jain", "slo_attainment"}
    cells = []
    for cell in found["cells"]:
        runs = {
            name: [{k: v for k, v in run.items() if k in keys} for run in of] for name, of in cell["contenders"].items()
        }
        cells.append({**cell, "contenders": runs})
    (RESULTS / "grid.json").write_text(json.dumps({**found, "cells": cells}) + "\n")


def grid(runs: int) -> Iterator[Figure]:
    """Floors in every cell, gains at high load, and capacities."""
    found = meridian_grid(runs, "--policy", DEFAULT, "--html", str(WORK / "grid.html"))
    keep(found)
    verdicts = {verdict["against"]: verdict for verdict in found["verdicts"] if verdict["policy"] == DEFAULT}
    pages(found, verdicts)
    yield Figure("grid: cells", len(found["cells"]), "cells")
    yield Figure("grid: seeds", len(found["seeds"]), "seeds", Bound(5, at_most=False))
    for against in (STOCK, TUNED):
        broken = verdicts[against]["broken"]
        for line in broken:
            say(f"  below the floor against {against}: {line['cell']}: {line['metric']} {line['ratio']:.2f}")
        yield Figure(f"grid: floors broken against {against}", len(broken), "of 8 a cell", Bound(0))
        cells = len({line["cell"] for line in broken})
        yield Figure(f"grid: cells with a broken floor against {against}", cells, "cells")
        gains = {gain["key"]: gain for gain in verdicts[against]["gains"]}
        for key, title, to_stock, to_tuned in GAINS:
            if key in gains:
                gain, bound = gains[key], to_stock if against == STOCK else to_tuned
                name = f"grid: {title} over {against}, load 0.95 and more"
                yield Figure(name, gain["median"], "ratio, lowest and highest cell", bound, gain["low"], gain["high"])
    yield capacity(found["rows"], DEFAULT, "grid: capacity over tuned stock, dispatch and eviction", 1.10)


def capacity(rows: list[dict[str, Any]], name: str, title: str, least: float) -> Figure:
    """The highest rate that is served, over tuned stock's; 0 where tuned stock serves a load and the policy none."""
    served = [row["capacity"] for row in rows if row["capacity"].get(TUNED) is not None]
    ratios = [(rates.get(name) or 0.0) / rates[TUNED] for rates in served]
    bound = Bound(least, at_most=False)
    return Figure(title, median(ratios), "ratio, lowest and highest row", bound, min(ratios), max(ratios))


def early_exit(runs: int) -> Iterator[Figure]:
    """What early exit adds to the capacity. Tuned stock's is that of the grid: configured thresholds act beside
    `native:fcfs` too."""
    rows = json.loads((RESULTS / "grid.json").read_text())["rows"]
    WORK.mkdir(parents=True, exist_ok=True)
    found = meridian_grid(runs, "--policy", EARLY_EXIT_SLOTS, "--config", str(thresholds()), "--loads", "0.95")
    served = {(row["engine"], row["traffic"]): row["capacity"].get(EARLY_EXIT) for row in found["rows"]}
    for row in rows:
        row["capacity"][EARLY_EXIT] = served[row["engine"], row["traffic"]]
    capacities(rows, (DEFAULT, EARLY_EXIT))
    for traffic in (SERVEGEN.name, ""):
        of = [row for row in rows if traffic in row["traffic"]]
        title = (
            f"early exit: capacity over tuned stock, dispatch, eviction and early exit{', ServeGen' if traffic else ''}"
        )
        yield capacity(of, EARLY_EXIT, title, 1.35)


def replayed(engine: str, rate: float, runs: int, *args: str) -> list[dict[str, float]]:
    """Metrics of each seed under the last policy that `args` name."""
    shown = Path(engine).name
    say(f"  meridian bench replay --engine {shown} --rate {rate:.3g} {' '.join(args)}")
    fixed = ("--engine", engine, "--rate", f"{rate:.6g}", "--seeds", seeds(runs), "--requests", str(REQUESTS))
    found = meridian("replay", *fixed, "--trace", str(SERVEGEN), *args)["runs"]
    policy = found[-1]["policy"]
    return [run["metrics"] for run in found if run["policy"] == policy]


def over(ours: list[dict[str, float]], stock: list[dict[str, float]], key: str) -> float:
    """Median over seeds of the ratio."""
    return median(a[key] / b[key] for a, b in zip(ours, stock, strict=True))


def forecast(runs: int) -> Iterator[Figure]:
    """Least attained service with levels, and an oracle that knows lengths, against the order of arrival."""
    WORK.mkdir(parents=True, exist_ok=True)
    config = WORK / "preempt_for_waiting.toml"
    config.write_text("[scheduler]\npreempt_for_waiting = true\n")
    waiting = ("--config", str(config))
    # Probes whose entropies the policy sees, and which end nothing.
    probes = 'dispatch=mlfq,budget=patience{"answers": 1000}'
    contenders: dict[str, tuple[str, ...]] = {
        ORACLE: ("--max-tokens", "exact", "--policy", "srpt"),
        OURS: (*waiting, "--policy", "mlfq"),
        "`mlfq`, entropies probed": (*waiting, "--policy", probes),
        "`mlfq`, nobody gives way": ("--policy", "mlfq"),
    }
    cells = json.loads((RESULTS / "grid.json").read_text())["cells"]
    rows = ["", f"| cell | order | {' | '.join(FORECAST.values())} |", "|---" * (2 + len(FORECAST)) + "|"]
    names = (TUNED_FLAGS, *contenders)
    ratios: dict[str, dict[str, list[float]]] = {name: {key: [] for key in FORECAST} for name in names}
    for engine in ENGINES[:3]:
        for load in (0.95, 1.05, 1.3):
            is_cell = (engine, SERVEGEN.name, load)
            (cell,) = (c for c in cells if (c["engine"], c["traffic"], c["load"]) == is_cell)
            flags = {f"--{name.replace('_', '-')}": str(value) for name, value in cell["flags"].items()}
            tuned = tuple(word for flag in flags.items() for word in flag)
            rate = cell["rate"]
            stock = replayed(engine, rate, runs, "--policy", "fcfs")
            for name, args in {TUNED_FLAGS: (*tuned, "--policy", "fcfs"), **contenders}.items():
                ours = replayed(engine, rate, runs, *args)
                found = {key: over(ours, stock, key) for key in FORECAST}
                shown = " | ".join(f"{ratio:.2f}" for ratio in found.values())
                rows.append(f"| {engine}, load {load:g} | {name} | {shown} |")
                if load > 1.0:
                    for key, ratio in found.items():
                        ratios[name][key].append(ratio)
    write_between(ROOT / "docs" / "src" / "policies.md", "forecast", rows)
    gains = [
        (1.0 - mine) / (1.0 - its)
        for mine, its in zip(ratios[OURS]["ttfo_p50_ms"], ratios[ORACLE]["ttfo_p50_ms"], strict=True)
    ]
    unit = "of the oracle's gain, lowest and highest cell"
    yield Figure("forecast: gain in TTFO p50", median(gains), unit, Bound(0.5, at_most=False), min(gains), max(gains))
    unit = "ratio, lowest and highest cell"
    for name, of in ratios.items():
        plain = name.replace("`", "")
        for key, title in FORECAST.items():
            values, what = of[key], f"forecast: {plain}: {title} over stock, load 1.05 and 1.3"
            yield Figure(what, median(values), unit, low=min(values), high=max(values))


# The real engine: `loaded`, whose KV memory is ample, and `kv-tight`, at parts of what stock vLLM serves. With so many
# requests the batch is full for most of a run: at the end long ones are left, and an order that admits those last pays.
REAL = {"loaded": 480, "kv-tight": 240}
REAL_LOADS = (0.8, 1.0, 1.3)
# More requests a second than any engine here serves: what it completes then is its capacity.
SATURATED = 64.0
REAL_TOKENS = ("stock:256", "stock:512", "stock:1024")
# The floor of `bench/src/grid/floor.rs` in what the real engine tells: bound, and how much may be lost besides, ms.
REAL_FLOOR = {
    "throughput_tok_s": (Bound(0.99, at_most=False), 0.0),
    "goodput_rps": (Bound(0.99, at_most=False), 0.0),
    "ttfo_p50_ms": (Bound(1.03), 0.0),
    "ttfo_p99_ms": (Bound(1.03), 0.0),
    "itl_output_p99_ms": (Bound(1.03), 0.0),
    "ttft_p50_ms": (Bound(1.1), 50.0),
    "ttft_p99_ms": (Bound(1.15), 500.0),
}
REAL_NAMES = {
    "throughput_tok_s": "throughput",
    "goodput_rps": "goodput",
    "ttfo_p50_ms": "TTFO p50",
    "ttfo_p99_ms": "TTFO p99",
    "itl_output_p99_ms": "output ITL p99",
    "ttft_p50_ms": "TTFT p50",
    "ttft_p99_ms": "TTFT p99",
}
# Above capacity, against stock vLLM.
REAL_GAINS = {
    "itl_output_p99_ms": Bound(0.5),
    "ttfo_p50_ms": Bound(1.0),
    "throughput_tok_s": Bound(1.0, at_most=False),
}


def real(scenario: str, pairs: int) -> Iterator[Figure]:
    """The floor and the gains in vLLM itself, below, at and above its capacity, against stock as it is and tuned."""
    fixed = ("--scenario", scenario, "--requests", str(REAL[scenario]))

    def runs(rate: float, of_seeds: str, *policies: str) -> dict[str, Any]:
        named = tuple(word for policy in policies for word in ("--policy", policy))
        label = f"real-{scenario}-{rate:.3g}"
        (found,) = compared(label, *fixed, "--rate", f"{rate:.4g}", "--seeds", of_seeds, *named)
        return found

    (run,) = metrics_of(runs(SATURATED, "1", STOCK), STOCK)
    if not run["slo_attainment"]:
        sys.exit(f"error: {scenario}: stock attains nothing when saturated, so what it completes is not known")
    served = run["goodput_rps"] / run["slo_attainment"]
    yield Figure(f"real, {scenario}: requests that stock vLLM completes", served, "requests/s")
    tried = runs(served, "1", STOCK, *REAL_TOKENS)
    goodput = {name: metrics_of(tried, name)[0]["goodput_rps"] for name in REAL_TOKENS}
    tuned = max(goodput, key=lambda name: goodput[name])
    say(f"  tuned: {tuned} of {goodput}")
    medians: dict[tuple[str, float, str], float] = {}
    for load in REAL_LOADS:
        found = runs(load * served, seeds(pairs), STOCK, tuned, DEFAULT)
        ours = metrics_of(found, DEFAULT)
        for against, name in ((STOCK, STOCK), (TUNED, tuned)):
            theirs = metrics_of(found, name)
            for key, (bound, slack) in REAL_FLOOR.items():
                ratios = [a[key] / b[key] for a, b in zip(ours, theirs, strict=True)]
                most = max(bound.limit, 1.0 + slack / median(b[key] for b in theirs)) if slack else bound.limit
                title = f"real, {scenario}, load {load:g}: {key} over {against}"
                yield over_pairs(title, ratios, "ratio", Bound(most, bound.at_most))
                medians[key, load, against] = median(ratios)
                if load > 1.0 and against == STOCK and key in REAL_GAINS:
                    yield over_pairs(f"{title}, gain", ratios, "ratio", REAL_GAINS[key])
    real_table(scenario, served, medians)


def real_table(scenario: str, served: float, medians: dict[tuple[str, float, str], float]) -> None:
    """Every ratio of a scenario, losses and gains, in the documentation."""
    cells = [(load, against) for load in REAL_LOADS for against in (STOCK, TUNED)]
    heads = [f"load {load:g}, {against}" for load, against in cells]
    rows = ["", f"| {scenario}, {served:.3g} requests/s | {' | '.join(heads)} |", "|---" * (1 + len(cells)) + "|"]
    for key in REAL_FLOOR:
        shown = " | ".join(f"{medians[(key, *cell)]:.2f}" for cell in cells)
        rows.append(f"| {REAL_NAMES[key]} | {shown} |")
    write_between(ROOT / "docs" / "src" / "policies.md", f"real-{scenario}", rows)


def parts(pairs: int) -> dict[str, Callable[[], Iterator[Figure]]]:
    """The parts of the area; `pairs` are seeds."""
    return {
        "grid": lambda: grid(pairs),
        "early-exit": lambda: early_exit(pairs),
        "forecast": lambda: forecast(pairs),
        **{f"real-{scenario}": partial(real, scenario, pairs) for scenario in REAL},
    }
