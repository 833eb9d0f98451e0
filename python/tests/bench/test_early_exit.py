"""Early exit: rules on hand-made thoughts, what is chosen, intervals, the curve of fixed budgets, what is written.

One file, because all of it is about the same hand-made thoughts.
"""

import argparse
import json
import math
import random
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import meridian.budget
import numpy as np
import pytest
from meridian.vllm.bench import early_exit, exit_report
from meridian.vllm.bench.arith import Problem
from meridian.vllm.bench.early_exit import answered, configurations, flags, parse, trajectories, tuned, write
from meridian.vllm.bench.early_exit_run import Solver, Solving, difference, splits, think_tokens
from meridian.vllm.bench.exit_rules import (
    FAMILIES,
    Choice,
    Eat,
    Patience,
    Point,
    Recorded,
    Rpdi,
    Trajectory,
    choose,
    evaluate,
    moving,
    no_limit,
    recorded,
    same_answers,
)
from meridian.vllm.bench.exit_stats import Sample, cheapest, compare, interval, saving
from meridian.vllm.bench.run import Run

TRUTH = 7


def thought(
    bits: Sequence[float],
    answers: Sequence[int | None],
    end: tuple[int, bool] = (100, True),
    rpdi: Sequence[float] = (),
) -> Trajectory:
    """Probes after 10, 20, ... think tokens, with the index of a boundary at the same places."""
    index = [*rpdi, *[None] * (len(bits) - len(rpdi))]
    points = (Point(10 * (i + 1), b, a, x) for i, (b, a, x) in enumerate(zip(bits, answers, index, strict=True)))
    return Trajectory(tuple(points), TRUTH, *end)


def of(*thoughts: Trajectory) -> Recorded:
    return recorded(thoughts)


# Ignorant and flat for three probes, then certain of the right answer.
LEARNS = thought([4, 4, 4, 1, 0, 0, 0], [1, 2, 3, 7, 7, 7, 7])


def test_moving_mean_and_variance_by_hand() -> None:
    mean, variance = moving(of(thought([4, 2, 0], [1, 1, 1])).probes, 0.5)
    # M: 4, (2 + 4) / 2 = 3, (0 + 3) / 2 = 1.5. V: 0, (2 - 3)^2 / 2 = 0.5, (0 - 1.5)^2 / 2 + 0.5 / 2 = 1.375.
    assert mean.tolist() == [[4, 3, 1.5]]
    assert variance.tolist() == [[0, 0.5, 1.375]]


@pytest.mark.parametrize("alpha", [0.05, 0.3, 0.9, 1.0])
def test_moving_is_what_the_engine_computes(alpha: float) -> None:
    rng = random.Random(3)
    series = [[rng.uniform(0, 5) for _ in range(rng.randint(1, 30))] for _ in range(20)]
    mean, variance = moving(of(*(thought(x, [1] * len(x)) for x in series)).probes, alpha)
    for i, values in enumerate(series):
        means, variances = meridian.budget.eat(values, alpha)
        np.testing.assert_allclose(mean[i, : len(values)], means, atol=1e-12)
        np.testing.assert_allclose(variance[i, : len(values)], variances, atol=1e-12)
        assert np.isnan(mean[i, len(values) :]).all()


def test_the_published_rule_takes_flat_ignorance_for_certainty_and_the_guard_does_not() -> None:
    r = of(LEARNS)
    published = evaluate(Eat(0.5, 0.1, 1), r)
    assert (published.tokens.tolist(), published.right.tolist(), published.fired) == ([20], [False], 1)
    # Means 4, 4, 4, 2.5, 1.25, 0.625, 0.3125; variances 0, 0, 0, 1.125, 1.34375, 0.8671875, 0.482421875.
    guarded = evaluate(Eat(0.5, 0.5, 1, 0.5), r)
    assert (guarded.tokens.tolist(), guarded.right.tolist()) == ([70], [True])
    assert evaluate(Eat(0.5, 2.0, 1, 1.25), r).tokens.tolist() == [50]  # not above: equal is enough
    assert evaluate(Eat(0.5, 1.34375, 1, 2.5), r).tokens.tolist() == [40]
    assert evaluate(Eat(0.5, 1.125, 1, 2.5), r).tokens.tolist() == [60]  # below: equal is not


def test_min_probes_are_let_pass() -> None:
    r = of(LEARNS)
    assert [evaluate(Eat(0.5, 0.1, n), r).tokens[0] for n in (0, 1, 2)] == [10, 20, 30]
    assert evaluate(Eat(0.5, 9, 7), r).tokens.tolist() == [100]


