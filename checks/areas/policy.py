"""The default dispatch policy over engines, traffic and load, against stock vLLM, as it is and tuned."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from checks.figures import Figure, Part, over_pairs, ranged
from checks.report import markdown, write_table
from checks.run import POLICIES, RESULTS, SERVEGEN, TRACES, WORK, compared, meridian, metrics_of, say, seeds

DEFAULT = "balanced"
# The same with thresholds of early exit that follow the queue; entropies are drawn from recorded ones (simulator.md).
EARLY_EXIT = "balanced, budget deadline-aware.wasm"
EARLY_EXIT_SLOTS = f"dispatch=native:balanced,budget={POLICIES / 'deadline-aware.wasm'}"
ENGINES = ("7b-h100", "8b-a100", "32b-h200", str(RESULTS / "fidelity-engine.toml"))
# Chat traces without phases get thinking from the two modes of ServeGen's reasoning traffic.
TRACE_FILES = (
    str(SERVEGEN),
    f"{TRACES / 'azure2023_conv.csv'}:bimodal",
    f"{TRACES / 'mooncake_conversation.jsonl'}:bimodal",
)
REQUESTS = "1500"
STOCK, TUNED = "stock", "tuned"
# Of the gains at 0.95 of the capacity and more: title, bound against stock, bound against tuned stock.
GAINS: dict[str, tuple[str, str | None, str | None]] = {
    "itl_output_p99_ms": ("p99 output ITL", "<= 0.4", "<= 0.85"),
    "ttfo_p50_ms": ("TTFO p50", "<= 0.85", "<= 0.9"),
    "goodput_rps": ("goodput", ">= 1.1", ">= 1.08"),
    "throughput_tok_s": ("throughput", None, None),
    "ttfo_p99_ms": ("TTFO p99", None, None),
    "ttft_p50_ms": ("TTFT p50", None, None),
    "recomputed_tokens": ("recomputed tokens", None, "<= 0.6"),
}
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
LOWEST_AND_HIGHEST = "ratio, lowest and highest cell"


def result(name: str) -> dict[str, Any]:
    """A kept document."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def ratio(one: dict[str, float], other: dict[str, float], key: str) -> float:
    """A metric over another run's."""
    return one[key] / other[key]


def meridian_grid(runs: int, *more: str) -> dict[str, Any]:
    """All cells, by the command that anybody can run."""
    args = ["--engine", ",".join(ENGINES), "--workload", "multi-turn", "--requests", REQUESTS, "--seeds", seeds(runs)]
    return meridian("bench", "grid", *args, *(flag for trace in TRACE_FILES for flag in ("--trace", trace)), *more)


def capacities(found: list[dict[str, Any]], titles: dict[str, str]) -> None:
    """The highest rates that are served, in the page of the policies."""
    head = ("engine", "traffic", "tuned stock", *(word for title in titles.values() for word in (title, "ratio")))
    rows: list[list[str]] = []
    for row in found:
        tuned, *others = (row["capacity"].get(name) for name in (TUNED, *titles))
        rows.append([row["engine"], row["traffic"], "none" if tuned is None else f"{tuned:.3g}"])
        for rate in others:
            rows[-1] += ["none" if rate is None else f"{rate:.3g}"]
            rows[-1] += ["-" if tuned is None else f"{(rate or 0.0) / tuned:.2f}"]
    write_table("policies", "capacity", markdown(head, rows))


def keep(found: dict[str, Any]) -> None:
    """The cells among the results, with the metrics that are judged: a seed has sixty."""
    keys = {*GAINS, "ttft_p99_ms", "fairness_jain", "slo_attainment"}
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
    # Every floor that does not hold, by name.
    broken = [(against, line) for against in (STOCK, TUNED) for line in verdicts[against]["broken"]]
    rows = [(x["cell"], against, x["metric"], f"{x['ratio']:.2f}", f"{x['bound']:g}") for against, x in broken]
    write_table("policies", "broken", markdown(("cell", "against", "metric", "ratio", "bound"), rows))
    capacities(found["rows"], {DEFAULT: "`balanced`"})
    yield Figure("grid: cells", len(found["cells"]), "cells")
    yield Figure("grid: seeds", len(found["seeds"]), "seeds", ">= 5")
    for place, against in enumerate((STOCK, TUNED), 1):
        cells = [line["cell"] for line in verdicts[against]["broken"]]
        yield Figure(f"grid: floors broken against {against}", len(cells), "of 8 a cell", "<= 0")
        yield Figure(f"grid: cells with a broken floor against {against}", len(set(cells)), "cells")
        gains = {gain["key"]: gain for gain in verdicts[against]["gains"]}
        for key in (key for key in GAINS if key in gains):
            name = f"grid: {GAINS[key][0]} over {against}, load 0.95 and more"
            bound, gain = GAINS[key][place], gains[key]
            yield Figure(name, gain["median"], LOWEST_AND_HIGHEST, bound, gain["low"], gain["high"])
    yield capacity(found["rows"], DEFAULT, "grid: capacity over tuned stock, dispatch and eviction", ">= 1.1")


