"""Summaries and tables of engine runs: pure functions over the rows that ``engine_run`` writes."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

Row = Mapping[str, Any]
Summary = Mapping[str, Any]

# (title, key of the summary, unit, True when a ratio to stock means something)
METRICS: Sequence[tuple[str, str, str, bool]] = (
    ("output ITL p50", "itl_output_p50_ms", "ms", True),
    ("output ITL p99", "itl_output_p99_ms", "ms", True),
    ("think ITL p50", "itl_think_p50_ms", "ms", True),
    ("think ITL p99", "itl_think_p99_ms", "ms", True),
    ("TTOT p50", "ttot_p50_ms", "ms", True),
    ("TTOT p99", "ttot_p99_ms", "ms", True),
    ("TTFO p50", "ttfo_p50_ms", "ms", True),
    ("TTFO p99", "ttfo_p99_ms", "ms", True),
    ("TTFT p50", "ttft_p50_ms", "ms", True),
    ("TTFT p99", "ttft_p99_ms", "ms", True),
    ("end to end p50", "e2e_p50_ms", "ms", True),
    ("end to end p99", "e2e_p99_ms", "ms", True),
    ("throughput", "throughput_tok_s", "tok/s", True),
    ("makespan", "makespan_s", "s", True),
    ("steps", "steps", "", False),
    ("schedule() p50", "schedule_p50_us", "us", True),
    ("schedule() p99", "schedule_p99_us", "us", True),
    ("decisions", "decisions", "", False),
    ("  by the policy", "decided_by_policy", "", False),
    ("  by fallback", "decided_by_fallback", "", False),
    ("policy faults", "policy_faults", "", False),
    ("deciding, mean a step", "deciding_us", "us", False),
    ("Meridian in schedule() p50", "own_p50_us", "us", False),
    ("preempted in prefill", "preemptions_prefill", "", False),
    ("preempted in think", "preemptions_think", "", False),
    ("preempted in output", "preemptions_output", "", False),
    ("  while thinking held KV", "output_preempted_while_think_held", "", False),
)
# Of the scheduler's own statistics: without them a policy that faulted at every step would pass for one that ran.
DECISION_FACTS = (
    "decisions",
    "decided_by_policy",
    "decided_by_fallback",
    "policy_faults",
    "deciding_us",
    "own_p50_us",
)
LEGEND = (
    "ITL: gap between two tokens of a phase. TTOT: end of thinking to first output token. TTFO: arrival to first\n"
    "output token. TTFT: arrival to first token of any kind. In brackets: ratio to stock."
)
RUNNING_BUCKETS = (1, 8, 16, 32, 48, 64, 128, 256)


class Counters(Protocol):
    """What the summary needs of the probe on the scheduler; one entry a step in each sequence."""

    schedule_ns: list[int]
    running: list[int]
    step_s: list[float]
    preemptions: dict[str, int]
    output_preempted_while_think_held: int
    recomputed_tokens: int


def percentile(values: Iterable[float], q: float) -> float | None:
    """The ``q``-th percentile (0-100), linear between the two nearest values; None of nothing."""
    # With the extra `bench`; what this module describes can be printed without.
    import numpy as np

    known = np.fromiter(values, dtype=np.float64)
    return float(np.percentile(known, q)) if known.size else None


def by_running(running: Sequence[int], values: Sequence[float]) -> dict[str, dict[str, float]]:
    """p50, mean and count of per-step values, in buckets of how many requests were running."""
    out: dict[str, dict[str, float]] = {}
    low = 0
    for high in (*RUNNING_BUCKETS, math.inf):
        bucket = [v for n, v in zip(running, values, strict=True) if low < n <= high]
        if bucket:
            name = f"{low + 1}+" if high == math.inf else f"{low + 1}-{high}" if high > low + 1 else f"{high}"
            out[name] = {
                "steps": len(bucket),
                "p50": round(percentile(bucket, 50) or 0.0, 3),
                "mean": round(sum(bucket) / len(bucket), 3),
            }
        low = int(high) if high != math.inf else low
    return out


def hit_rate(rows: Sequence[Row]) -> float:
    """Percent of the prompt tokens that were found in the prefix cache when their request was first admitted."""
    prompt_tokens = sum(r["prompt_tokens"] for r in rows)
    return 100 * sum(r["cached_tokens"] or 0 for r in rows) / prompt_tokens if prompt_tokens else 0.0


def hit_rate_by_turn(rows: Sequence[Row]) -> list[float]:
    """The same of each turn of the sessions, in order; empty for requests of a trace."""
    turns = sorted({r["turn"] for r in rows if r["turn"] is not None})
    return [hit_rate([r for r in rows if r["turn"] == turn]) for turn in turns]


def summarise(rows: Sequence[Row], counters: Counters, makespan_s: float) -> dict[str, Any]:
    """One run's figures: latencies in ms, ``schedule_*`` in us, throughput in delivered tokens a second."""
    series = {k: [r[f"{k}_ms"] for r in rows if r[f"{k}_ms"] is not None] for k in ("ttft", "ttfo", "ttot", "e2e")}
    for phase in ("think", "output"):
        series[f"itl_{phase}"] = [gap for r in rows for gap in r[f"itl_{phase}_ms"]]
    tokens = sum(r["delivered_tokens"] for r in rows)
    schedule_us = [ns / 1e3 for ns in counters.schedule_ns]
    out: dict[str, Any] = {f"{k}_p{q}_ms": percentile(v, q) for k, v in series.items() for q in (50, 99)}
    out |= {
        "requests": len(rows),
        "think_forced_ok": sum(bool(r["think_forced_ok"]) for r in rows),
        "delivered_tokens": tokens,
        "makespan_s": makespan_s,
        "throughput_tok_s": tokens / makespan_s,
        "steps": len(counters.schedule_ns),
        "schedule_p50_us": percentile(schedule_us, 50),
        "schedule_p99_us": percentile(schedule_us, 99),
        "schedule_us_by_running": by_running(counters.running, schedule_us),
        "step_ms_by_running": by_running(counters.running, [1e3 * s for s in counters.step_s]),
        "preemptions": sum(counters.preemptions.values()),
        "output_preempted_while_think_held": counters.output_preempted_while_think_held,
        "recomputed_tokens": counters.recomputed_tokens,
        "prompt_tokens": sum(r["prompt_tokens"] for r in rows),
        "cached_tokens": sum(r["cached_tokens"] or 0 for r in rows),
        "hit_rate": hit_rate(rows),
        "hit_rate_by_turn": hit_rate_by_turn(rows),
    }
    return out | {f"preemptions_{phase}": n for phase, n in counters.preemptions.items()}


