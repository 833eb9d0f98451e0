"""Service levels that hold through a burst: `balanced` with a promise beside every opponent of the measurement."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

from checks.areas.measure import DEFAULT, ENGINES, SINGLE, STOCK, TRACE_FILES, left_out, meridian_grid, ratio
from checks.figures import Figure, Part, over_pairs, ranged
from checks.run import TRACES, meridian, say

# The budget policy that ends thinking as the queue grows, with entropies like recorded ones.
BUDGETS = f"dispatch={DEFAULT},budget=deadline-aware"
PROMISED = (DEFAULT, BUDGETS)
# What a promise must bring through a day with a burst, over stock vLLM and over its best single flags.
DAYS = (
    ("slo_attainment", "attainment", DEFAULT, 1.8, 1.5),
    ("goodput_rps", "goodput", DEFAULT, 2.0, 1.6),
    ("slo_attainment", "attainment with budgets", BUDGETS, 2.5, 2.0),
    ("goodput_rps", "goodput with budgets", BUDGETS, 2.5, 2.0),
)


def grid(_: int) -> Iterator[Figure]:
    """The cells of the measurement with the measured level promised to every request, who is late last."""
    yield from promised("levels", "--promise", "")


def refuse(_: int) -> Iterator[Figure]:
    """The same, but who is late is refused."""
    yield from promised("levels-refuse", "--promise=refuse", "refusing: ")


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


def promised(name: str, flag: str, prefix: str) -> Iterator[Figure]:
    """Figures of a grid with a promise, each with this prefix."""
    for figure in of_grid(name, flag):
        yield figure if figure.name.startswith(name) else replace(figure, name=prefix + figure.name)


def of_grid(name: str, flag: str) -> Iterator[Figure]:
    """Figures of a grid with a promise."""
    traces = (flag for trace in TRACE_FILES[:2] for flag in ("--trace", trace))
    found, took = meridian_grid(name, *traces, flag, policies=PROMISED)
    yield from took
    why = {(row["engine"], row["traffic"]): left_out(row) for row in found["rows"]}
    for (engine, traffic), text in why.items():
        if text:
            say(f"  {engine}, {traffic}: {text}")
    counted = [cell for cell in found["cells"] if cell["converged"] and not why[cell["engine"], cell["traffic"]]]
    days, steady = ([cell for cell in counted if bool(cell.get("burst_s")) is is_day] for is_day in (True, False))
    say_days(days, tuple(days[0]["contenders"]))
    yield Figure("days", len(days), "cells")
    yield Figure("steady loads", len(steady), "cells")
    names = {label: next(name for name in days[0]["contenders"] if same(name, label)) for label in PROMISED}
    for key, title, policy, over_stock, over_flags in DAYS:
        for against, least in ((STOCK, over_stock), (SINGLE, over_flags)):
            values = [ratio(cell, names[policy], against, key) for cell in days]
            yield ranged(f"days: {title} over {against}", values, "ratio", f">= {least}")
            if policy == DEFAULT and key == "slo_attainment":
                yield Figure(f"days: {title} over {against}, least", min(values), "ratio", ">= 1.0")
    for key, title, bound in (
        ("recovery_s", "time until the level is met again", "<= 0.5"),
        ("ttfo_p50_ms", "TTFO p50", None),
        ("ttfo_p99_ms", "TTFO p99", None),
        ("throughput_tok_s", "throughput", ">= 1.0"),
    ):
        # A day through which the level is not met again has no time of it.
        both = [c for c in days if all(key in c["contenders"][name]["metrics"] for name in (DEFAULT, STOCK))]
        yield ranged(f"days: {title} over stock", [ratio(c, DEFAULT, STOCK, key) for c in both], "ratio", bound)
    bounds = [cell["contenders"][DEFAULT]["metrics"]["slo_attainment"] / cell["most_in_time"] for cell in days]
    yield ranged("days: attainment of what any scheduler could have, at most", bounds, "ratio", ">= 0.85")
    verdicts = {v["against"]: v for v in found["verdicts"] if v["policy"] == DEFAULT}
    for against, most in ((STOCK, 0), (SINGLE, 5)):
        below = [line for line in verdicts[against]["broken"] if ", day" not in line["cell"]]
        yield Figure(f"steady loads: floors broken against {against}", len(below), "floors", f"<= {most}")
        for line in below:
            say(f"  {line['cell']}: {line['metric']} {line['ratio']:.2f} of {against}'s")
    again = max(ratio(cell, DEFAULT, STOCK, "recomputed_tokens") for cell in counted)
    yield Figure("tokens computed again, most over stock", again, "ratio", "<= 1.05")


def same(name: str, label: str) -> bool:
    """Whether a contender is the one that was asked for: it is shown without the word of its first slot."""
    return name == label or (label == BUDGETS and "deadline-aware" in name)


def say_days(days: list[dict[str, Any]], names: tuple[str, ...]) -> None:
    """Attainment of every contender through each day."""
    for cell in days:
        of = (f"{name} {cell['contenders'][name]['metrics'].get('slo_attainment', 0.0):.3f}" for name in names)
        say(f"  {cell['engine']}, {cell['traffic']}, {cell['load']}: {', '.join(of)}")


PARTS: dict[str, Part] = {"grid": grid, "refuse": refuse, "capacity": capacity, "cost": cost}
