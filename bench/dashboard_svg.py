"""Draws the panels of the Grafana dashboard as one SVG, for a look without Grafana."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from html import escape
from typing import Any

COLUMNS = 3
WIDTH, HEIGHT, GAP = 420, 226, 12
HEADING = 34
# The plot inside a panel; the legend is below it.
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 34, 78
LEGEND_ROWS, LEGEND_COLUMNS = 3, 2
COLOURS = ("#1f77b4", "#d95f02", "#2ca02c", "#c7358a", "#7b5fb0", "#8c564b", "#11889a", "#666666")


@dataclass
class Panel:
    """A panel of the dashboard with what its queries returned; series as legend and points of seconds and value."""

    title: str
    section: str
    kind: str
    unit: str
    queries: list[tuple[str, str]]
    series: list[tuple[str, list[tuple[float, float]]]] = field(default_factory=list)

    def take(self, legend: str, found: list[Any]) -> None:
        """Add the answer to one of the queries, without values that are no numbers."""
        for one in found:
            points = [(float(t), float(v)) for t, v in one["values"]]
            points = [(t, v) for t, v in points if math.isfinite(v)]
            if points:
                self.series.append((named(legend, one["metric"]), points))


def panels_of(board: dict[str, Any]) -> list[Panel]:
    """The panels of the dashboard's file in their order."""
    found, section = [], ""
    for panel in board["panels"]:
        if panel["type"] == "row":
            section = panel["title"]
            continue
        queries = [(x["expr"], x.get("legendFormat", "")) for x in panel.get("targets", [])]
        unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "short")
        found.append(Panel(panel["title"], section, panel["type"], unit, queries))
    return found


def named(legend: str, labels: dict[str, str]) -> str:
    """The name of a series, as Grafana makes it of a panel's legend; without a legend its labels, but for long ones."""
    if not legend:
        hidden = ("__name__", "instance", "job", "sha256")
        return ", ".join(f"{label} {value}" for label, value in labels.items() if label not in hidden)
    text = re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), legend).strip()
    return text or "(none)"


def amount(value: float, unit: str) -> str:
    """A value with its unit, in four characters or so."""
    if value == 0:
        return "0"
    if unit == "s":
        for scale, name in ((1.0, "s"), (1e-3, "ms")):
            if abs(value) >= scale:
                return f"{value / scale:.3g} {name}"
        return f"{value / 1e-6:.3g} us"
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    text = f"{value:,.0f}" if abs(value) >= 1e3 else f"{value:.3g}"
    return f"{text}/s" if unit in ("ops", "reqps", "cps") else text


def drawing(panels: list[Panel]) -> str:
    """All panels under the headings of their sections."""
    parts: list[str] = []
    y, at, section = 0.0, 0, ""
    for panel in panels:
        if panel.section != section:
            y += (HEIGHT + GAP) * bool(at)
            section, at = panel.section, 0
            parts.append(f'<text x="{GAP}" y="{y + 24}" font-size="16" font-weight="bold">{escape(section)}</text>')
            y += HEADING
        elif at == COLUMNS:
            y, at = y + HEIGHT + GAP, 0
        parts.append(f'<g transform="translate({GAP + at * (WIDTH + GAP)},{y})">{"".join(_panel(panel))}</g>')
        at += 1
    size = f'width="{GAP + COLUMNS * (WIDTH + GAP)}" height="{y + HEIGHT + GAP:.0f}"'
    style = 'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" fill="#222"'
    ground = '<rect width="100%" height="100%" fill="#f4f5f7"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {style} {size}>{ground}{"".join(parts)}</svg>\n'


def _panel(panel: Panel) -> list[str]:
    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" rx="3" fill="#fff" stroke="#d0d4da"/>']
    parts.append(f'<text x="10" y="20" font-size="13" font-weight="bold">{escape(panel.title)}</text>')
    if not panel.series:
        return [*parts, f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}" font-size="13" text-anchor="middle">no data</text>']
    if panel.kind == "table":
        return parts + [
            f'<text x="10" y="{46 + 18 * i}" font-size="12">{escape(name)}</text>'
            for i, (name, _) in enumerate(panel.series)
        ]
    # The legend has room for the highest.
    panel.series.sort(key=lambda one: -max(v for _, v in one[1]))
    values = [v for _, points in panel.series for _, v in points]
    low, high = min(0.0, *values), max(0.0, *values)
    high = high if high > low else 1.0
    begin = min(t for _, points in panel.series for t, _ in points)
    seconds = max(max(t for _, points in panel.series for t, _ in points) - begin, 1.0)
    plot_width, plot_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(t: float, v: float) -> tuple[float, float]:
        return LEFT + plot_width * (t - begin) / seconds, TOP + plot_height * (1 - (v - low) / (high - low))

    for value in (low, (low + high) / 2, high):
        y = place(begin, value)[1]
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e6ea"/>')
        label = escape(amount(value, panel.unit))
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" font-size="10" text-anchor="end">{label}</text>')
    for second, anchor in ((0.0, "start"), (seconds, "end")):
        x, y = place(begin + second, low)
        text = f'<text x="{x:.1f}" y="{y + 13:.1f}" font-size="10" text-anchor="{anchor}">{second:.0f} s</text>'
        parts.append(text)
    for number, (_, points) in enumerate(panel.series):
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(t, v) for t, v in points))
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<polyline fill="none" stroke-width="1.5" stroke="{colour}" points="{line}"/>')
    return parts + _legend(panel)


def _legend(panel: Panel) -> list[str]:
    """The series with their last values, in rows; the last place says how many have none."""
    parts = []
    most = LEGEND_ROWS * LEGEND_COLUMNS
    shown = panel.series if len(panel.series) <= most else panel.series[: most - 1]
    for number, (name, points) in enumerate(shown):
        x, y = _legend_place(number)
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<rect x="{x}" y="{y - 8}" width="9" height="9" fill="{colour}"/>')
        text = f"{name if len(name) <= 24 else name[:23] + '…'}  {amount(points[-1][1], panel.unit)}"
        parts.append(f'<text x="{x + 13}" y="{y}" font-size="10">{escape(text)}</text>')
    if len(shown) < len(panel.series):
        x, y = _legend_place(most - 1)
        parts.append(f'<text x="{x}" y="{y}" font-size="10">and {len(panel.series) - len(shown)} more</text>')
    return parts


def _legend_place(number: int) -> tuple[float, float]:
    row, column = divmod(number, LEGEND_COLUMNS)
    return 12 + column * (WIDTH - 20) / LEGEND_COLUMNS, HEIGHT - 42 + 16 * row
