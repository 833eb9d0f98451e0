"""Figures: what was measured, what it is held against, and tables of rows that read figures from a measured object."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, NamedTuple

COMPARISONS = {"<=": operator.le, "<": operator.lt, ">=": operator.ge}
# Measures figures, for so many pairs of runs, or seeds.
Measure = Callable[[int], Iterator["Figure"]]
# The form of a measurement: the whole of it, or a smaller size with the same names.
LONG, QUICK = "long", "quick"


@dataclass(frozen=True)
class Part:
    """A part of an area.

    `subject` names the files that its figures are about: paths of the repository, folders, or patterns of paths. A kept
    figure is stale once one of them has changed. `quick` measures the same figures, or some of them, in a smaller size;
    `quick_s` is the time that it is expected to take on two cores.
    """

    measure: Measure
    subject: tuple[str, ...]
    quick: Measure | None = None
    quick_s: int = 0


def rounded(value: float) -> float:
    """Four decimals, or four digits of what is smaller."""
    return round(value, 4) if abs(value) >= 1e-2 else float(f"{value:.4g}")


@dataclass(frozen=True)
class Figure:
    """One measured figure. `bound`, such as "<= 0.35", is what it is held against; without one a reader judges."""

    name: str
    value: float
    unit: str = ""
    bound: str | None = None
    low: float | None = None
    high: float | None = None

    def holds(self) -> bool | None:
        """Whether the value is within its bound."""
        if self.bound is None:
            return None
        comparison, limit = self.bound.split()
        return bool(COMPARISONS[comparison](self.value, float(limit)))

    def record(self, area: str, part: str, form: str = LONG) -> dict[str, Any]:
        """The line of a figure."""
        bound = None
        if self.bound is not None:
            comparison, limit = self.bound.split()
            bound = f"{comparison} {float(limit):g}"
        chosen = f"ONLY={area} PART={part}" if form == LONG else f"ONLY={QUICK} PART={area}-{part}"
        line: dict[str, Any] = {
            "area": area,
            "part": part,
            "form": form,
            "name": self.name,
            "value": rounded(self.value),
            "unit": self.unit,
            "bound": bound,
            "holds": self.holds(),
            "command": f"make figures {chosen}",
        }
        if self.low is not None and self.high is not None:
            line |= {"low": rounded(self.low), "high": rounded(self.high)}
        return line


def over_pairs(name: str, values: Sequence[float], unit: str, bound: str | None = None) -> Figure:
    """Median and quartiles of one figure over several pairs of runs."""
    low, _, high = quantiles(values, n=4, method="inclusive")
    return Figure(name, median(values), unit, bound, low, high)


def ranged(name: str, values: Sequence[float], unit: str, bound: str | None = None) -> Figure:
    """Median, lowest and highest of one figure over several cells."""
    return Figure(name, median(values), unit, bound, min(values), max(values))


class Row(NamedTuple):
    """A figure as data: its name, where in the measured object its value is, its unit, its bound.

    Name, unit and bound may have fields of the object in braces. The value is a path such as "itl.stock.p99_ms", or a
    function of the object; a list of values is one of several pairs.
    """

    name: str
    value: str | Callable[[Any], Any]
    unit: str = ""
    bound: str | None = None

    def figure(self, measured: Mapping[str, Any]) -> Figure:
        """Read it."""
        found: Any = measured
        if isinstance(self.value, str):
            for key in self.value.split("."):
                found = found[key]
        else:
            found = self.value(measured)
        name, unit = self.name.format_map(measured), self.unit.format_map(measured)
        bound = None if self.bound is None else self.bound.format_map(measured)
        if isinstance(found, list):
            return over_pairs(name, found, unit, bound)
        return Figure(name, found, unit, bound)


def read(measured: Mapping[str, Any], rows: Iterable[Row]) -> Iterator[Figure]:
    """The figures of one measured object."""
    return (row.figure(measured) for row in rows)


def table(measure: Callable[[int], Iterable[Mapping[str, Any]]], *rows: Row) -> Measure:
    """Measures objects, and reads the same rows from each."""

    def part(pairs: int) -> Iterator[Figure]:
        for measured in measure(pairs):
            yield from read(measured, rows)

    return part


def printed(
    measure: Callable[[], Iterable[Mapping[str, Any]]], prefix: str = "", bounds: Mapping[str, str] | None = None
) -> Measure:
    """Figures that a program prints, one JSON line each with name, value and unit. `bounds` are by the end of a name,
    where the program itself prints none."""

    def part(_: int) -> Iterator[Figure]:
        for line in measure():
            bound = next((bound for end, bound in (bounds or {}).items() if line["name"].endswith(end)), None)
            if line.get("bound") is not None:
                bound = f"<= {line['bound']}"
            yield Figure(prefix + line["name"], line["value"], line["unit"], bound)

    return part
