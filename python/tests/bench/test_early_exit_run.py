"""The driver of the scenario `early-exit`: problems, what is counted in a completion, its command line.

No engine is built. What is made of the rows is the `meridian` command's, and tested there.
"""

import argparse
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest
from meridian.vllm.bench.arith import Problem
from meridian.vllm.bench.early_exit_run import Solver, Solving, _budget, difference, parse, splits, think_tokens
from meridian.vllm.bench.run import Run


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


def test_a_budget_is_a_number_or_none() -> None:
    assert (_budget("none"), _budget("16")) == (None, 16)
    for text in ("0", "-3", "x"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected none or a whole number"):
            _budget(text)


def test_a_recording_has_no_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["--model", "m", "--out", "o", "--budget", "none", "--budget", "16"]).budgets == [None, 16]
    with pytest.raises(SystemExit):
        parse(["--model", "m", "--out", "o", "--record", "--budget", "16"])
    assert "--record: no --budget beside it" in capsys.readouterr().err