def test_with_alpha_1_the_level_of_the_latest_probe_decides() -> None:
    assert evaluate(Eat(1.0, 1.0, 1, 1.0), of(LEARNS)).tokens.tolist() == [40]
    assert all(rule.alpha == 1 for rule in FAMILIES["level"].rules if isinstance(rule, Eat))
    assert all(rule.alpha < 1 for rule in FAMILIES["eat"].rules if isinstance(rule, Eat))


def test_patience_counts_equal_answers_in_a_row() -> None:
    r = of(thought([1] * 6, [7, 7, 3, 3, None, 3]), thought([1] * 3, [7, 7, 7]))
    assert same_answers(r.probes)[0].tolist() == [1, 2, 1, 2, 0, 1]
    assert evaluate(Patience(2), r).tokens.tolist() == [20, 20]
    three = evaluate(Patience(3), r)
    assert (three.tokens.tolist(), three.right.tolist(), three.fired) == ([100, 30], [True, True], 1)


def test_rpdi_is_above_its_threshold_at_a_boundary() -> None:
    r = of(thought([4, 0, 0], [1, 7, 7], rpdi=[math.nan, 1.5, 2.5]), thought([4], [1], (30, False)))
    assert evaluate(Rpdi(1.5), r).tokens.tolist() == [30, 30]
    assert evaluate(Rpdi(1.4), r).right.tolist() == [True, False]
    assert evaluate(Rpdi(3.0), r).fired == 0


def test_a_boundary_borrows_the_answer_of_the_probe_at_its_place() -> None:
    split = Trajectory((Point(10, 0.5, 7), Point(10, rpdi=3.0), Point(20, rpdi=3.0)), TRUTH, 40, True)
    (whole,) = answered([split])
    assert [p.answer for p in whole.points] == [7, 7, None]
    assert evaluate(Rpdi(2.0), of(whole)).right.tolist() == [True]
    # Without an answer, an exit counts as wrong.
    assert evaluate(Rpdi(2.0), of(Trajectory(split.points[2:], TRUTH, 40, True))).right.tolist() == [False]


def test_thoughts_without_points_end_by_themselves() -> None:
    r = of(Trajectory((), TRUTH, 12, True), Trajectory((), TRUTH, 8, False))
    for rule in (Eat(0.5, 1, 1), Patience(2), Rpdi(1.0)):
        assert evaluate(rule, r) == no_limit(r) or evaluate(rule, r).tokens.tolist() == [12, 8]
    with pytest.raises(early_exit.Failed, match="no probe"):
        tuned(r)


def test_choose_takes_the_cheapest_within_the_margin() -> None:
    r = of(*[LEARNS] * 199, thought([4, 0, 0, 0], [7, 3, 3, 3]))
    # Patience 2 and 3 end the last one wrong: 0.5 point of 200.
    assert choose([Patience(2), Patience(3), Patience(5)], r, 0.005) == Choice(
        Patience(2), (199 * 50 + 30) / 200, 0.995, True, 3
    )
    strict = choose([Patience(2), Patience(3), Patience(4)], r, 0.004)
    assert (strict.rule, strict.within_margin) == (Patience(4), True)


def test_choose_takes_the_more_accurate_of_what_costs_as_much() -> None:
    # Patience 2 ends the last one wrong, patience 3 right, for half as many tokens again.
    r = of(*[thought([0] * 4, [7, 7, 7, 7])] * 199, thought([4, 0, 0, 0, 0], [3, 3, 7, 7, 7]))
    two, three = evaluate(Patience(2), r), evaluate(Patience(3), r)
    assert (two.mean_tokens, three.mean_tokens) == (20, (199 * 30 + 50) / 200)
    assert choose([Patience(2), Patience(3)], r).rule == Patience(2)
    assert choose([Patience(2), Patience(3)], r, equally_cheap=0.6).rule == Patience(3)


def test_choose_takes_the_most_accurate_if_none_is_within_the_margin() -> None:
    r = of(*[thought([0, 0, 0], [3, 3, 3])] * 2, thought([0, 0, 0], [7, 7, 7]))
    found = choose([Patience(3), Patience(2)], r)
    assert (found.rule, found.within_margin, found.accuracy) == (Patience(2), False, pytest.approx(1 / 3))
    with pytest.raises(ValueError, match="at least one setting"):
        choose([], r)


