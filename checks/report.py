"""The tables of README, of the book and of `bench/results/`, written from the kept results."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checks.run import DOCS, RESULTS, ROOT

MEASURE, LEVELS, KV, EXIT, AGENTS = "measure", "levels", "kv", "budget", "agents"


@dataclass(frozen=True)
class Summary:
    """A row of README's results: the best and the worst of several figures, each an area, its name and where; or of one
    figure over many cells, with its median."""

    what: str
    cells: tuple[tuple[str, str, str], ...]
    unit: str = ""
    less_is_better: bool = False


SUMMARY = (
    Summary(
        "p99 gap between output tokens, over stock, simulated",
        ((MEASURE, "grid: balanced over stock, range: output ITL p99", ""),),
        less_is_better=True,
    ),
    Summary(
        "requests within their service level, over stock, simulated",
        ((MEASURE, "grid: balanced over stock, range: goodput", ""),),
    ),
    Summary(
        "the same, over stock with its best flags",
        ((MEASURE, "grid: balanced over stock, best flags, range: goodput", ""),),
    ),
    Summary(
        "through a day with a burst, with `[service_levels]`: the same, over stock",
        ((LEVELS, "days: attainment over stock", ""),),
    ),
    Summary(
        "and over stock with its best flags",
        ((LEVELS, "days: attainment over stock, best flags", ""),),
    ),
    Summary(
        "agents, of whose sessions a third to two thirds fit: mean session over stock, simulated",
        ((AGENTS, "8 cells where a third to two thirds fit: balanced: completion, mean over stock", ""),),
        less_is_better=True,
    ),
    Summary(
        "prefix cache hit rate, above stock",
        (
            (KV, "multi-turn: hit rate above stock", "chats whose thinking is stripped"),
            (KV, "thinking preserved: hit rate above stock", "chats that keep it"),
        ),
        unit=" points",
    ),
    Summary(
        "share of think tokens saved, accuracy within a point",
        tuple(
            (EXIT, f"early exit: {rule}: think tokens saved", rule)
            for rule in ("EAT with a guard on the mean", "EAT as published", "RPDI", "patience", "DEER", "CoDE-Stop")
        ),
    ),
)


def latest_lines(area: str) -> dict[str, dict[str, Any]]:
    """The latest kept line of each figure of an area, by its name."""
    kept = RESULTS / f"{area}.jsonl"
    lines = map(json.loads, kept.read_text().splitlines() if kept.exists() else ())
    return {line["name"]: line for line in lines}


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table."""
    first, *others = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return [first, "|---" * len(head) + "|", *others]


def write_between(page: Path, name: str, rows: Sequence[str]) -> None:
    """Replace what stands between the markers of that name in a page."""
    before, start, inner = page.read_text().partition(f"<!-- {name} -->")
    _, end, after = inner.partition(f"<!-- /{name} -->")
    if not (start and end):
        sys.exit(f"error: {page.relative_to(ROOT)} has no <!-- {name} --> markers")
    page.write_text(before + start + "\n" + "\n".join(rows) + "\n" + end + after)


def write_table(page: str, name: str, rows: Sequence[str]) -> None:
    """A table that an area makes itself, in a page of the book."""
    write_between(DOCS / f"{page}.md", f"table:{name}", ["", *rows, ""])


def write_figures() -> None:
    """The latest line of each figure of each area, in bench/results/README.md; and README's results."""
    page = ["# Figures", "", "Written by `make figures` from the files beside it: the latest line of each figure.", ""]
    for area in sorted(kept.stem for kept in RESULTS.glob("*.jsonl")):
        lines = list(latest_lines(area).values())
        rows = []
        for line in lines:
            value = f"{line['value']:.3g}" if abs(line["value"]) < 1000 else f"{line['value']:,.0f}"
            value += f" ({line['low']:.3g}-{line['high']:.3g})" if "low" in line else ""
            holds = {True: "yes", False: "**no**", None: ""}[line["holds"]]
            rows.append((line["name"].replace("|", "\\|"), value, line["unit"], line["bound"] or "", holds))
        sources = sorted({(x["measured"], x["commit"], x["machine"]) for x in lines})
        page += [f"## {area}", "", *markdown(("figure", "measured (quartiles)", "unit", "bound", "holds"), rows), ""]
        page += [f"- {day} at {commit} on {machine}" for day, commit, machine in sources] + [""]
    (RESULTS / "README.md").write_text("\n".join(page))
    write_summary()


def write_summary() -> None:
    """README's results, best and worst beside each other."""
    lines = {area: latest_lines(area) for area in (MEASURE, LEVELS, KV, EXIT, AGENTS)}
    rows = []
    commits: dict[str, dict[str, set[str]]] = {}
    for row in SUMMARY:
        found: list[tuple[float, str]] = []
        for area, name, where in row.cells:
            line = lines[area].get(name)
            if line is None:
                sys.exit(f"error: bench/results/{area}.jsonl has no figure {name!r}")
            at = commits.setdefault(line["machine"], {}).setdefault(line["measured"], set())
            at.add(line["commit"].removesuffix("+changes"))
            found += [(line["value"], where)] if where else [(line[end], "") for end in ("low", "value", "high")]
        found.sort(reverse=not row.less_is_better)
        texts = [f"{value:+.0f}{row.unit}" if row.unit else f"{value:.2g}" for value, _ in found]
        texts = [text + (f" ({where})" if where else "") for text, (_, where) in zip(texts, found, strict=True)]
        rows.append((row.what, texts[0], "" if found[0][1] else texts[len(texts) // 2], texts[-1]))
    shown = ["| | best | median | worst |", *markdown(("", "best", "median", "worst"), rows)[1:], ""]
    measured: list[str] = []
    for machine, days in sorted(commits.items()):
        when = ", ".join(f"{day} at {', '.join(sorted(at))}" for day, at in sorted(days.items()))
        measured.append(f"on {machine}: {when}")
    shown.append(f"Measured {'; '.join(measured)}.")
    write_between(ROOT / "README.md", "figures:summary", shown)
