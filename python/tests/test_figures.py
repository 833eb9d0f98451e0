"""Figures as data: rows that are read from a measured object, bounds, the areas of `make figures`, what is stale."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checks import report
from checks.__main__ import is_chosen, jobs
from checks.areas import AREAS, parts_of
from checks.figures import Figure, Row, printed, table

MEASURED = {"what": "swaps", "sent": 20, "taken": {"late": 3}, "pairs": [1.0, 2.0, 4.0]}
QUICK_S = 25 * 60
Commit = Callable[[str], str]


def test_a_row_is_read_from_what_was_measured() -> None:
    rows = (
        Row("{what}: late", "taken.late", "of {sent}", ">= {sent}"),
        Row("in time", lambda m: m["sent"] - m["taken"]["late"]),
        Row("ratio", "pairs", "ratio", "< 2"),
    )
    late, in_time, ratio = table(lambda pairs: [MEASURED] if pairs == 5 else [], *rows)(5)
    assert late == Figure("swaps: late", 3, "of 20", ">= 20")
    assert (late.holds(), in_time.holds(), ratio.holds()) == (False, None, False)
    assert (in_time.value, ratio.value, ratio.low, ratio.high) == (17, 2.0, 1.5, 3.0)


def test_a_line_says_how_to_repeat_it() -> None:
    figure = Figure("time", 0.123456, "us", "<= 1e6", 0.00123456, 1.0)
    line = figure.record("path", "guest")
    assert (line["value"], line["low"], line["bound"], line["holds"]) == (0.1235, 0.001235, "<= 1e+06", True)
    assert (line["form"], line["command"]) == ("long", "make figures ONLY=path PART=guest")
    line = figure.record("path", "guest", "quick")
    assert (line["form"], line["command"]) == ("quick", "make figures ONLY=quick PART=path-guest")


def test_a_program_that_prints_figures_is_held_against_bounds() -> None:
    lines = [{"name": "time, longest", "value": 2.0, "unit": "s"}, {"name": "own", "value": 1, "unit": "", "bound": 3}]
    longest, own = printed(lambda: lines, "admin, ", {"longest": "<= 1"})(1)
    assert longest == Figure("admin, time, longest", 2.0, "s", "<= 1")
    assert (longest.holds(), own.bound, own.holds()) == (False, "<= 3", True)


def test_there_are_ten_areas() -> None:
    assert len(set(AREAS)) == 10
    assert {area for area in AREAS if not parts_of(area)} == {"placement"}


@pytest.mark.parametrize("area", [area for area in AREAS if area != "placement"])
def test_every_area_has_a_quick_form_and_says_what_it_is_about(area: str) -> None:
    parts = parts_of(area)
    assert any(part.quick for part in parts.values())
    assert all((part.quick is None) == (part.quick_s == 0) for part in parts.values())
    root = report.ROOT
    for name, part in parts.items():
        absent = [of for of in part.subject if not (root / of).exists() and not list(root.glob(of))]
        assert part.subject, name
        assert not absent, name


def test_the_quick_form_takes_25_minutes() -> None:
    assert sum(part.quick_s for area in AREAS for part in parts_of(area).values()) <= QUICK_S


def test_parts_are_chosen_by_name_or_beginning() -> None:
    chosen = [job.name for job in jobs("setup") if is_chosen(job.name, "matrix")]
    assert chosen == ["matrix-0.30", "matrix-0.31", "matrix-0.32", "matrix-0.33"]
    chosen = [job.name for job in jobs("quick") if is_chosen(job.name, "book")]
    assert chosen == [f"book-{part}" for part in parts_of("book")]


def test_every_kept_line_is_of_a_part_that_there_is() -> None:
    assert {path.stem for path in report.RESULTS.glob("*.jsonl")} <= {*AREAS, "gpu"}
    for area in AREAS:
        lines, path = report.latest_lines(area), report.RESULTS / f"{area}.jsonl"
        assert [name for name, line in lines.items() if line["part"] not in parts_of(area)] == []
        # One line a figure.
        assert len(path.read_text().splitlines() if path.exists() else []) == len(lines), area


@pytest.fixture
def commit(tmp_path: Path) -> Commit:
    """Commits a change of a file in a repository of its own; returns its name."""

    def git(*args: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        done = subprocess.run(("git", *identity, *args), cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def change(path: str) -> str:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text((file.read_text() if file.exists() else "") + "changed\n")
        git("add", "-A")
        git("commit", "-q", "-m", path)
        return git("rev-parse", "--short=12", "HEAD")

    git("init", "-q")
    return change


def test_a_line_is_stale_once_its_subject_has_changed(tmp_path: Path, commit: Commit) -> None:
    first = commit("host/core/src/plan.rs")
    second = commit("docs/page.md")
    third = commit("host/core/src/plan.rs")
    history = report.History(tmp_path)
    assert [len(history.since(each) or ()) for each in (first, second, third)] == [2, 1, 0]
    for subject in ("host/core/src", "host/core/src/plan.rs", "host/core/*.rs"):
        assert [history.is_stale(each, [subject]) for each in (first, second, third)] == [True, True, False]
    assert history.is_stale(first, ["docs"])
    assert not history.is_stale(second, ["docs", "host/cor", "page.md"])
    assert not history.is_stale(f"{third}+changes", ["host"])
    # Of another repository, or of a history that was rewritten.
    assert history.since("0123456789ab") is None
    assert history.is_stale("0123456789ab", ["docs"])


@pytest.fixture
def kept(tmp_path: Path, commit: Commit, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """A repository with README, a page, and a kept line for every figure of README's rows, by name."""
    old = commit("src/old.rs")
    new = commit("src/new.rs")
    results = tmp_path / "results"
    results.mkdir()
    at = {"commit": new, "machine": "2 cores", "measured": "2026-01-02", "form": "quick", "part": "days"}
    same = {"value": 1.0, "unit": "ratio", "bound": None, "holds": None, "low": 0.5, "high": 2.0}
    names = [(area, name) for row in report.SUMMARY for area, name, _ in row.cells]
    lines = {name: {"area": area, "name": name, **same, **at} for area, name in names}
    lines["days: attainment over stock"]["commit"] = old
    for area in {area for area, _ in names}:
        report_lines = [line for line in lines.values() if line["area"] == area]
        (results / f"{area}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in report_lines))
    (tmp_path / "README.md").write_text("<!-- figures:summary -->\n<!-- /figures:summary -->\n")
    (tmp_path / "page.md").write_text(
        f"<!-- table:days -->\nMeasured 2026-01-02 at {old} on 2 cores.\n<!-- /table:days -->\n"
        f"<!-- table:new -->\nMeasured 2026-01-02 at {new} on 2 cores (stale).\n<!-- /table:new -->\n"
    )
    monkeypatch.setattr(report, "RESULTS", results)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "DOCS", tmp_path)
    monkeypatch.setattr(
        report, "TABLES", tuple((f"table:{name}", "page", "levels", "days") for name in ("days", "new"))
    )
    history = report.History(tmp_path)
    monkeypatch.setattr(report, "history", lambda: history)
    areas = {line["area"] for line in lines.values()}
    monkeypatch.setattr(report, "subjects", lambda: {(area, "days"): ("src/new.rs",) for area in areas})
    return lines