CURVE = [(10, 0.2), (20, 0.6), (40, 0.9), (60, 0.8), (80, 0.95)]


def test_cheapest_budget_between_two_points() -> None:
    assert cheapest(CURVE, 0.4).tokens == pytest.approx(15)
    assert cheapest(CURVE, 0.75).tokens == pytest.approx(30)
    assert cheapest(CURVE, 0.9).tokens == pytest.approx(40)
    # A dip is no way: the next crossing is behind it.
    assert cheapest(CURVE, 0.92).tokens == pytest.approx(76)
    assert cheapest(CURVE, 0.92).reached


def test_cheapest_budget_outside_the_curve() -> None:
    low = cheapest(CURVE, 0.1)
    assert (low.tokens, low.reached, low.at_smallest) == (10, True, True)
    high = cheapest(CURVE, 0.99)
    assert (high.tokens, high.reached, high.at_smallest) == (80, False, False)
    single = cheapest([(5, 0.5)], 0.9)
    assert (single.tokens, single.reached, single.at_smallest) == (5, False, False)
    with pytest.raises(ValueError, match="at least one budget"):
        cheapest([], 0.5)


def test_saving_of_nothing_is_no_number() -> None:
    assert saving(30, 40) == pytest.approx(0.25)
    assert math.isnan(saving(0, 0))
    assert math.isnan(interval(math.nan, [math.nan]).low)


def sample(tokens: Sequence[float], right: Sequence[float]) -> Sample:
    return Sample(np.array(tokens, float), np.array(right, float))


def test_equal_settings_differ_by_nothing_in_every_resample() -> None:
    rng = np.random.default_rng(5)
    one = Sample(rng.integers(1, 99, 300).astype(float), rng.integers(0, 2, 300).astype(float))
    r = compare({"none": one, "same": one}, "none", ["none"], within=0.005)["same"]
    assert (r.difference.value, r.difference.low, r.difference.high) == (0, 0, 0)
    assert (r.saving.value, r.saving.low, r.saving.high) == (0, 0, 0)
    assert r.tokens.low < r.tokens.value < r.tokens.high


def test_pairs_cancel_what_problems_differ_in() -> None:
    rng = np.random.default_rng(6)
    tokens, right = rng.integers(50, 500, 400).astype(float), rng.integers(0, 2, 400).astype(float)
    samples = {"none": Sample(tokens, right), "half": Sample(tokens / 2, right)}
    r = compare(samples, "none", ["none"], within=0.005)["half"]
    assert (r.saving.low, r.saving.high) == (pytest.approx(0.5), pytest.approx(0.5))


def test_the_interval_is_that_of_the_normal_approximation() -> None:
    rng = np.random.default_rng(7)
    n = 2000
    samples = {
        "none": Sample(np.full(n, 9.0), (rng.random(n) < 0.9).astype(float)),
        "rule": Sample(np.full(n, 3.0), (rng.random(n) < 0.9).astype(float)),
    }
    r = compare(samples, "none", ["none"], within=0.005, seed=1)["rule"].difference
    half = 1.96 * float((samples["rule"].right - samples["none"].right).std()) / math.sqrt(n)
    assert r.high - r.value == pytest.approx(half, rel=0.1)
    assert r.value - r.low == pytest.approx(half, rel=0.1)


def test_resamples_depend_on_the_seed_alone() -> None:
    rng = np.random.default_rng(8)
    samples = {"none": Sample(rng.random(50), rng.random(50)), "x": Sample(rng.random(50), rng.random(50))}
    a, b, c = (compare(samples, "none", ["none"], within=0.005, seed=s, resamples=200)["x"] for s in (1, 1, 2))
    assert a == b
    assert a.difference != c.difference


def test_degenerate_samples() -> None:
    one = compare({"none": sample([10], [1]), "x": sample([4], [0])}, "none", ["none"], within=0.005)["x"]
    assert (one.difference.low, one.difference.high) == (-1, -1)
    assert one.saving.low == pytest.approx(0.6)
    empty = compare({"none": sample([0, 0], [1, 1])}, "none", ["none"], within=0.005)["none"]
    assert math.isnan(empty.saving.value)
    with pytest.raises(ValueError, match="same problems"):
        compare({"none": sample([1], [1]), "x": sample([1, 2], [1, 1])}, "none", ["none"], within=0.005)
    with pytest.raises(ValueError, match="at least one"):
        compare({"none": sample([], [])}, "none", ["none"], within=0.005)


