"""Rules that end thinking early, evaluated on recorded thoughts: where each would have ended, and how right.

A recorded thought ran to its own end. At every probe the engine noted how open the answer was and which answer it would
have given, so what a rule would have cost is known without running it. Pure functions; nothing here knows the engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meridian.budget import eat

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# A rule may be this much less accurate on the tuning split than no limit. Half of the point that the report split
# allows: what is chosen as the best of many does a little worse on other problems.
MARGIN = 0.005
# Settings whose think tokens are within this share of the fewest count as equally cheap, and the most accurate of them
# is chosen: else the last tenth of a token would be bought with the whole margin.
EQUALLY_CHEAP = 0.01

# Stand for "no such test" in a configuration: no entropy comes near the first, and the second turns the measuring off.
NO_GUARD_BITS = 1e9
RPDI_OFF = math.inf
EAT_OFF_PROBES = 65536  # probes before the first that may end thinking by EAT
PROBES_OFF_TOKENS = 65536

# The published sweep of alpha is 0.05 to 0.3, for thoughts of hundreds of steps. The bundled model's have about 20, so
# that a mean as slow as that would not have moved by their end; 1 is left to `level`, which is what EAT becomes then.
ALPHAS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
DELTAS = tuple(2.0**k for k in (-16, -14, -12, -10, -8, -6, -4, -2, 0, 2))  # bits squared
LEVELS = (0.05, 0.1, 0.2, 0.5, 1.0, 1.5, 2.0)  # bits
MIN_PROBES = (1, 2, 4, 8, 12, 16)
# What the paper's authors use in an example, and what a second implementation of EAT uses; made for longer thoughts.
LITERATURE = ((0.1, 2.0**-10, 4), (0.2, 1e-4, 4))
ANSWERS = (2, 3, 4, 5, 6, 8, 10, 12)
RPDI_THRESHOLDS = (1.05, 1.1, 1.2, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)
# The only known setting of the paper is 512 tokens, longer than any thought of the bundled model.
RPDI_WINDOW = 16


@dataclass(frozen=True)
class Point:
    """A place in a thought where the engine measured something; None is what it did not measure there."""

    tokens: int  # of the thought so far
    bits: float | None = None  # entropy after a forced end
    answer: int | None = None  # the answer that a forced end gets
    rpdi: float | None = None


@dataclass(frozen=True)
class Trajectory:
    """A thought that ran to its own end, the true answer, and whether the answer then given was right."""

    points: tuple[Point, ...]
    truth: int
    end_tokens: int
    end_right: bool


@dataclass(frozen=True)
class Grid:
    """One kind of points of all thoughts: a row a thought, in order, ``has`` where there is a point."""

    has: Bools
    tokens: Floats
    right: Bools  # False too where no answer is known: an exit there counts as wrong
    value: Floats  # bits of probes, the index of boundaries
    answer: Floats  # NaN where none is known


@dataclass(frozen=True)
class Recorded:
    """Many thoughts as arrays."""

    probes: Grid
    boundaries: Grid
    end_tokens: Floats
    end_right: Bools
    _moved: dict[float, tuple[Floats, Floats]] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.end_tokens)

    def moving(self, alpha: float) -> tuple[Floats, Floats]:
        """EAT's mean and variance of the probes, computed once for an ``alpha``: many settings share one."""
        if alpha not in self._moved:
            self._moved[alpha] = moving(self.probes, alpha)
        return self._moved[alpha]


def _grid(rows: Sequence[Sequence[tuple[Point, float]]], truths: Sequence[int]) -> Grid:
    shape = (len(rows), max(map(len, rows), default=0))
    has, right = np.zeros(shape, bool), np.zeros(shape, bool)
    tokens, value, answer = (np.full(shape, math.nan) for _ in range(3))
    for i, (row, truth) in enumerate(zip(rows, truths, strict=True)):
        for j, (point, x) in enumerate(row):
            has[i, j], tokens[i, j], value[i, j] = True, point.tokens, x
            right[i, j] = point.answer == truth
            answer[i, j] = math.nan if point.answer is None else point.answer
    return Grid(has, tokens, right, value, answer)


