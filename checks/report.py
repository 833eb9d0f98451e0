"""The tables of README, of the book and of `bench/results/`, written from the kept results; what of them is stale."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

from checks.figures import QUICK
from checks.run import DOCS, RESULTS, ROOT, provenance, say

LEVELS, THINKING = "levels", "thinking"
STALE = " (stale)"
RENEW = "`make figures ONLY=quick`"


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
        ((LEVELS, "grid: balanced over stock, range: output ITL p99", ""),),
        less_is_better=True,
    ),
    Summary(
        "requests within their service level, over stock, simulated",
        ((LEVELS, "grid: balanced over stock, range: goodput", ""),),
    ),
    Summary(
        "the same, over stock with its best flags",
        ((LEVELS, "grid: balanced over stock, best flags, range: goodput", ""),),
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
        ((LEVELS, "cells where a third to two thirds fit: balanced: completion, mean over stock", ""),),
        less_is_better=True,
    ),
    Summary(
        "prefix cache hit rate, above stock",
        (
            (LEVELS, "multi-turn: hit rate above stock", "chats whose thinking is stripped"),
            (LEVELS, "thinking preserved: hit rate above stock", "chats that keep it"),
        ),
        unit=" points",
    ),
    Summary(
        "share of think tokens saved, accuracy within a point",
        tuple(
            (THINKING, f"early exit: {rule}: think tokens saved", rule)
            for rule in ("EAT with a guard on the mean", "EAT as published", "RPDI", "patience", "DEER", "CoDE-Stop")
        ),
    ),
)
# Each generated table of the book: its markers, its page, and the part that writes it.
TABLES = (
    *(("table:" + name, "results", LEVELS, "policies") for name in ("medians", "floors", "capacity")),
    ("table:levels", "results", LEVELS, "days"),
    *(("table:" + name, "results", LEVELS, "agents-grid") for name in ("agents", "agents-default")),
    ("early-exit", "results", THINKING, "early-exit"),
    ("table:plan", "handoff", "operations", "plan"),
    ("table:matrix", "install", "setup", "matrix-0.32"),
)
# What the figures of `make gpu` are about.
GPU = ("kernels", "python/meridian", "host/core/src")
# The last line of such a table.
MEASURED = re.compile(r"^Measured (\S+) at (\S+) on (.*?)( \(stale\))?\.$", re.M)


class History:
    """The commits of a repository, and the files that each of them changed."""

    def __init__(self, root: Path) -> None:
        command = ("git", "-c", "core.quotePath=off", "log", "--format=%x00%H %P", "--name-only", "HEAD")
        done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
        self._parents: dict[str, list[str]] = {}
        self._files: dict[str, list[str]] = {}
        for entry in done.stdout.split("\0")[1:]:
            head, *files = entry.splitlines()
            commit, *parents = head.split()
            self._parents[commit], self._files[commit] = parents, [file for file in files if file]
        self._by_name = {commit[:12]: commit for commit in self._parents}
        self._since: dict[str, list[str] | None] = {}

    def since(self, commit: str) -> list[str] | None:
        """The commits that HEAD has and this one has not; None if it is none of HEAD's own."""
        name = commit.removesuffix("+changes")[:12]
        if name not in self._since:
            self._since[name] = self._later(self._by_name.get(name))
        return self._since[name]

    def _later(self, commit: str | None) -> list[str] | None:
        if commit is None:
            return None
        before, waiting = {commit}, deque([commit])
        while waiting:
            more = [each for each in self._parents.get(waiting.popleft(), ()) if each not in before]
            before.update(more)
            waiting.extend(more)
        return [each for each in self._parents if each not in before]

    def is_stale(self, commit: str, subject: Sequence[str]) -> bool:
        """Whether a file of the subject has changed since."""
        later = self.since(commit)
        return later is None or any(
            is_of(file, subject) for each in later if not keeps_figures(self._files[each]) for file in self._files[each]
        )


def keeps_figures(files: Sequence[str]) -> bool:
    """Whether a commit only keeps figures, with the tables that are written from them."""
    of_results = [file.startswith("bench/results/") for file in files]
    return any(of_results) and all(
        is_one or file.endswith(".md") for is_one, file in zip(of_results, files, strict=True)
    )


def is_of(file: str, subject: Sequence[str]) -> bool:
    """Whether a path is one of the subject's."""
    return any(file == of or file.startswith(f"{of.rstrip('/')}/") or fnmatch(file, of) for of in subject)


@cache
def history() -> History:
    """Of this repository."""
    return History(ROOT)


@cache
def subjects() -> dict[tuple[str, str], tuple[str, ...]]:
    """What each part is about, by area and part."""
    # The areas write tables by this module.
    from checks.areas import AREAS, parts_of

    return {(area, name): part.subject for area in AREAS for name, part in parts_of(area).items()}


def is_stale(line: dict[str, Any]) -> bool:
    """Whether a kept line is older than its subject, or is of no part that there is."""
    subject = GPU if line["area"] == "gpu" else subjects().get((line["area"], line["part"]))
    return subject is None or history().is_stale(line["commit"], subject)


def latest_lines(area: str) -> dict[str, dict[str, Any]]:
    """The kept line of each figure of an area, by its name."""
    kept = RESULTS / f"{area}.jsonl"
    lines = map(json.loads, kept.read_text().splitlines() if kept.exists() else ())
    return {line["name"]: line for line in lines}


def keep(area: str, line: dict[str, Any]) -> None:
    """Keep a line in the place of the one that was measured before."""
    write_lines(area, latest_lines(area) | {line["name"]: line})


def forget(area: str, part: str, measured: set[str]) -> None:
    """Remove the figures that a part does not have any more."""
    lines = latest_lines(area)
    write_lines(area, {name: x for name, x in lines.items() if x["part"] != part or name in measured})


