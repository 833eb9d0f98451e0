"""Chains of arithmetic modulo 23, the task of `models/arith-reasoner`: problems, thoughts to train on, a grader.

All text is words with one space between them, each one token of the model; a line break is a word too. A chain is read
from left to right, without precedence: `7 + 5 * 3` is 12 * 3 = 13.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

MODULUS = 23
OPERATORS = ("+", "-", "*")
OPERATIONS = (2, 10)  # fewest and most of a chain
NEWLINE = "\n"
THINK_START, THINK_END = "<think>", "</think>"
PROBE = (THINK_END, "ans")  # appended to a thought so far; the token after it is the answer

# How often a thought has one pass, two, and so on. Passes after the first find nothing new: that is the over-thinking.
# The weights make a second look likely, a third a matter of chance and a fifth impossible, so that a thought is long,
# of varying length, and ends.
PASSES = (0.10, 0.40, 0.35, 0.15)

_ANSWER = re.compile(r"ans ([0-9]{1,2})(?: <eos>)?")


@dataclass(frozen=True)
class Problem:
    """A chain: a number and the operations applied to it in turn; all numbers are in ``range(MODULUS)``."""

    start: int
    operations: tuple[tuple[str, int], ...]

    @property
    def text(self) -> str:
        """What the user writes, such as ``7 + 5 * 3``."""
        return " ".join([str(self.start), *(f"{operator} {number}" for operator, number in self.operations)])

    @property
    def results(self) -> list[int]:
        """The value after each operation."""
        value, values = self.start, []
        for operator, number in self.operations:
            value = apply(value, operator, number)
            values.append(value)
        return values

    @property
    def answer(self) -> int:
        """The value of the chain."""
        return self.results[-1] if self.operations else self.start

    @property
    def prompt(self) -> list[str]:
        """What the chat template makes of the text, as words; thinking is open."""
        return ["<bos>", *self.text.split(), "?", THINK_START]

    @property
    def one_pass(self) -> list[str]:
        """The lines of one look at the chain: ``7 + 5 = 12`` for each operation, then ``so 12``."""
        words, value = [], self.start
        for (operator, number), result in zip(self.operations, self.results, strict=True):
            words += [str(value), operator, str(number), "=", str(result), NEWLINE]
            value = result
        return [*words, "so", str(value), NEWLINE]

    @property
    def needed_tokens(self) -> int:
        """Think tokens after which the answer stands in the thought: its first pass."""
        return len(self.one_pass)


def apply(value: int, operator: str, number: int) -> int:
    """One operation modulo 23.

    Raises:
        ValueError: no such operator.
    """
    if operator == "+":
        return (value + number) % MODULUS
    if operator == "-":
        return (value - number) % MODULUS
    if operator == "*":
        return value * number % MODULUS
    raise ValueError(f"operator {operator!r}: expected one of {' '.join(OPERATORS)}")


def problem(rng: random.Random, operations: int) -> Problem:
    """A random chain of so many operations."""
    chain = tuple((rng.choice(OPERATORS), rng.randrange(MODULUS)) for _ in range(operations))
    return Problem(rng.randrange(MODULUS), chain)


def problems(seed: int, count: int, operations: tuple[int, int] = OPERATIONS) -> list[Problem]:
    """``count`` chains in random order; every length from the fewest to the most operations is equally frequent.

    The same arguments give the same list.
    """
    rng = random.Random(f"arith/{seed}")
    fewest, most = operations
    lengths = [fewest + i % (most - fewest + 1) for i in range(count)]
    rng.shuffle(lengths)
    return [problem(rng, n) for n in lengths]


def thought(rng: random.Random, of: Problem) -> list[str]:
    """A thought as words, markers left out: a pass, and as often as chance wants ``wait`` and the same pass again."""
    passes = rng.choices(range(1, len(PASSES) + 1), PASSES)[0]
    again = ["wait", NEWLINE, *of.one_pass]
    return of.one_pass + again * (passes - 1)


def answer_of(answer: str | Sequence[str]) -> int | None:
    """The number that an answer gives, as text or as words; None if it is not exactly one answer.

    Everything up to the first end marker is thinking and not looked at, so a whole completion may be passed.
    """
    text = answer if isinstance(answer, str) else " ".join(answer)
    _, end, after = text.partition(THINK_END)
    found = _ANSWER.fullmatch((after if end else text).strip(" \n"))
    if not found or found[1] != str(int(found[1])) or int(found[1]) >= MODULUS:
        return None
    return int(found[1])
