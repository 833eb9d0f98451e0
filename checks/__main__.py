"""Measures the figures the project promises and prints each as one JSON line.

    python -m checks --only quick                # the quick form of every area: 25 minutes on two cores
    python -m checks --only quick --part levels  # of one area
    python -m checks --only path --part guest    # a part, in its long form
    python -m checks --list                      # every area and its parts, with the seconds of the quick form
    python -m checks --table                     # write the tables from the kept results

A line has area, part, form, name, value, unit, bound, holds and the command that repeats it; figures over several runs
also carry their quartiles (low, high). The latest line of each figure is kept, with commit and machine, in
bench/results/AREA.jsonl, and the tables of README, of the book and of bench/results/README.md are written from there.
Nothing here is a test: a figure that does not hold is printed as such. The exit code is 1 if a part could not measure.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from typing import NamedTuple

from checks.areas import AREAS, parts_of
from checks.figures import LONG, QUICK, Measure
from checks.report import forget, keep, write_figures
from checks.run import TRACES, WORK, provenance, say

PAIRS, QUICK_PAIRS = 5, 2


class Job(NamedTuple):
    """A part in one of its forms, by the name that `--part` knows."""

    name: str
    area: str
    part: str
    measure: Measure
    expected_s: int


def jobs(only: str) -> list[Job]:
    """Those of an area, or of the quick form of all areas, whose names begin with their areas."""
    if only != QUICK:
        return [Job(name, only, name, part.measure, 0) for name, part in parts_of(only).items()]
    return [
        Job(f"{area}-{name}", area, name, part.quick, part.quick_s)
        for area in AREAS
        for name, part in parts_of(area).items()
        if part.quick is not None
    ]


def is_chosen(name: str, chosen: str) -> bool:
    """Whether a part was chosen: by its name, or with others by the beginning, as `matrix` chooses `matrix-0.30`."""
    return name == chosen or name.startswith(f"{chosen}-")


def show() -> None:
    """Areas and parts, with the seconds of the quick form."""
    for area in AREAS:
        parts = parts_of(area)
        print(f"{area}: {sum(part.quick_s for part in parts.values())} s" + ("" if parts else ", no parts"))
        for name, part in parts.items():
            print(f"  {name:20} {f'{part.quick_s:4} s' if part.quick else '     -'}")


def measure(job: Job, form: str, pairs: int, source: dict[str, str]) -> bool:
    """Print and keep the figures of a part; whether it came to its end."""
    names: set[str] = set()
    try:
        for figure in job.measure(pairs):
            line = figure.record(job.area, job.part, form)
            print(json.dumps(line), flush=True)
            keep(job.area, line | source)
            names.add(figure.name)
    except (Exception, SystemExit) as why:
        # The other parts can still be measured.
        is_trace = isinstance(why, FileNotFoundError) and str(TRACES) in str(why.filename)
        said = f"{why}; MERIDIAN_TRACES names the folder of traces" if is_trace else traceback.format_exc()
        say(str(why.code) if isinstance(why, SystemExit) else said)
        return False
    if form == LONG:
        forget(job.area, job.part, names)
    return True


def main() -> int:
    """Command line."""
    p = argparse.ArgumentParser(
        prog="python -m checks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    choices = (QUICK, *AREAS)
    p.add_argument(
        "--only", choices=choices, default=QUICK, metavar="AREA", help="area, or quick (default %(default)s)"
    )
    p.add_argument("--part", action="append", help="only this part, or those that begin with it; may be given again")
    p.add_argument("--pairs", type=int, help=f"pairs of runs a scenario, or seeds ({PAIRS}; quick: {QUICK_PAIRS})")
    p.add_argument("--table", action="store_true", help="only write the tables")
    p.add_argument("--list", action="store_true", help="list areas and parts")
    a = p.parse_args()
    if a.list:
        show()
        return 0
    found = jobs(a.only)
    for name in a.part or ():
        if not any(is_chosen(job.name, name) for job in found):
            known = ", ".join(job.name for job in found)
            p.error(f"--part: {name}: expected one of {known}, or what several of them begin with")
    # One seed of a grid is a figure; one pair of runs has no quartiles.
    least = 1 if (a.only, a.part) == ("levels", ["days"]) else 2
    pairs = a.pairs if a.pairs is not None else QUICK_PAIRS if a.only == QUICK else PAIRS
    if pairs < least:
        p.error(f"--pairs: {pairs}: expected at least {least}")
    took: list[tuple[Job, float, bool]] = []
    if not a.table:
        form, source = (QUICK if a.only == QUICK else LONG), provenance()
        WORK.mkdir(parents=True, exist_ok=True)
        for job in found:
            if a.part and not any(is_chosen(job.name, chosen) for chosen in a.part):
                continue
            say(job.name)
            begun = time.monotonic()
            has_ended = measure(job, form, pairs, source)
            took.append((job, time.monotonic() - begun, has_ended))
        for job, seconds, has_ended in took:
            expected = f", expected {job.expected_s}" if job.expected_s else ""
            say(f"{job.name:32} {seconds:7.1f} s{expected}{'' if has_ended else ', not measured'}")
        say(f"{'all':32} {sum(seconds for _, seconds, _ in took):7.1f} s")
    write_figures()
    return 0 if all(has_ended for *_, has_ended in took) else 1


if __name__ == "__main__":
    sys.exit(main())