def write_lines(area: str, lines: dict[str, dict[str, Any]]) -> None:
    """Write the kept lines of an area."""
    (RESULTS / f"{area}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines.values()))


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table."""
    first, *others = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return [first, "|---" * len(head) + "|", *others]


def between(page: Path, name: str) -> tuple[str, str, str]:
    """A page before, between and behind the markers of that name, which belong to the outer parts."""
    before, start, inner = page.read_text().partition(f"<!-- {name} -->")
    inner, end, after = inner.partition(f"<!-- /{name} -->")
    if not (start and end):
        sys.exit(f"error: {page}: no <!-- {name} --> markers")
    return before + start, inner, end + after


def write_between(page: Path, name: str, rows: Sequence[str]) -> None:
    """Replace what stands between the markers of that name in a page."""
    before, _, after = between(page, name)
    page.write_text(before + "\n" + "\n".join(rows) + "\n" + after)


def write_table(page: str, name: str, rows: Sequence[str]) -> None:
    """A table that a part makes itself, in a page of the book, and when it was measured."""
    at = provenance()
    when = f"Measured {at['measured']} at {at['commit']} on {at['machine']}."
    write_between(DOCS / f"{page}.md", f"table:{name}", ["", *rows, "", when, ""])


def mark_tables() -> None:
    """Say of each table of the book whether it is stale."""
    for name, page, area, part in TABLES:
        file, subject = DOCS / f"{page}.md", subjects()[area, part]
        before, inner, after = between(file, name)

        def marked(found: re.Match[str], subject: tuple[str, ...] = subject) -> str:
            day, commit, machine = found.groups()[:3]
            stale = STALE if history().is_stale(commit, subject) else ""
            return f"Measured {day} at {commit} on {machine}{stale}."

        file.write_text(before + MEASURED.sub(marked, inner) + after)


def write_figures() -> None:
    """Each kept figure in bench/results/README.md; marks in the book; README's results."""
    about = "A figure is stale when files that it is about have changed since its commit."
    page = ["# Figures", "", f"Written by `make figures` from the files beside it. {about}", ""]
    for area in sorted(kept.stem for kept in RESULTS.glob("*.jsonl")):
        lines = latest_lines(area).values()
        rows = []
        for line in lines:
            value = f"{line['value']:.3g}" if abs(line["value"]) < 1000 else f"{line['value']:,.0f}"
            value += f" ({line['low']:.3g}-{line['high']:.3g})" if "low" in line else ""
            holds = {True: "yes", False: "**no**", None: ""}[line["holds"]]
            form = f", {QUICK} form" if line.get("form") == QUICK else ""
            at = line["commit"] + (STALE if is_stale(line) else "") + form
            rows.append((line["name"].replace("|", "\\|"), value, line["unit"], line["bound"] or "", holds, at))
        machines = sorted({f"{line['measured']} on {line['machine']}" for line in lines})
        head = ("figure", "measured (quartiles)", "unit", "bound", "holds", "commit")
        page += [f"## {area}", "", *markdown(head, rows), "", *(f"- {each}" for each in machines), ""]
    (RESULTS / "README.md").write_text("\n".join(page))
    mark_tables()
    write_between(ROOT / "README.md", "figures:summary", summary())
    said = age()
    left_out = f"{said['left_out']} of {said['rows']} rows left out"
    say(f"README: {left_out}; {said['commits']} commits, the oldest {said['behind']} commits before HEAD")


def current() -> list[tuple[Summary, list[dict[str, Any]]]]:
    """README's rows with their kept lines, without those that are stale or were not measured."""
    found = []
    for row in SUMMARY:
        lines = [line for area, name, _ in row.cells if (line := latest_lines(area).get(name)) and not is_stale(line)]
        found += [(row, lines)] if len(lines) == len(row.cells) else []
    return found


def age() -> dict[str, int]:
    """Of README's rows: how many there are and are left out; the commits of the others, and since the oldest."""
    found = current()
    commits = {line["commit"] for _, lines in found for line in lines}
    behind = max((len(history().since(commit) or ()) for commit in commits), default=0)
    return {"rows": len(SUMMARY), "left_out": len(SUMMARY) - len(found), "commits": len(commits), "behind": behind}


def summary() -> list[str]:
    """README's results, best and worst beside each other."""
    rows, lines = [], []
    for row, measured in current():
        lines += measured
        found: list[tuple[float, str]] = []
        for line, (_, _, where) in zip(measured, row.cells, strict=True):
            found += [(line["value"], where)] if where else [(line[end], "") for end in ("low", "value", "high")]
        found.sort(reverse=not row.less_is_better)
        texts = [f"{value:+.0f}{row.unit}" if row.unit else f"{value:.2g}" for value, _ in found]
        texts = [text + (f" ({where})" if where else "") for text, (_, where) in zip(texts, found, strict=True)]
        rows.append((row.what, texts[0], "" if found[0][1] else texts[len(texts) // 2], texts[-1]))
    if not rows:
        return [f"No kept figure is newer than the code that it is about; {RENEW} measures them again."]
    missing = len(SUMMARY) - len(rows)
    at = {(x["machine"], x["measured"], x["commit"], x["form"]) for x in lines}
    when = [
        f"{day} at {commit} on {machine}" + (f" in the {QUICK} form" if form == QUICK else "")
        for machine, day, commit, form in sorted(at)
    ]
    caption = f"Measured {'; '.join(when)}."
    if missing:
        are = "row is older than its" if missing == 1 else "rows are older than their"
        caption += f" {missing} {are} code and left out; {RENEW} measures them."
    return ["| | best | median | worst |", *markdown(("", "best", "median", "worst"), rows)[1:], "", caption]