def test_saving_against_the_fixed_budget_of_equal_accuracy() -> None:
    samples = {
        "fixed-20": sample([20] * 4, [1, 1, 0, 0]),
        "fixed-40": sample([40] * 4, [1, 1, 1, 1]),
        "none": sample([80] * 4, [1, 1, 1, 1]),
        "rule": sample([12] * 4, [1, 1, 1, 0]),
    }
    r = compare(samples, "none", ["fixed-20", "fixed-40", "none"], within=0.25, resamples=50)["rule"]
    assert r.reference.tokens == pytest.approx(30)
    assert r.saving_fixed.value == pytest.approx(0.6)
    assert r.saving_fixed_within.value == pytest.approx(0.4)  # against 20 tokens, half right


def test_splits_share_no_problem() -> None:
    made = splits(1, 300, 900)
    assert [len(made[x]) for x in ("tune", "report")] == [300, 900]
    assert not {p.text for p in made["tune"]} & {p.text for p in made["report"]}
    assert splits(1, 300, 900) == made
    assert splits(2, 300, 900)["report"] != made["report"]


def test_think_tokens_end_at_the_first_marker() -> None:
    assert think_tokens([5, 6, 9, 1, 9], [9]) == 2
    assert think_tokens([5, 8, 6, 8, 9], [8, 9]) == 3
    assert think_tokens([9], [9]) == 0
    assert think_tokens([5, 6], [9]) is None


class Words:
    """A tokenizer whose tokens are the places of words in a list."""

    words = ("ans", "7", "12", "</think>", "<eos>", "so", "\n")

    def get_tokenizer(self) -> "Words":
        return self

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return [self.words[i] for i in ids]

    def ids(self, text: str) -> list[int]:
        return [self.words.index(w) for w in text.split(" ")]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("so 7 \n </think> ans 7 <eos>", (3, True)),
        ("</think> ans 7", (0, True)),
        ("so 7 </think> ans 12 <eos>", (2, False)),
        ("so 7 </think> ans 7 ans 7", (2, False)),
        ("so 7 </think>", (2, False)),
        ("ans 7 <eos>", (3, False)),  # thinking never ended
    ],
)
def test_a_completion_is_graded_behind_its_end_marker(completion: str, expected: tuple[int, bool]) -> None:
    words = Words()
    run = SimpleNamespace(engine=words, end_ids=tuple(words.ids("</think>")))
    solver = Solver(cast(Run, run), 0.6)
    seven = Problem(3, (("+", 4),))
    assert solver.solved(Solving(seven, words.ids(completion))) == expected
    assert [solver.answer_number(t) for t in (1, 2, 5, None)] == [7, 12, None, None]


def test_counters_of_a_pass_are_what_was_gained() -> None:
    before = {"forced": {"budget": 3}, "probes": {"asked": 5}, "probe_tokens": 9}
    after = {"forced": {"budget": 3, "policy": 2}, "probes": {"asked": 6}, "probe_tokens": 9, "on": True}
    assert difference(after, before) == {
        "forced": {"budget": 0, "policy": 2},
        "probes": {"asked": 1},
        "probe_tokens": 0,
    }


def test_settings_are_written_as_toml_reads_them() -> None:
    assert flags({"a.b": True, "a.c": 2.0**-14, "a.d": "ans", "a.e": 1e9}) == [
        "a.b=true", "a.c=6.103515625e-05", "a.d=ans", "a.e=1000000000.0",
    ]  # fmt: skip
    choices = {key: Choice(f.rules[0], 1.0, 1.0, True, 1) for key, f in FAMILIES.items()}
    runs = configurations(choices)
    assert list(runs) == ["fixed", "probes", *FAMILIES]
    assert runs["patience"]["policy.budget.config.answers"] == 2
    assert runs["rpdi"]["entropy.eat_probe_interval_tokens"] > 1000  # no probes
    assert runs["eat"]["entropy.eat_probe_interval_tokens"] == 1  # at every line
    assert runs["probes"]["scheduler.min_think_tokens"] == runs["probes"]["scheduler.max_think_tokens"]
    assert runs["eat-published"]["entropy.eat_max_bits"] == 1e9
    assert flags({"entropy.rpdi_threshold": runs["eat"]["entropy.rpdi_threshold"]}) == ["entropy.rpdi_threshold=inf"]