@pytest.mark.usefixtures("kept")
def test_readme_has_no_stale_row(tmp_path: Path) -> None:
    report.write_figures()
    readme = (tmp_path / "README.md").read_text()
    assert "through a day with a burst" not in readme
    assert readme.count("\n| ") == len(report.SUMMARY) - 1 + 1
    assert "1 row is older than its code and left out" in readme
    assert "in the quick form" in readme
    assert report.age() == {"rows": len(report.SUMMARY), "left_out": 1, "commits": 1, "behind": 0}
    page = (tmp_path / "results" / "README.md").read_text()
    assert page.count("(stale)") == 1
    assert "| days: attainment over stock | 1 (0.5-2) |" in page
    marked = [line for line in (tmp_path / "page.md").read_text().splitlines() if line.startswith("Measured")]
    assert [line.endswith(" (stale).") for line in marked] == [True, False]


def test_readme_names_the_command_when_all_rows_are_stale(
    tmp_path: Path, kept: dict[str, dict[str, Any]], commit: Commit, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit("src/new.rs")
    history = report.History(tmp_path)
    monkeypatch.setattr(report, "history", lambda: history)
    (line,) = report.summary()
    assert "`make figures ONLY=quick`" in line
    assert report.age()["left_out"] == len(report.SUMMARY)


def test_a_line_takes_the_place_of_the_one_before(kept: dict[str, dict[str, Any]]) -> None:
    line = next(line for line in kept.values() if line["area"] == "levels")
    count = len(report.latest_lines("levels"))
    report.keep("levels", line | {"value": 7.0})
    assert report.latest_lines("levels")[line["name"]]["value"] == 7.0
    report.forget("levels", "another part", set())
    assert len(report.latest_lines("levels")) == count
    report.forget("levels", "days", {line["name"]})
    assert list(report.latest_lines("levels")) == [line["name"]]
