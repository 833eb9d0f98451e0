#!/usr/bin/env python3
"""Measures the figures the project promises and prints each as one JSON line.

    figures.py --only slice
    figures.py --only slice --part deciding
    figures.py --table            # only write the tables from the kept results

A line has area, name, value, unit, bound, holds and the command that repeats it; figures over several runs also carry
their quartiles (low, high). Lines are appended, with commit and machine, to bench/results/AREA.jsonl, and the tables
of README and book are written from there. Nothing here is a test: a figure that does not hold is printed as such, and
the exit code is 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from areas import (
    agents,
    authoring,
    bench,
    budget,
    core,
    engine,
    fabric,
    fleet,
    kernels,
    kv,
    observability,
    outputs,
    policy,
    repair,
    runtime,
    slice,
    start,
)
from areas.common import RESULTS, ROOT, provenance, say

PAIRS = 5
AREAS = {
    "slice": slice.parts,
    "core": core.parts,
    "runtime": runtime.parts,
    "kv": kv.parts,
    "budget": budget.parts,
    "bench": bench.parts,
    "kernels": kernels.parts,
    "repair": repair.parts,
    "engine": engine.parts,
    "policy": policy.parts,
    "start": start.parts,
    "authoring": authoring.parts,
    "agents": agents.parts,
    "observability": observability.parts,
    "fleet": fleet.parts,
    "fabric": fabric.parts,
    "outputs": outputs.parts,
}
POLICY, KV, EXIT = "policy", "kv", "budget"


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
        ((POLICY, "grid: p99 output ITL over stock, load 0.95 and more", ""),),
        less_is_better=True,
    ),
    Summary(
        "requests within their service levels, over stock, simulated",
        ((POLICY, "grid: goodput over stock, load 0.95 and more", ""),),
    ),
    Summary(
        "the same, over stock with the best flags for each load",
        ((POLICY, "grid: goodput over tuned, load 0.95 and more", ""),),
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
# Pages with a table between `<!-- figures:AREA -->` and `<!-- /figures:AREA -->`.
PAGES = tuple(
    ROOT / "docs" / "src" / page
    for page in ("benchmarks.md", "simulator.md", "kernels.md", "experiments.md", "fabric.md", "outputs.md")
)


def shown(line: dict[str, Any]) -> str:
    """A value as the table shows it."""
    text = f"{line['value']:.3g}" if abs(line["value"]) < 1000 else f"{line['value']:,.0f}"
    if "low" in line:
        text += f" ({line['low']:.3g}-{line['high']:.3g})"
    return text


def latest_lines(area: str) -> dict[str, dict[str, Any]]:
    """The latest kept line of each figure of an area, by its name."""
    kept = RESULTS / f"{area}.jsonl"
    lines = map(json.loads, kept.read_text().splitlines() if kept.exists() else ())
    return {line["name"]: line for line in lines}


def between(page: Path, name: str, rows: list[str]) -> bool:
    """Write rows between the markers of that name in a page; False where it has none."""
    before, start, inner = page.read_text().partition(f"<!-- {name} -->")
    _, end, after = inner.partition(f"<!-- /{name} -->")
    if not (start and end):
        return False
    page.write_text(before + start + "\n" + "\n".join(rows) + "\n" + end + after)
    return True


def write_summary() -> None:
    """README's results, best and worst beside each other."""
    lines = {area: latest_lines(area) for area in (POLICY, KV, EXIT)}
    rows = ["| | best | median | worst |", "|---|---|---|---|"]
    commits: dict[tuple[str, str], set[str]] = {}
    for row in SUMMARY:
        found: list[tuple[float, str]] = []
        for area, name, where in row.cells:
            line = lines[area].get(name)
            if line is None:
                sys.exit(f"error: bench/results/{area}.jsonl has no figure {name!r}")
            commits.setdefault((line["measured"], line["machine"]), set()).add(line["commit"].removesuffix("+changes"))
            found += [(line["value"], where)] if where else [(line[end], "") for end in ("low", "value", "high")]
        found.sort(reverse=not row.less_is_better)
        texts = [f"{value:+.0f}{row.unit}" if row.unit else f"{value:.2g}" for value, _ in found]
        texts = [text + (f" ({where})" if where else "") for text, (_, where) in zip(texts, found, strict=True)]
        middle = "" if found[0][1] else texts[len(texts) // 2]
        rows.append(f"| {row.what} | {texts[0]} | {middle} | {texts[-1]} |")
    rows.append("")
    for (day, machine), at in sorted(commits.items()):
        rows.append(f"Measured {day} on {machine}, at {', '.join(sorted(at))}.")
    if not between(ROOT / "README.md", "figures:summary", rows):
        sys.exit("error: README.md has no <!-- figures:summary --> markers")


def write_table(area: str) -> None:
    """The area's table between its markers: the latest line of each figure worth its row."""
    latest = latest_lines(area)
    bounded_only = area in ("slice", "repair")
    wanted = [x for x in latest.values() if x["bound"] is not None or "TTFT" in x["name"] or not bounded_only]
    rows = ["| figure | measured (quartiles) | unit | bound | holds |", "|---|---|---|---|---|"]
    for line in wanted:
        holds = {True: "yes", False: "**no**", None: ""}[line["holds"]]
        rows.append(f"| {line['name']} | {shown(line)} | {line['unit']} | {line['bound'] or ''} | {holds} |")
    sources = sorted({(x["measured"], x["commit"], x["machine"]) for x in wanted})
    rows += ["", *(f"Measured {day} at {commit} on {machine}." for day, commit, machine in sources)]
    if not any(between(page, f"figures:{area}", rows) for page in PAGES):
        sys.exit(f"error: no page has <!-- figures:{area} --> markers")
    write_summary()


def is_of(part: str, chosen: str) -> bool:
    """Whether a part was chosen: by its name, or with others by the beginning, as `matrix` chooses `matrix-0.30`."""
    return part == chosen or part.startswith(f"{chosen}-")


def main() -> int:
    """Command line."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--only", choices=tuple(AREAS), default="slice", help="area")
    p.add_argument(
        "--part",
        action="append",
        help="only this part of the area, or the parts that begin with it; may be given again",
    )
    p.add_argument("--pairs", type=int, default=PAIRS, help=f"pairs of runs a scenario, or seeds (default {PAIRS})")
    p.add_argument("--table", action="store_true", help="only write the area's table")
    a = p.parse_args()
    least = 1 if a.only == "policy" else 2
    if a.pairs < least:
        p.error(f"--pairs: {a.pairs}: expected at least {least}")
    parts = AREAS[a.only](a.pairs)
    for name in a.part or ():
        if not any(is_of(part, name) for part in parts):
            p.error(f"--part: {name}: expected one of {', '.join(parts)}, or what several of them begin with")
    if not a.table:
        source = provenance()
        RESULTS.mkdir(parents=True, exist_ok=True)
        for name, part in parts.items():
            if a.part and not any(is_of(name, chosen) for chosen in a.part):
                continue
            say(name)
            for figure in part():
                line = figure.record(a.only, name)
                print(json.dumps(line), flush=True)
                with (RESULTS / f"{a.only}.jsonl").open("a") as kept:
                    kept.write(json.dumps(line | source) + "\n")
    write_table(a.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