def capacity(rows: list[dict[str, Any]], name: str, title: str, bound: str) -> Figure:
    """The highest rate that is served, over tuned stock's; 0 where tuned stock serves a load and the policy none."""
    served = [row["capacity"] for row in rows if row["capacity"].get(TUNED) is not None]
    ratios = [(rates.get(name) or 0.0) / rates[TUNED] for rates in served]
    return ranged(title, ratios, "ratio, lowest and highest row", bound)


def early_exit(runs: int) -> Iterator[Figure]:
    """What early exit adds to the capacity. Tuned stock's is that of the grid: configured thresholds act beside
    `native:fcfs` too."""
    # Thresholds of EAT that area `budget` chose on recorded thoughts.
    chosen = result("early-exit")["tuning"]["choices"]["eat"]["setting"]
    fields = {
        "ema_alpha": "alpha",
        "eat_variance_threshold": "delta",
        "min_probes": "min_probes",
        "eat_max_bits": "max_bits",
    }
    config = WORK / "early-exit.toml"
    values = "".join(f"{field} = {chosen[name]}\n" for field, name in fields.items())
    config.write_text(f"[model]\nstrips_reasoning = true\n[entropy]\n{values}")
    rows = result("grid")["rows"]
    found = meridian_grid(runs, "--policy", EARLY_EXIT_SLOTS, "--config", str(config), "--loads", "0.95")
    served = {(row["engine"], row["traffic"]): row["capacity"].get(EARLY_EXIT) for row in found["rows"]}
    for row in rows:
        row["capacity"][EARLY_EXIT] = served[row["engine"], row["traffic"]]
    capacities(rows, {DEFAULT: "`balanced`", EARLY_EXIT: "with early exit"})
    title = "early exit: capacity over tuned stock, dispatch, eviction and early exit"
    of_servegen = [row for row in rows if SERVEGEN.name in row["traffic"]]
    yield capacity(of_servegen, EARLY_EXIT, f"{title}, ServeGen", ">= 1.35")
    yield capacity(rows, EARLY_EXIT, title, ">= 1.35")


def replayed(engine: str, rate: float, runs: int, args: Sequence[str]) -> list[dict[str, float]]:
    """Metrics of each seed under the last policy that `args` name."""
    fixed = ("--engine", engine, "--rate", f"{rate:.6g}", "--seeds", seeds(runs), "--requests", REQUESTS)
    found = meridian("bench", "replay", *fixed, "--trace", SERVEGEN, *args)["runs"]
    return [run["metrics"] for run in found if run["policy"] == found[-1]["policy"]]


def forecast(runs: int) -> Iterator[Figure]:
    """Least attained service with levels, and an oracle that knows lengths, against the order of arrival."""
    config = WORK / "preempt_for_waiting.toml"
    config.write_text("[scheduler]\npreempt_for_waiting = true\n")
    waiting = ("--config", str(config), "--policy")
    contenders: dict[str, tuple[str, ...]] = {
        TUNED_FLAGS: ("--policy", "fcfs"),
        ORACLE: ("--max-tokens", "exact", "--policy", "srpt"),
        OURS: (*waiting, "mlfq"),
        # Probes whose entropies the policy sees, and which end nothing.
        "`mlfq`, entropies probed": (*waiting, 'dispatch=mlfq,budget=patience{"answers": 1000}'),
        "`mlfq`, nobody gives way": ("--policy", "mlfq"),
    }
    cells = {(c["engine"], c["traffic"], c["load"]): c for c in result("grid")["cells"]}
    rows: list[list[str]] = []
    ratios: dict[str, dict[str, list[float]]] = {name: {key: [] for key in FORECAST} for name in contenders}
    for engine in ENGINES[:3]:
        for load in (0.95, 1.05, 1.3):
            cell = cells[engine, SERVEGEN.name, load]
            tuned = [x for k, v in cell["flags"].items() for x in (f"--{k.replace('_', '-')}", str(v))]
            stock = replayed(engine, cell["rate"], runs, ("--policy", "fcfs"))
            for name, args in contenders.items():
                ours = replayed(engine, cell["rate"], runs, [*(tuned if name == TUNED_FLAGS else ()), *args])
                found = {key: median(ratio(a, b, key) for a, b in zip(ours, stock, strict=True)) for key in FORECAST}
                rows.append([f"{engine}, load {load:g}", name, *(f"{value:.2f}" for value in found.values())])
                if load > 1.0:
                    for key, value in found.items():
                        ratios[name][key].append(value)
    write_table("policies", "forecast", markdown(("cell", "order", *FORECAST.values()), rows))
    pairs = zip(ratios[OURS]["ttfo_p50_ms"], ratios[ORACLE]["ttfo_p50_ms"], strict=True)
    gains = [(1.0 - mine) / (1.0 - its) for mine, its in pairs]
    yield ranged("forecast: gain in TTFO p50", gains, "of the oracle's gain, lowest and highest cell", ">= 0.5")
    for name, of in ratios.items():
        for key, title in FORECAST.items():
            what = f"forecast: {name.replace('`', '')}: {title} over stock, load 1.05 and 1.3"
            yield ranged(what, of[key], LOWEST_AND_HIGHEST)