def recorded(trajectories: Sequence[Trajectory]) -> Recorded:
    """The thoughts as arrays. An entropy or index that is not finite was not measured."""
    truths = [t.truth for t in trajectories]

    def kind(name: str) -> Grid:
        rows = []
        for t in trajectories:
            values = [(p, getattr(p, name)) for p in t.points]
            rows.append([(p, x) for p, x in values if x is not None and math.isfinite(x)])
        return _grid(rows, truths)

    return Recorded(
        kind("bits"),
        kind("rpdi"),
        np.array([t.end_tokens for t in trajectories], float),
        np.array([t.end_right for t in trajectories], bool),
    )


def moving(x: Grid, alpha: float) -> tuple[Floats, Floats]:
    """EAT's moving mean and variance after each probe, by the engine's own recurrence; NaN where there is no probe."""
    mean, variance = (np.full(x.value.shape, math.nan) for _ in range(2))
    for i, has in enumerate(x.has):
        mean[i, has], variance[i, has] = eat(x.value[i, has].tolist(), alpha)
    return mean, variance


def same_answers(x: Grid) -> NDArray[np.int64]:
    """How many probes in a row, up to each, gave the same answer; 0 where no answer is known."""
    run = np.zeros(x.answer.shape, np.int64)
    for j in range(x.answer.shape[1]):
        known = ~np.isnan(x.answer[:, j])
        same = known & (x.answer[:, j] == x.answer[:, j - 1]) if j else np.zeros(len(run), bool)
        run[:, j] = np.where(same, run[:, j - 1] + 1, known)
    return run


@dataclass(frozen=True)
class Eat:
    """EAT: the moving variance is below ``delta`` and the moving mean not above ``max_bits``, from a probe on.

    ``min_probes`` are let pass before the first that may end thinking. The guard on the mean is not in the paper.
    """

    alpha: float
    delta: float
    min_probes: int
    max_bits: float = NO_GUARD_BITS

    def fires(self, r: Recorded) -> tuple[Grid, Bools]:
        mean, variance = r.moving(self.alpha)
        late = np.arange(variance.shape[1]) >= self.min_probes
        return r.probes, r.probes.has & late & (variance < self.delta) & (mean <= self.max_bits)

    def settings(self) -> dict[str, Any]:
        """What to set in meridian.toml."""
        return {
            "entropy.ema_alpha": self.alpha,
            "entropy.eat_variance_threshold": self.delta,
            "entropy.min_probes": self.min_probes,
            "entropy.eat_max_bits": self.max_bits,
        }


@dataclass(frozen=True)
class Patience:
    """So many probes in a row gave the same answer."""

    answers: int

    def fires(self, r: Recorded) -> tuple[Grid, Bools]:
        return r.probes, r.probes.has & (same_answers(r.probes) >= self.answers)

    def settings(self) -> dict[str, Any]:
        """What to set in meridian.toml."""
        return {
            "entropy.min_probes": 1,
            "policy.budget.source": "native:patience",
            "policy.budget.config.answers": self.answers,
        }


@dataclass(frozen=True)
class Rpdi:
    """The path deviation index is above ``threshold`` at a boundary. No probe is needed to run it."""

    threshold: float
    window: int = RPDI_WINDOW

    def fires(self, r: Recorded) -> tuple[Grid, Bools]:
        return r.boundaries, r.boundaries.has & (r.boundaries.value > self.threshold)

    def settings(self) -> dict[str, Any]:
        """What to set in meridian.toml."""
        return {
            "entropy.min_probes": EAT_OFF_PROBES,
            "entropy.probe_at": "interval",
            "entropy.eat_probe_interval_tokens": PROBES_OFF_TOKENS,
            "entropy.rpdi_window": self.window,
            "entropy.rpdi_threshold": self.threshold,
        }


