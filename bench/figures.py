#!/usr/bin/env python3
"""Measures the figures the project promises and prints each as one JSON line.

    figures.py --only slice
    figures.py --only slice --part deciding
    figures.py --table            # only write README's table from the kept results

A line has area, name, value, unit, bound, holds and the command that repeats it; figures over several runs also carry
their quartiles (low, high). Lines are appended, with commit and machine, to bench/results/AREA.jsonl, and README's
table is written from there. Nothing here is a test: a figure that does not hold is printed as such, and the exit code
is 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from areas import bench, budget, core, engine, kernels, kv, repair, runtime, slice
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
}
# Pages with a table between `<!-- figures:AREA -->` and `<!-- /figures:AREA -->`.
PAGES = tuple(
    ROOT / page for page in ("README.md", "docs/src/benchmarks.md", "docs/src/simulator.md", "docs/src/kernels.md")
)


def shown(line: dict[str, Any]) -> str:
    """A value as the table shows it."""
    text = f"{line['value']:.3g}" if abs(line["value"]) < 1000 else f"{line['value']:,.0f}"
    if "low" in line:
        text += f" ({line['low']:.3g}-{line['high']:.3g})"
    return text


def write_table(area: str) -> None:
    """The area's table between its markers: the latest line of each figure worth its row."""
    kept = RESULTS / f"{area}.jsonl"
    latest: dict[str, dict[str, Any]] = {}
    for text in kept.read_text().splitlines() if kept.exists() else ():
        line = json.loads(text)
        latest[line["name"]] = line
    bounded_only = area in ("slice", "repair")
    wanted = [x for x in latest.values() if x["bound"] is not None or "TTFT" in x["name"] or not bounded_only]
    rows = ["| figure | measured (quartiles) | unit | bound | holds |", "|---|---|---|---|---|"]
    for line in wanted:
        holds = {True: "yes", False: "**no**", None: ""}[line["holds"]]
        rows.append(f"| {line['name']} | {shown(line)} | {line['unit']} | {line['bound'] or ''} | {holds} |")
    sources = sorted({(x["measured"], x["commit"], x["machine"]) for x in wanted})
    rows += ["", *(f"Measured {day} at {commit} on {machine}." for day, commit, machine in sources)]
    for page in PAGES:
        before, start, inner = page.read_text().partition(f"<!-- figures:{area} -->")
        _, end, after = inner.partition(f"<!-- /figures:{area} -->")
        if start and end:
            page.write_text(before + start + "\n" + "\n".join(rows) + "\n" + end + after)
            return
    sys.exit(f"error: no page has <!-- figures:{area} --> markers")


def main() -> int:
    """Command line."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--only", choices=tuple(AREAS), default="slice", help="area")
    p.add_argument("--part", action="append", help="only this part of the area; may be given again")
    p.add_argument("--pairs", type=int, default=PAIRS, help=f"pairs of runs a scenario, at least 2 (default {PAIRS})")
    p.add_argument("--table", action="store_true", help="only write the area's table")
    a = p.parse_args()
    if a.pairs < 2:
        p.error(f"--pairs: {a.pairs}: expected at least 2")
    parts = AREAS[a.only](a.pairs)
    for name in a.part or ():
        if name not in parts:
            p.error(f"--part: {name}: expected one of {', '.join(parts)}")
    if not a.table:
        source = provenance()
        RESULTS.mkdir(parents=True, exist_ok=True)
        for name, part in parts.items():
            if a.part and name not in a.part:
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