# The real engine with ample KV memory, at parts of what stock vLLM serves. With so many requests the batch is full for
# most of a run: at the end long ones are left, and an order that admits those last pays.
REAL_FLAGS = ("--scenario", "loaded", "--requests", "480")
REAL_LOADS = (0.8, 1.0, 1.3)
# More requests a second than any engine here serves: what it completes then is its capacity.
SATURATED = 64.0
REAL_TOKENS = ("stock:256", "stock:512", "stock:1024")
# The floor of `bench/src/grid/floor.rs` in what the real engine tells: name, bound, what may be lost besides, ms.
REAL_FLOOR = {
    "throughput_tok_s": ("throughput", ">= 0.99", 0.0),
    "goodput_rps": ("goodput", ">= 0.99", 0.0),
    "ttfo_p50_ms": ("TTFO p50", "<= 1.03", 0.0),
    "ttfo_p99_ms": ("TTFO p99", "<= 1.03", 0.0),
    "itl_output_p99_ms": ("output ITL p99", "<= 1.03", 0.0),
    "ttft_p50_ms": ("TTFT p50", "<= 1.1", 50.0),
    "ttft_p99_ms": ("TTFT p99", "<= 1.15", 500.0),
}
# Above capacity, against stock vLLM.
REAL_GAINS = {"itl_output_p99_ms": "<= 0.5", "ttfo_p50_ms": "<= 1", "throughput_tok_s": ">= 1"}


def real(pairs: int) -> Iterator[Figure]:
    """The floor and the gains in vLLM itself, below, at and above its capacity, against stock as it is and tuned."""

    def runs(rate: float, of_seeds: str, *policies: str) -> dict[str, Any]:
        named = (word for policy in policies for word in ("--policy", policy))
        flags = (*REAL_FLAGS, "--rate", f"{rate:.4g}", "--seeds", of_seeds)
        (found,) = compared(f"real-loaded-{rate:.3g}", *flags, *named)
        return found

    (run,) = metrics_of(runs(SATURATED, "1", STOCK), STOCK)
    if not run["slo_attainment"]:
        sys.exit("error: stock attains nothing when saturated, so what it completes is not known")
    served = run["goodput_rps"] / run["slo_attainment"]
    yield Figure("real, loaded: requests that stock vLLM completes", served, "requests/s")
    tried = runs(served, "1", STOCK, *REAL_TOKENS)
    goodput = {name: metrics_of(tried, name)[0]["goodput_rps"] for name in REAL_TOKENS}
    tuned = max(goodput, key=lambda name: goodput[name])
    say(f"  tuned: {tuned} of {goodput}")
    shown: dict[str, list[str]] = {key: [] for key in REAL_FLOOR}
    heads: list[str] = []
    for load in REAL_LOADS:
        found = runs(load * served, seeds(pairs), STOCK, tuned, DEFAULT)
        for against, name in ((STOCK, STOCK), (TUNED, tuned)):
            heads.append(f"load {load:g}, {against}")
            theirs = metrics_of(found, name)
            for key, (_, bound, slack) in REAL_FLOOR.items():
                ratios = [ratio(a, b, key) for a, b in zip(metrics_of(found, DEFAULT), theirs, strict=True)]
                if slack:
                    limit = float(bound.split()[1])
                    bound = f"<= {max(limit, 1.0 + slack / median(b[key] for b in theirs))}"
                title = f"real, loaded, load {load:g}: {key} over {against}"
                yield over_pairs(title, ratios, "ratio", bound)
                shown[key].append(f"{median(ratios):.2f}")
                if load > 1.0 and against == STOCK and key in REAL_GAINS:
                    yield over_pairs(f"{title}, gain", ratios, "ratio", REAL_GAINS[key])
    # Every ratio, losses and gains, in the documentation.
    rows = [[REAL_FLOOR[key][0], *cells] for key, cells in shown.items()]
    write_table("policies", "real-loaded", markdown((f"loaded, {served:.3g} requests/s", *heads), rows))


PARTS: dict[str, Part] = {"grid": grid, "early-exit": early_exit, "forecast": forecast, "real-loaded": real}
