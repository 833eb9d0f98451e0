"""Percentiles, summaries and tables of engine runs, and the phases that a request's tokens imply."""

import csv
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from meridian.bench.engine_run import meridian_toml
from meridian.bench.probe import OUTPUT, PREFILL, THINK, Observed
from meridian.bench.report import by_running, percentile, summarise, table, write_rows_csv
from meridian.bench.workload import TraceRequest

END = 99


def finished_request(think: int = 2, output: int = 2) -> Observed:
    """A request due at 10 s whose tokens come every 0.1 s from 11 s on; thinking ends with one marker."""
    observed = Observed(0, TraceRequest(0.0, 5, think, output), arrival=10.0, end_ids=(END,))
    for i, token in enumerate([1] * think + [END] + [2] * output):
        observed.deliver([token], 11.0 + 0.1 * i)
    observed.finished = observed.times[-1]
    return observed


@dataclass
class FakeCounters:
    schedule_ns: list[int] = field(default_factory=lambda: [1000, 3000])
    running: list[int] = field(default_factory=lambda: [1, 12])
    step_s: list[float] = field(default_factory=lambda: [0.002, 0.010])
    preemptions: dict[str, int] = field(default_factory=lambda: {"prefill": 0, "think": 3, "output": 1})
    output_preempted_while_think_held: int = 1
    recomputed_tokens: int = 300


def test_percentile() -> None:
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile([1, 2, 3], 100) == 3
    assert percentile([1, 2, 3], 0) == 1
    assert percentile(range(101), 99) == 99
    assert percentile([7], 99) == 7
    assert percentile([], 50) is None


def test_phases_follow_the_delivered_tokens() -> None:
    observed = Observed(0, TraceRequest(0.0, 5, 1, 1), arrival=0.0, end_ids=(8, END))
    assert observed.phase == PREFILL
    observed.deliver([END, 8], 1.0)
    assert observed.phase == THINK, "the parts of a marker in the wrong order do not end thinking"
    observed.deliver([END], 2.0)
    assert observed.phase == OUTPUT


def test_row_attributes_each_gap_to_the_phase_of_the_later_token() -> None:
    row = finished_request().row()
    assert row["ttft_ms"] == pytest.approx(1000)
    assert row["think_end_ms"] == pytest.approx(1200)
    assert row["ttfo_ms"] == pytest.approx(1300)
    assert row["ttot_ms"] == pytest.approx(100)
    assert row["e2e_ms"] == pytest.approx(1400)
    assert (len(row["itl_think_ms"]), len(row["itl_output_ms"])) == (2, 2)
    assert row["think_forced_ok"]


def test_a_late_end_of_thinking_is_not_ok() -> None:
    observed = finished_request(think=3)
    observed.planned = TraceRequest(0.0, 5, 2, 2)
    assert not observed.row()["think_forced_ok"]


def test_summary() -> None:
    s = summarise([finished_request().row()], FakeCounters(), makespan_s=2.0)
    assert s["ttfo_p50_ms"] == pytest.approx(1300)
    assert s["throughput_tok_s"] == 2.5
    assert s["schedule_p50_us"] == 2.0
    assert (s["preemptions"], s["preemptions_output"], s["output_preempted_while_think_held"]) == (4, 1, 1)
    assert s["step_ms_by_running"]["1"]["p50"] == 2.0


def test_buckets_cover_every_step_once() -> None:
    buckets = by_running([0, 1, 8, 9, 64, 65, 1000], [1.0] * 7)
    assert {k: v["steps"] for k, v in buckets.items()} == {
        "1": 1,
        "2-8": 1,
        "9-16": 1,
        "49-64": 1,
        "65-128": 1,
        "257+": 1,
    }


def test_table_has_units_and_ratios_to_the_first_column() -> None:
    stock = {"itl_output_p99_ms": 80.0, "throughput_tok_s": 2000.0, "preemptions_output": 4, "ttft_p50_ms": None}
    other = {"itl_output_p99_ms": 20.0, "throughput_tok_s": 1900.0, "preemptions_output": 0, "ttft_p50_ms": 5.0}
    text = table([("stock", stock), ("native", other)])
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert lines["output ITL p99"].split() == ["output", "ITL", "p99", "ms", "80.0", "20.0", "(0.25x)"]
    assert "1,900 (0.95x)" in lines["throughput"]
    assert "x)" not in lines["preempted in output"]
    assert lines["TTFT p50"].split()[-2:] == ["-", "5.0"]
    assert "decided by the policy" not in lines
    assert "by the policy" in table([("stock", stock), ("wasm", other | {"decided_by_policy": 9})])


def test_rows_csv_is_one_line_a_request(tmp_path: Path) -> None:
    row = finished_request().row()
    write_rows_csv(tmp_path / "rows.csv", [("stock", [row]), ("native", [row, row])])
    read = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert [r["scheduler"] for r in read] == ["stock", "native", "native"]
    assert float(read[0]["itl_output_p99_ms"]) == pytest.approx(100)
    assert read[0]["itl_think_count"] == "2"


def test_meridian_toml_selects_the_policy_and_keeps_types() -> None:
    text = meridian_toml(
        "native:output-first",
        (("scheduler.output_tpot_budget_ms", "16"), ("policy.watch", "false"), ("model.family", "qwen3")),
    )
    assert '[policy.dispatch]\nsource = "native:output-first"\n' in text
    assert "[scheduler]\noutput_tpot_budget_ms = 16\n" in text
    assert "[policy]\nwatch = false\n" in text
    assert '[model]\nfamily = "qwen3"\n' in text
