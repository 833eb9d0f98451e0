"""Figures as data: rows that are read from a measured object, bounds, and the areas that `make figures` knows."""

from __future__ import annotations

import pytest

from checks.__main__ import AREAS, is_of, parts_of
from checks.figures import Figure, Row, printed, table

MEASURED = {"what": "swaps", "sent": 20, "taken": {"late": 3}, "pairs": [1.0, 2.0, 4.0]}


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
    line = Figure("time", 0.123456, "us", "<= 1e6", 0.00123456, 1.0).record("kv", "pool")
    assert (line["value"], line["low"], line["bound"], line["holds"]) == (0.1235, 0.001235, "<= 1e+06", True)
    assert line["command"] == "make figures ONLY=kv PART=pool"


def test_a_program_that_prints_figures_is_held_against_bounds() -> None:
    lines = [{"name": "time, longest", "value": 2.0, "unit": "s"}, {"name": "own", "value": 1, "unit": "", "bound": 3}]
    longest, own = printed(lambda: lines, "admin, ", {"longest": "<= 1"})(1)
    assert longest == Figure("admin, time, longest", 2.0, "s", "<= 1")
    assert (longest.holds(), own.bound, own.holds()) == (False, "<= 3", True)


@pytest.mark.parametrize("area", AREAS)
def test_every_area_has_parts(area: str) -> None:
    assert parts_of(area)


def test_parts_are_chosen_by_name_or_beginning() -> None:
    chosen = [part for part in parts_of("setup") if is_of(part, "matrix")]
    assert chosen == ["matrix-0.30", "matrix-0.31", "matrix-0.32", "matrix-0.33"]