class FakeEngine:
    """Stands for the child process: thoughts whose probe turns certain, and right, after a line of their own."""

    def __init__(self, problems: int, tune: int) -> None:
        self.rng, self.problems, self.tune = random.Random(4), problems, tune
        self.calls: list[tuple[str, list[str]]] = []

    def counters(self, probes: int) -> dict[str, Any]:
        return {"forced": {}, "probes": {"asked": probes, "done": probes, "dropped": 0}, "probe_tokens": 2 * probes}

    def one_pass(self, limit: int | None, tokens: float, accuracy: float, probes: int) -> dict[str, Any]:
        think = [[min(limit or 999, max(1, round(self.rng.gauss(tokens, 5))))] for _ in range(self.problems)]
        right = [[int(self.rng.random() < accuracy)] for _ in range(self.problems)]
        total = sum(x for (x,) in think)
        return {
            "budget": limit, "wall_s": total / 1000 + probes / 1e4, "think_tokens": think, "right": right,
            "generated_tokens": total + 2 * self.problems, "unended": 1, "counters": self.counters(probes),
        }  # fmt: skip

    def __call__(self, stem: Path, what: str, args: Sequence[str], limit_s: float, *, driver: str) -> dict[str, Any]:
        assert driver == "early_exit_run"
        self.calls.append((what, list(args)))
        common = {"machine": {"vllm": "0.0", "cpu": "none", "cores": 1}, "faults": {}}
        if what == "tune":
            rows = []
            for _ in range(self.tune):
                n = self.rng.randint(3, 8)
                points = [[6 * i, 4.5 if i < n else 0.01, 7 if i >= n else i % 5, 1.0] for i in range(1, 17)]
                rows.append({"truth": 7, "end_tokens": 100, "end_right": True, "points": points})
            return {**common, "recording": {"trajectories": rows}}
        if what == "fixed":
            named = [x for flag, x in pairwise(args) if flag == "--budget"]
            made = [self.one_pass(None if x == "none" else int(x), 100, 0.95, 0) for x in named]
            for p in made[1:]:
                p["right"] = [[int(self.rng.random() < min(0.95, p["budget"] / 60))] for _ in range(self.problems)]
            return {**common, "passes": made}
        tokens = 100 if what == "probes" else 40
        return {**common, "passes": [self.one_pass(None, tokens, 0.95, 0 if what == "rpdi" else 500)]}


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    fake = FakeEngine(400, 60)
    monkeypatch.setattr(early_exit, "engine_run", fake)
    monkeypatch.setattr(early_exit, "check", lambda settings: None)
    x = early_exit.Experiment(tmp_path, tmp_path, 400, 60, budgets=(16, 40, 56))
    d = early_exit.experiment(x)
    seeds = [args[args.index("--engine-seed") + 1] for _, args in fake.calls]
    assert len(set(seeds)) == len(seeds) == 3 + len(FAMILIES)
    return d


def test_the_experiment_from_recording_to_document(results: dict[str, Any]) -> None:
    d = json.loads(json.dumps(results, allow_nan=False))
    assert list(d["settings"]) == ["none", "fixed-16", "fixed-40", "fixed-56", "probes", *FAMILIES]
    assert d["settings"]["eat"]["saving"]["value"] == pytest.approx(0.6, abs=0.02)
    assert d["settings"]["none"]["difference"] == {"value": 0, "low": 0, "high": 0}
    assert [c["holds"] for c in d["claims"]] == [True, d["settings"]["eat"]["difference"]["low"] >= -0.01, True, True]
    assert d["tuning"]["choices"]["level"]["tokens"] <= d["tuning"]["choices"]["eat"]["tokens"] < 100
    # Flat ignorance looks settled: with the constants of the literature, most thoughts end before they know.
    for found in d["tuning"]["literature"]:
        assert found["setting"]["min_probes"] == 4
        assert found["accuracy"] < 0.9
    assert d["overhead"]["wall_ratio"] > 1
    assert d["settings"]["eat"]["computed_saving"] < d["settings"]["eat"]["saving"]["value"]


