"""Chains are computed right, thoughts tell the truth, and the grader takes exactly one answer."""

import random
from itertools import pairwise

import pytest
from meridian.vllm.bench import arith
from meridian.vllm.bench.arith import Problem, answer_of, problems, thought


def left_to_right(text: str) -> int:
    """The value of a chain by Python's own arithmetic, reduced once at the end."""
    first, *rest = text.split()
    source = first
    for operator, number in zip(rest[::2], rest[1::2], strict=True):
        source = f"({source} {operator} {number})"
    return eval(source) % 23


def lines(words: list[str]) -> list[str]:
    return [line.strip() for line in " ".join(words).split("\n")]


def test_a_chain_is_read_from_left_to_right() -> None:
    chain = Problem(7, (("+", 5), ("*", 3), ("-", 22)))
    assert chain.text == "7 + 5 * 3 - 22"
    assert chain.results == [12, 13, 14]
    assert chain.answer == 14
    assert " ".join(chain.prompt) == "<bos> 7 + 5 * 3 - 22 ? <think>"
    assert lines(chain.one_pass) == ["7 + 5 = 12", "12 * 3 = 13", "13 - 22 = 14", "so 14", ""]


@pytest.mark.parametrize("seed", range(5))
def test_answers_agree_with_an_independent_evaluation(seed: int) -> None:
    for chain in problems(seed, 200):
        assert chain.answer == left_to_right(chain.text)


def test_an_unknown_operator_is_named() -> None:
    with pytest.raises(ValueError, match=r"'/': expected one of \+ - \*"):
        arith.apply(1, "/", 2)


def test_same_seed_same_problems() -> None:
    assert problems(3, 50) == problems(3, 50)
    assert problems(3, 50) != problems(4, 50)


def test_every_length_is_equally_frequent_and_mixed() -> None:
    lengths = [len(p.operations) for p in problems(1, 900)]
    assert {n: lengths.count(n) for n in range(2, 11)} == dict.fromkeys(range(2, 11), 100)
    assert lengths != sorted(lengths)
    assert {len(p.operations) for p in problems(1, 20, (3, 4))} == {3, 4}


def test_all_numbers_and_operators_occur() -> None:
    made = problems(2, 900)
    assert {number for p in made for _, number in p.operations} == set(range(23))
    assert {operator for p in made for operator, _ in p.operations} == set(arith.OPERATORS)


@pytest.mark.parametrize("seed", range(20))
def test_every_line_of_a_thought_is_true(seed: int) -> None:
    rng = random.Random(seed)
    (chain,) = problems(seed, 1, (seed % 9 + 2, seed % 9 + 2))
    written = lines(thought(rng, chain))
    assert written.pop() == ""
    for line in written:
        if line.startswith("so "):
            assert int(line.removeprefix("so ")) == chain.answer
        elif line != "wait":
            left, right = line.split(" = ")
            assert left_to_right(left) == int(right)
    passes = " ".join(written).split(" wait ")
    assert all(a == b for a, b in pairwise(passes))


def test_thoughts_are_two_to_three_times_as_long_as_needed() -> None:
    rng = random.Random(1)
    made = problems(1, 900)
    needed = sum(p.needed_tokens for p in made)
    assert 2 * needed < sum(len(thought(rng, p)) for p in made) < 3 * needed
    assert [p.needed_tokens for p in problems(1, 1, (10, 10))] == [63]
    assert max(len(thought(rng, p)) for p in made) <= 4 * 63 + 3 * 2


@pytest.mark.parametrize(
    "text",
    ["ans 13", " ans 13 ", "ans 13 <eos>", "ans 13\n", "7 + 6 = 13 \n so 13 \n </think> ans 13", "</think>\n\nans 13"],
)
def test_an_answer_is_taken(text: str) -> None:
    assert answer_of(text) == 13


def test_an_answer_may_be_words() -> None:
    assert answer_of(["so", "4", "\n", "</think>", "ans", "0", "<eos>"]) == 0
    assert answer_of([]) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "13",
        "ans",
        "ans ",
        "ans 23",
        "ans 99",
        "ans -1",
        "ans +1",
        "ans 013",
        "ans 07",
        "ans 1_3",
        "ans 13.0",
        "ans \uff11\uff13",
        "ans \u0661\u0663",
        "ans 12 ans 13",
        "ans 13 ans 13",
        "ans 13 14",
        "ans 13 \n ans 14",
        "ans  13",
        "ans\n13",
        "ANS 13",
        "the ans 13",
        "so 13 \n",
        "7 + 6 = 13 \n so 13",
        "ans 12 </think> ans",
        "ans 13 </think>",
        "</think> ans 12 </think> ans 13",
        "<think> ans 13",
        "ans 13 <eos> <eos>",
        "ans " + "9" * 5000,
    ],
)
def test_anything_else_is_no_answer(text: str) -> None:
    assert answer_of(text) is None
