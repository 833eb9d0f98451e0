"""README's picture: a day with a burst under stock vLLM, with its best flags, and under the default with a promise."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape

from checks.figures import Figure
from checks.run import DOCS, WORK, meridian

# A day of its own: not one of the grid's cells.
ENGINE, WORKLOAD, BURST_MINUTES = "8b-h200", "reasoning-chat", 15
# The names of the grid, and their words and colours in the picture.
LINES = (
    ("stock", "vLLM as it starts", "#1a1a1a"),
    ("stock, best flags", "vLLM with its best flags", "#D55E00"),
    ("balanced", "Meridian with [service_levels]", "#0072B2"),
)
LEGEND_HEIGHT = 60
FONT = 'font-family="sans-serif" font-size="22"'


def picture(_: int) -> Iterator[Figure]:
    """Draw it into the book, and say what it shows."""
    page = WORK / "picture.html"
    loads = ("--loads", "0.95", "--bursts", str(BURST_MINUTES), "--promise", "--policy", "balanced")
    found = meridian("bench", "grid", "--engine", ENGINE, "--workload", WORKLOAD, *loads, "--html", page)
    (day,) = (cell for cell in found["cells"] if cell.get("burst_s"))
    for name, words, _colour in LINES:
        attained = day["contenders"][name]["metrics"]["slo_attainment"]
        yield Figure(f"the day of the picture: requests in time, {words}", attained, "share")
    plot = re.search(r'<svg [^>]*aria-labelledby="attained.*?</svg>', page.read_text(), re.S)
    assert plot is not None, "the page of the grid has no plot of attainment"
    assert all(colour in plot[0] for _, _, colour in LINES[1:]), "the plot has other colours than its legend"
    (DOCS / "day.svg").write_text(with_legend(plot[0]))


def with_legend(plot: str) -> str:
    """A plot of 1000 by 600 on white, with a line of names above it."""
    rows = "".join(
        f'<text x="{30 + at * 330}" y="40" {FONT} fill="{colour}">{escape(words)}</text>\n'
        for at, (_, words, colour) in enumerate(LINES)
    )
    inner = plot.replace("<svg ", f'<svg y="{LEGEND_HEIGHT}" width="1000" height="600" color="{LINES[0][2]}" ', 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 {600 + LEGEND_HEIGHT}">\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n{rows}{inner}\n</svg>\n'
    )
