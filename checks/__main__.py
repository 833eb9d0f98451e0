"""Measures the figures the project promises and prints each as one JSON line.

    python -m checks --only component
    python -m checks --only component --part deciding
    python -m checks --list             # every area and its parts
    python -m checks --only kv --table  # write the tables from the kept results

A line has area, name, value, unit, bound, holds and the command that repeats it; figures over several runs also carry
their quartiles (low, high). Lines are appended, with commit and machine, to bench/results/AREA.jsonl, and the tables
of README, of the book and of bench/results/README.md are written from there. Nothing here is a test: a figure that does
not hold is printed as such, and the exit code is 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module

from checks.figures import Part
from checks.report import write_figures
from checks.run import RESULTS, WORK, provenance, say

PAIRS = 5
AREAS = (
    *("component", "core", "runtime", "kv", "budget", "outputs", "measure", "levels", "agents", "bench", "kernels"),
    *("hostile", "operations", "engine", "setup", "authoring", "observability", "fleet", "fabric", "seams", "house"),
    "book",
)


def parts_of(area: str) -> dict[str, Part]:
    """The parts of an area by name."""
    return import_module(f"checks.areas.{area}").PARTS


def is_of(part: str, chosen: str) -> bool:
    """Whether a part was chosen: by its name, or with others by the beginning, as `matrix` chooses `matrix-0.30`."""
    return part == chosen or part.startswith(f"{chosen}-")


def main() -> int:
    """Command line."""
    p = argparse.ArgumentParser(
        prog="python -m checks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--only", choices=AREAS, default=AREAS[0], metavar="AREA", help="area (default %(default)s)")
    p.add_argument(
        "--part",
        action="append",
        help="only this part of the area, or the parts that begin with it; may be given again",
    )
    p.add_argument("--pairs", type=int, default=PAIRS, help=f"pairs of runs a scenario, or seeds (default {PAIRS})")
    p.add_argument("--table", action="store_true", help="only write the tables")
    p.add_argument("--list", action="store_true", help="list areas and parts")
    a = p.parse_args()
    if a.list:
        for area in AREAS:
            print(f"{area}: {' '.join(parts_of(area))}")
        return 0
    # One seed of a grid is a figure; one pair of runs has no quartiles.
    least = 1 if (a.only, a.part) == ("levels", ["grid"]) else 2
    if a.pairs < least:
        p.error(f"--pairs: {a.pairs}: expected at least {least}")
    parts = parts_of(a.only)
    for name in a.part or ():
        if not any(is_of(part, name) for part in parts):
            p.error(f"--part: {name}: expected one of {', '.join(parts)}, or what several of them begin with")
    if not a.table:
        source = provenance()
        WORK.mkdir(parents=True, exist_ok=True)
        for name, part in parts.items():
            if a.part and not any(is_of(name, chosen) for chosen in a.part):
                continue
            say(name)
            for figure in part(a.pairs):
                line = figure.record(a.only, name)
                print(json.dumps(line), flush=True)
                with (RESULTS / f"{a.only}.jsonl").open("a") as kept:
                    kept.write(json.dumps(line | source) + "\n")
    write_figures()
    return 0


if __name__ == "__main__":
    sys.exit(main())
