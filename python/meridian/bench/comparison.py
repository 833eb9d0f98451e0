"""Pairs of runs, stock vLLM's scheduler beside Meridian's, as medians, quartiles and what changes within a pair.

Pure functions over the summaries that ``engine_run`` writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any, Literal

from meridian.bench.report import Summary, cell

Change = Literal["ratio", "difference", ""]

# (title, key of the summary, unit, how the two runs of a pair are compared)
METRICS: Sequence[tuple[str, str, str, Change]] = (
    ("prefix hit rate", "hit_rate", "%", "difference"),
    ("TTFT p50", "ttft_p50_ms", "ms", "ratio"),
    ("TTFT p99", "ttft_p99_ms", "ms", "ratio"),
    ("TTFO p50", "ttfo_p50_ms", "ms", "ratio"),
    ("TTFO p99", "ttfo_p99_ms", "ms", "ratio"),
    ("TTOT p99", "ttot_p99_ms", "ms", "ratio"),
    ("output ITL p50", "itl_output_p50_ms", "ms", "ratio"),
    ("output ITL p99", "itl_output_p99_ms", "ms", "ratio"),
    ("think ITL p99", "itl_think_p99_ms", "ms", "ratio"),
    ("end to end p50", "e2e_p50_ms", "ms", "ratio"),
    ("throughput", "throughput_tok_s", "tok/s", "ratio"),
    ("makespan", "makespan_s", "s", "ratio"),
    ("schedule() p50", "schedule_p50_us", "us", "ratio"),
    ("preemptions", "preemptions", "", "ratio"),
    ("  in prefill", "preemptions_prefill", "", ""),
    ("  in think", "preemptions_think", "", ""),
    ("  in output", "preemptions_output", "", ""),
    ("  in output, thinking held KV", "output_preempted_while_think_held", "", ""),
    ("recomputed tokens", "recomputed_tokens", "", "ratio"),
)
LEGEND = (
    "Median (quartiles) over the pairs; the last column compares the two runs of each pair: a ratio to stock (x) or a\n"
    "difference (+, -). Prefix hit rate: share of the prompt tokens found in the prefix cache at a request's first\n"
    "admission. Recomputed: tokens that a preemption threw away and a resumption did not find in the cache."
)


@dataclass(frozen=True)
class Pair:
    """The summaries of two runs over the same requests, and how many requests' outputs differ, if it was asked."""

    seed: int
    stock: Summary
    meridian: Summary
    differing: int | None = None


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of one figure over several runs."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread | None:
    """None of nothing; a single value is its own quartiles."""
    if not values:
        return None
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, _, high = quantiles(values, n=4, method="inclusive")
    return Spread(median(values), low, high)


def changes(pairs: Sequence[Pair], key: str, change: Change) -> list[float]:
    """Of each pair that has the figure on both sides: Meridian's over stock's, or Meridian's less stock's."""
    out = []
    for pair in pairs:
        stock, meridian = pair.stock.get(key), pair.meridian.get(key)
        if stock is None or meridian is None or (change == "ratio" and not stock):
            continue
        out.append(meridian / stock if change == "ratio" else meridian - stock)
    return out


@dataclass(frozen=True)
class Line:
    """One metric over all pairs."""

    title: str
    key: str
    unit: str
    change: Change
    stock: Spread | None
    meridian: Spread | None
    changed: Spread | None


def _line(pairs: Sequence[Pair], title: str, key: str, unit: str, change: Change) -> Line:
    sides = ([p.stock.get(key) for p in pairs], [p.meridian.get(key) for p in pairs])
    stock, meridian = (spread([v for v in side if v is not None]) for side in sides)
    return Line(title, key, unit, change, stock, meridian, spread(changes(pairs, key, change)) if change else None)


def _by_turn(pairs: Sequence[Pair]) -> list[Pair]:
    """The hit rates of each turn as figures of their own."""

    def flat(summary: Summary) -> dict[str, Any]:
        return {f"hit_rate_turn_{i + 1}": rate for i, rate in enumerate(summary.get("hit_rate_by_turn", ()))}

    return [Pair(p.seed, flat(p.stock), flat(p.meridian)) for p in pairs]


def lines(pairs: Sequence[Pair]) -> list[Line]:
    """Every metric, the hit rate of each turn behind that of all."""
    first, *rest = (_line(pairs, *metric) for metric in METRICS)
    turns = _by_turn(pairs)
    by_turn = [
        _line(turns, f"  turn {i + 1}", key, "%", "difference") for i, key in enumerate(turns[0].stock if turns else ())
    ]
    return [first, *by_turn, *rest]


def _shown(s: Spread | None, several: bool) -> str:
    if s is None:
        return "-"
    return f"{cell(s.median)} ({cell(s.low)}-{cell(s.high)})" if several else cell(s.median)


def _change_shown(line: Line, several: bool) -> str:
    if line.changed is None:
        return "-" if line.change else ""
    s = line.changed
    if line.change == "ratio":
        quartiles = f" ({s.low:.2f}-{s.high:.2f})" if several else ""
        return f"{s.median:.2f}x{quartiles}"
    return f"{s.median:+.1f}" + (f" ({s.low:+.1f} to {s.high:+.1f})" if several else "")


def table(pairs: Sequence[Pair]) -> str:
    """Stock, Meridian and the change within a pair; a row a metric."""
    several = len(pairs) > 1
    rows = [["", "", "stock", "Meridian", "change"]]
    rows += [
        [x.title, x.unit, _shown(x.stock, several), _shown(x.meridian, several), _change_shown(x, several)]
        for x in lines(pairs)
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    out = []
    for row in rows:
        left = f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}"
        out.append("  ".join([left, *(f"{c:>{w}}" for c, w in zip(row[2:], widths[2:], strict=True))]).rstrip())
    out.insert(1, "-" * max(len(line) for line in out))
    return "\n".join(out)


def document(pairs: Sequence[Pair]) -> dict[str, Any]:
    """The same as JSON, with the summaries of every run."""
    metrics = {}
    for x in lines(pairs):
        metrics[x.key] = {"unit": x.unit, "stock": x.stock, "meridian": x.meridian} | (
            {x.change: x.changed} if x.change else {}
        )
    shown = {
        key: {k: asdict(v) if isinstance(v, Spread) else v for k, v in metric.items()}
        for key, metric in metrics.items()
    }
    return {"metrics": shown, "pairs": [asdict(p) for p in pairs]}