def cell(value: float | None) -> str:
    """A figure as the tables show it."""
    if value is None:
        return "-"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}"


def table(runs: Sequence[tuple[str, Summary]]) -> str:
    """Side by side: a column a scheduler, a row a metric; behind each value its ratio to the first column's."""
    base = runs[0][1]
    lines = [["", "", *(name for name, _ in runs)]]
    for title, key, unit, has_ratio in METRICS:
        if key in DECISION_FACTS and not any(key in summary for _, summary in runs):
            continue
        cells = []
        for i, (_, summary) in enumerate(runs):
            value, reference = summary.get(key), base.get(key)
            ratio = f" ({value / reference:.2f}x)" if i and has_ratio and value is not None and reference else ""
            cells.append(cell(value) + ratio)
        lines.append([title, unit, *cells])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    out = []
    for line in lines:
        left = f"{line[0]:<{widths[0]}}  {line[1]:<{widths[1]}}"
        out.append("  ".join([left, *(f"{c:>{w}}" for c, w in zip(line[2:], widths[2:], strict=True))]).rstrip())
    out.insert(1, "-" * max(len(line) for line in out))
    return "\n".join(out)


def decision_facts(stats: Mapping[str, Any]) -> dict[str, float]:
    """The scheduler's own statistics (``meridian_stats()``) as summary values. Steps of the warm-up are among them."""
    decisions = stats["decisions"]
    return {
        "decisions": decisions,
        "decided_by_policy": stats["decided_by_policy"],
        "decided_by_fallback": stats["decided_by_fallback"],
        "policy_faults": sum(stats["faults"].values()),
        "deciding_us": 1e3 * stats["deciding_ms"] / decisions if decisions else 0.0,
        "own_p50_us": (percentile(stats["own_ns"], 50) or 0.0) / 1e3,
    }


def write_rows_csv(path: Path, runs: Sequence[tuple[str, Sequence[Row]]]) -> None:
    """One line a request and scheduler. The lists of gaps become their count, p50, p99 and maximum."""
    with path.open("w", newline="", encoding="utf-8") as f:
        writer = None
        for scheduler, rows in runs:
            for row in rows:
                flat: dict[str, Any] = {"scheduler": scheduler}
                for key, value in row.items():
                    if isinstance(value, list):
                        stem = key.removesuffix("_ms")
                        flat[f"{stem}_count"] = len(value)
                        for q, name in ((50, "p50"), (99, "p99"), (100, "max")):
                            flat[f"{stem}_{name}_ms"] = percentile(value, q)
                    else:
                        flat[key] = value
                if writer is None:
                    writer = csv.DictWriter(f, list(flat))
                    writer.writeheader()
                writer.writerow({k: round(v, 3) if isinstance(v, float) else v for k, v in flat.items()})
