"""Accuracy against think tokens: paired intervals, and what the cheapest equally accurate fixed budget costs.

A cell of a sample is one problem under one setting: its think tokens, and its accuracy (the mean over repeats). All
settings see the same problems, so a resample takes the same problems from each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
RESAMPLES = 2000
CHUNK = 100  # resamples drawn at a time: bounds the memory
LEVEL = 0.95


@dataclass(frozen=True)
class Sample:
    """One setting: a value a problem."""

    tokens: Floats
    right: Floats  # share of the repeats that were right


@dataclass(frozen=True)
class Interval:
    """A figure of the whole sample and the 95 % percentile interval of its resamples."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Reference:
    """The fixed budget, or mixture of two neighbours, that a rule is held against."""

    tokens: float
    # False: no measured budget is as accurate as the rule, and the most accurate one is taken instead.
    reached: bool
    # True: the smallest measured budget is accurate enough already, and a smaller one might be too.
    at_smallest: bool = False


def cheapest(curve: Sequence[tuple[float, float]], accuracy: float) -> Reference:
    """Mean think tokens of the cheapest fixed budget that is not less accurate than ``accuracy``.

    ``curve`` has (mean think tokens, accuracy) of each budget, smallest first. Between two neighbours the curve is
    linear: giving a share of the requests the one budget and the rest the other reaches every point of that line. When
    the whole curve is below ``accuracy``, its best point is taken, at its cheapest: that favours the fixed budget.

    Raises:
        ValueError: the curve is empty.
    """
    if not curve:
        raise ValueError("expected at least one budget")
    best = max(a for _, a in curve)
    target = min(accuracy, best)
    t0, a0 = curve[0]
    if a0 >= target:
        return Reference(t0, accuracy <= best, accuracy <= a0)
    for t1, a1 in curve[1:]:
        if a1 >= target:
            return Reference(t0 + (t1 - t0) * (target - a0) / (a1 - a0), accuracy <= best)
        t0, a0 = t1, a1
    raise AssertionError("the curve has a point as accurate as its best")


def saving(tokens: float, of: float) -> float:
    """Share of the tokens ``of`` that is saved; NaN when there are none to save."""
    return 1 - tokens / of if of else math.nan


def _means(samples: Sequence[Sample], seed: int, resamples: int) -> Iterator[tuple[Floats, Floats]]:
    """Mean tokens and accuracy of every setting, a row a resample of the problems."""
    rng = np.random.default_rng(seed)
    tokens = np.stack([s.tokens for s in samples], 1)
    right = np.stack([s.right for s in samples], 1)
    n = len(tokens)
    for start in range(0, resamples, CHUNK):
        counts = rng.multinomial(n, np.full(n, 1 / n), size=min(CHUNK, resamples - start)) / n
        yield counts @ tokens, counts @ right


def interval(value: float, resampled: Sequence[float] | Floats) -> Interval:
    """The percentile interval; resamples without a value are left out, and NaN if there are no others."""
    values = np.asarray(resampled, float)
    values = values[np.isfinite(values)]
    if not len(values):
        return Interval(value, math.nan, math.nan)
    outside = (1 - LEVEL) / 2
    low, high = np.quantile(values, [outside, 1 - outside])
    return Interval(value, float(low), float(high))


@dataclass(frozen=True)
class Result:
    """One setting beside no limit and beside the fixed budgets."""

    tokens: Interval
    accuracy: Interval
    difference: Interval  # of the accuracy, to no limit
    saving: Interval  # of think tokens, against no limit
    saving_fixed: Interval  # against the cheapest fixed budget that is not less accurate
    reference: Reference
    # The same, against the cheapest that is at most so much less accurate: kinder to the fixed budget.
    saving_fixed_within: Interval
    within: float


def compare(
    samples: Mapping[str, Sample],
    base: str,
    curve: Sequence[str],
    *,
    within: float,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> dict[str, Result]:
    """Every setting against ``base``, no limit, and against ``curve``, the fixed budgets from the smallest to no limit.

    Raises:
        ValueError: there are no problems, or the settings do not have the same number of them.
    """
    sizes = {len(s.tokens) for s in samples.values()} | {len(s.right) for s in samples.values()}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(f"expected the same problems in each setting, at least one; got {sorted(sizes)}")
    names = list(samples)
    at = {name: i for i, name in enumerate(names)}

    def figures(tokens: Floats, right: Floats) -> Floats:
        """A row a setting; its six figures."""
        points = [(float(tokens[at[x]]), float(right[at[x]])) for x in curve]
        out = np.empty((len(names), 6))
        for i in range(len(names)):
            t, a = float(tokens[i]), float(right[i])
            out[i] = (
                t,
                a,
                a - right[at[base]],
                saving(t, float(tokens[at[base]])),
                saving(t, cheapest(points, a).tokens),
                saving(t, cheapest(points, a - within).tokens),
            )
        return out

    mean_tokens = np.array([samples[x].tokens.mean() for x in names])
    mean_right = np.array([samples[x].right.mean() for x in names])
    values = figures(mean_tokens, mean_right)
    drawn = np.array(
        [
            figures(t, a)
            for tokens, right in _means(list(samples.values()), seed, resamples)
            for t, a in zip(tokens, right, strict=True)
        ]
    )
    points = [(float(mean_tokens[at[x]]), float(mean_right[at[x]])) for x in curve]
    found = {}
    for i, name in enumerate(names):
        tokens, accuracy, difference, saved, fixed, fixed_within = (
            interval(float(values[i, k]), drawn[:, i, k]) for k in range(6)
        )
        reference = cheapest(points, float(mean_right[i]))
        found[name] = Result(tokens, accuracy, difference, saved, fixed, reference, fixed_within, within)
    return found
