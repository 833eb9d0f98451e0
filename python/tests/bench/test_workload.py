"""The generator is seeded and true to the figures it was fitted to; a bad trace names where it is bad."""

import re
import statistics
from itertools import pairwise
from pathlib import Path

import pytest
from meridian.bench.workload import (
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    SCENARIOS,
    THINK_TOKENS,
    TraceRequest,
    fit,
    generate,
    quantile,
    read_trace,
    scenario_requests,
)

HEADER = "arrival_s,prompt_tokens,think_tokens,output_tokens,tenant\n"


def test_same_seed_same_requests() -> None:
    assert generate(7, 50, 10.0) == generate(7, 50, 10.0)
    assert generate(7, 50, 10.0) != generate(8, 50, 10.0)


@pytest.mark.parametrize(
    ("field", "mean", "p95"),
    [("prompt_tokens", 937, 5034), ("think_tokens", 2480, 8008), ("output_tokens", 557, 2045)],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_unscaled_lengths_are_those_of_the_fitted_sample(field: str, mean: float, p95: float, seed: int) -> None:
    lengths = sorted(getattr(r, field) for r in generate(seed, 4000, 1.0))
    assert statistics.mean(lengths) == pytest.approx(mean, rel=0.02)
    assert lengths[int(0.95 * len(lengths))] == pytest.approx(p95, rel=0.03)


def test_a_short_run_carries_its_share_of_the_tail() -> None:
    totals = [sum(r.think_tokens for r in generate(seed, 120, 1.0)) for seed in range(8)]
    assert max(totals) < 1.1 * min(totals)


def test_arrivals_are_bursty_sorted_and_end_on_time() -> None:
    arrivals = [r.arrival_s for r in generate(3, 4000, 20.0)]
    gaps = [b - a for a, b in pairwise(arrivals)]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(200.0, rel=1e-3)
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(1.26, rel=0.1)


@pytest.mark.parametrize("knots", [PROMPT_TOKENS, THINK_TOKENS, OUTPUT_TOKENS])
def test_quantiles_pass_through_their_knots_and_never_fall(knots: list[tuple[float, float]]) -> None:
    for p, v in knots:
        assert quantile(knots, p) == pytest.approx(v)
    values = [quantile(knots, i / 1000) for i in range(1001)]
    assert values == sorted(values)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenarios_need_no_clipping(name: str) -> None:
    requests = scenario_requests(name, 1)
    assert len(requests) == SCENARIOS[name].requests
    assert fit(requests, SCENARIOS[name].max_model_len - 16)[1] == 0


def test_reads_csv_sorted_with_optional_tenant(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,think_tokens,output_tokens\n2,10,0,3\n0.5,20,7,1\n")
    assert read_trace(path) == [TraceRequest(0.5, 20, 7, 1), TraceRequest(2.0, 10, 0, 3)]


def test_reads_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"arrival_s":1,"prompt_tokens":5,"think_tokens":6,"output_tokens":7,"tenant":"x"}\n\n')
    assert read_trace(path) == [TraceRequest(1.0, 5, 6, 7, "x")]


@pytest.mark.parametrize(
    ("row", "column", "value"),
    [
        ("0,abc,1,1,", "prompt_tokens", "'abc'"),
        ("0,0,1,1,", "prompt_tokens", "'0'"),
        ("0,1.5,1,1,", "prompt_tokens", "'1.5'"),
        ("-1,1,1,1,", "arrival_s", "'-1'"),
        ("nan,1,1,1,", "arrival_s", "'nan'"),
        ("0,1,,1,", "think_tokens", "''"),
        ("0,1", "think_tokens", "None"),
        ("0,1,1,inf,", "output_tokens", "'inf'"),
    ],
)
def test_a_bad_row_names_file_line_column_and_value(tmp_path: Path, row: str, column: str, value: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(f"{HEADER}0,1,1,1,a\n{row}\n")
    with pytest.raises(ValueError, match=re.escape(f"{path}:3: column {column}: got {value}, expected ")):
        read_trace(path)


def test_a_bad_header_or_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("arrival_s,prompt,think_tokens,output_tokens\n")
    with pytest.raises(ValueError, match=r"bad.csv:1: column prompt_tokens: .*expected a header"):
        read_trace(path)
    path = tmp_path / "bad.jsonl"
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match=r"bad.jsonl:1: .*expected one JSON object a line"):
        read_trace(path)


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "none.csv"
    path.write_text(HEADER)
    with pytest.raises(ValueError, match="no requests"):
        read_trace(path)


def test_fit_scales_clips_and_counts() -> None:
    trace = [TraceRequest(10.0, 100, 200, 50), TraceRequest(14.0, 3000, 400, 80), TraceRequest(15.0, 10, 5000, 900)]
    fitted, clipped = fit(trace, 1000, scale_tokens=0.5, scale_time=0.25)
    assert fitted[0] == TraceRequest(0.0, 50, 100, 25)
    assert [r.arrival_s for r in fitted] == [0.0, 1.0, 1.25]
    assert clipped == 2
    assert (fitted[1].prompt_tokens, fitted[1].think_tokens, fitted[1].output_tokens) == (760, 200, 40)
    assert (fitted[2].prompt_tokens, fitted[2].think_tokens, fitted[2].output_tokens) == (5, 843, 152)


def test_fit_never_exceeds_the_limit() -> None:
    fitted, _ = fit(generate(1, 500, 1.0), 64)
    for r in fitted:
        assert min(r.prompt_tokens, r.output_tokens) >= 1
        assert r.prompt_tokens + r.think_tokens + r.output_tokens <= 64