def test_losses_are_said() -> None:
    zero = {"value": 0.0, "low": -0.02, "high": 0.02}
    s = {
        "title": "x", "difference": {"value": -0.03, "low": -0.04, "high": -0.02}, "saving": {**zero, "value": -0.1},
        "saving_fixed": zero, "saving_fixed_within": zero, "reference": {"reached": False, "at_smallest": False},
        "unended": 2, "probes": {"asked": 4, "done": 3, "dropped": 1}, "probe_tokens": 6, "computed_saving": -0.2,
        "wall_ratio": 1.5,
    }  # fmt: skip
    choice = {"within_margin": False, "settings_tried": 9}
    d = {
        "settings": {"none": {**s, "difference": zero}, "probes": s, **dict.fromkeys(FAMILIES, s)},
        "tuning": {"choices": dict.fromkeys(FAMILIES, choice), "literature": []},
        "margin": 0.005, "within": 0.005, "problems": 48,
        "overhead": {"wall_ratio": 1.2, "probe_tokens_per_generated_token": 0.3}, "faults": {"trap": 1},
    }  # fmt: skip
    text = "\n".join(exit_report.notes(d))
    for said in (
        "RPDI: none of 9 settings was within 0.5 point", "EAT as published: may be more than a point less accurate",
        "patience: saves no think tokens", "more accurate than every budget measured", "-20.0 % fewer tokens computed",
        "probing alone should change nothing, but accuracy differs", "count as wrong: x 2, x 2", "1 of 4 probes were",
        "1 trap", "a result needs at least 2,000",
    ):  # fmt: skip
        assert said in text
    claims = exit_report.claimed({"eat": {**s, "saving_fixed": {"value": None, "low": None, "high": None}}})
    assert [c["holds"] for c in claims] == [False, False, False, False]


def test_table_and_page_have_every_setting(results: dict[str, Any]) -> None:
    text, page = exit_report.table(results), exit_report.markdown(results)
    for s in results["settings"].values():
        assert any(line.startswith(s["title"]) for line in text.splitlines())
        assert f"| {s['title']} |" in page
    assert "max_bits=1e+09" not in page
    assert [x.endswith("holds") for x in exit_report.claims(results)] == [c["holds"] for c in results["claims"]]


def test_json_and_svg_are_written(results: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="an extra of the package")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        assert write(results, tmp_path / name, with_plot=True)
    assert json.loads((tmp_path / "a" / "early-exit.json").read_text())["scenario"] == "early-exit"
    svg = (tmp_path / "a" / "early-exit.svg").read_text()
    assert all(title in svg for title in ("EAT as published", "patience", "mean think tokens"))
    assert svg == (tmp_path / "b" / "early-exit.svg").read_text()


def test_json_is_written_without_the_library_of_the_plot(
    results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not write(results, tmp_path, with_plot=True)
    assert (tmp_path / "early-exit.json").is_file()
    assert not (tmp_path / "early-exit.svg").exists()
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith("error: early-exit.svg: ")
    assert "meridian[bench]" in line


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--problems", "0"], "--problems: got '0', expected a whole number, at least 1"),
        (["--budgets", "16,x"], "--budgets: got 'x', expected a whole number, at least 1"),
        (["--budgets", "16,16"], "--budgets: got '16,16', expected different budgets"),
        (["--temperature", "hot"], "--temperature: got 'hot', expected a temperature, 0 to 2"),
        (["--temperature", "nan"], "--temperature: got 'nan', expected a temperature, 0 to 2"),
        (["--repeats", "-1"], "--repeats: got '-1', expected a whole number, at least 1"),
        (["--seed", "-1"], "--seed: got -1, expected a whole number, at least 0"),
        (["--model", "/nowhere"], "--model: /nowhere: no config.json there, expected a model's folder"),
        (["--pairs", "2"], "unrecognized arguments: --pairs 2"),
    ],
)
def test_bad_arguments_are_one_line(argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        early_exit.main(["--scenario", "early-exit", *argv])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"error: {expected}\n"


def test_quick_is_small_and_what_is_given_counts(tmp_path: Path) -> None:
    a = parse(["--scenario=early-exit", "--quick", "--problems", "70"])
    assert (a.problems, a.tune, a.budgets) == (70, 48, (16, 40, 64))
    assert parse(["--budgets", "40,20"]).budgets == (20, 40)
    assert parse([]).problems >= 2000
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        parse(["--out", str(tmp_path / "file")])


def test_recorded_rows_are_put_in_order() -> None:
    row = {"truth": 3, "end_tokens": 30, "end_right": 1, "points": [[20, 0.1, 3, None], [10, 4.0, None, 1.2]]}
    (t,) = trajectories([row])
    assert [p.tokens for p in t.points] == [10, 20]
    assert (t.points[0].rpdi, t.points[1].answer, t.end_right) == (1.2, 3, True)


def test_a_budget_is_a_number_or_none() -> None:
    from meridian.vllm.bench.early_exit_run import _budget

    assert (_budget("none"), _budget("16")) == (None, 16)
    for text in ("0", "-3", "x"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected none or a whole number"):
            _budget(text)