Rule = Eat | Patience | Rpdi


@dataclass(frozen=True)
class Outcome:
    """Of each thought: think tokens, and whether the answer was right."""

    tokens: Floats
    right: Bools
    fired: int = 0  # thoughts that the rule ended

    @property
    def accuracy(self) -> float:
        return float(self.right.mean())

    @property
    def mean_tokens(self) -> float:
        return float(self.tokens.mean())


def no_limit(r: Recorded) -> Outcome:
    """Every thought ends where it ended."""
    return Outcome(r.end_tokens, r.end_right)


def evaluate(rule: Rule, r: Recorded) -> Outcome:
    """What the rule would have made of the thoughts: each ends where the rule holds first, else at its own end."""
    grid, fires = rule.fires(r)
    if not fires.shape[1]:
        return no_limit(r)
    rows, at, fired = np.arange(len(r)), fires.argmax(1), fires.any(1)
    tokens = np.where(fired, grid.tokens[rows, at], r.end_tokens)
    return Outcome(tokens, np.where(fired, grid.right[rows, at], r.end_right), int(fired.sum()))


@dataclass(frozen=True)
class Choice:
    """The setting of a rule that was chosen on the tuning split, and what it reached there."""

    rule: Rule
    tokens: float
    accuracy: float
    within_margin: bool  # False: no setting was accurate enough, this is the most accurate
    tried: int

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "setting": vars(self.rule),
            "tokens": self.tokens,
            "accuracy": self.accuracy,
            "within_margin": self.within_margin,
            "settings_tried": self.tried,
        }


def choose(rules: Iterable[Rule], r: Recorded, margin: float = MARGIN, equally_cheap: float = EQUALLY_CHEAP) -> Choice:
    """The cheapest setting in think tokens that is at most ``margin`` less accurate than no limit.

    Of all that are at most the share ``equally_cheap`` above the cheapest, the most accurate; if none is within the
    margin, the most accurate of all. Of equals the one with fewer tokens, then the earlier.

    Raises:
        ValueError: there are no settings, or no thoughts.
    """
    rules = list(rules)
    if not rules or not len(r):
        raise ValueError("expected at least one setting and one thought")
    least = no_limit(r).accuracy - margin
    tried = [(rule, o.mean_tokens, o.accuracy) for rule in rules for o in (evaluate(rule, r),)]
    # A share of so many thoughts is not an exact number.
    good = [x for x in tried if x[2] >= least - 1e-12]
    most = (1 + equally_cheap) * min((x[1] for x in good), default=math.inf)
    rule, tokens, accuracy = min((x for x in good or tried if x[1] <= most), key=lambda x: (-x[2], x[1]))
    return Choice(rule, tokens, accuracy, bool(good), len(rules))


@dataclass(frozen=True)
class Family:
    """A rule with the settings to choose from; ``key`` names it in files, ``title`` in tables."""

    key: str
    title: str
    rules: tuple[Rule, ...] = field(repr=False)


FAMILIES: Mapping[str, Family] = {
    f.key: f
    for f in (
        Family(
            "eat",
            "EAT with a guard on the mean",
            tuple(Eat(*x) for x in product(ALPHAS, DELTAS, MIN_PROBES, LEVELS)),
        ),
        Family("eat-published", "EAT as published", tuple(Eat(*x) for x in product(ALPHAS, DELTAS, MIN_PROBES))),
        # With alpha 1 the mean is the latest probe and the variance is 0.
        Family("level", "level of one probe", tuple(Eat(1.0, 1.0, n, x) for n, x in product(MIN_PROBES, LEVELS))),
        Family("rpdi", "RPDI", tuple(map(Rpdi, RPDI_THRESHOLDS))),
        Family("patience", "patience", tuple(map(Patience, ANSWERS))),
    )
}
