"""Service levels that hold through a burst: `balanced` with a promise beside every opponent of the measurement."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from checks.areas.measure import DEFAULT, SINGLE, STOCK, TRACE_FILES, left_out, meridian_grid, ratio
from checks.figures import Figure, Part, ranged
from checks.run import say

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
    """The cells of the measurement with the measured level promised to every request."""
    traces = (flag for trace in TRACE_FILES[:2] for flag in ("--trace", trace))
    found, took = meridian_grid("levels", *traces, "--promise", policies=PROMISED)
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


PARTS: dict[str, Part] = {"grid": grid}
