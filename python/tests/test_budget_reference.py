"""EAT and RPDI against an independent computation in NumPy, in 64 bits."""

import math

import meridian.budget
import numpy as np
import pytest

TOLERANCE = 1e-9


def eat_reference(values: np.ndarray, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """Closed forms instead of the recurrences: each moving figure is a weighted sum of what came before."""
    n = len(values)
    age = np.arange(n)
    decay = (1.0 - alpha) ** age
    means = np.convolve(values, alpha * decay)[:n] + values[0] * (1.0 - alpha) * decay
    deviations = (values - means) ** 2
    deviations[0] = 0.0
    return means, np.convolve(deviations, alpha * decay)[:n]


def rpdi_reference(values: np.ndarray, window: int) -> np.ndarray:
    """Each mean computed from its own slice."""
    out = np.full(len(values), np.nan)
    for t in range(window, len(values) + 1):
        out[t - 1] = values[t - window : t].mean() / values[:t].mean()
    return out


@pytest.mark.parametrize("alpha", [0.01, 0.05, 0.1, 0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("length", [1, 2, 7, 100, 5000])
def test_eat_is_the_published_recurrence(alpha: float, length: int) -> None:
    values = np.random.default_rng(length).gamma(0.7, 2.0, size=length)
    means, variances = meridian.budget.eat(values.tolist(), alpha)
    expected_means, expected_variances = eat_reference(values, alpha)
    np.testing.assert_allclose(means, expected_means, rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_allclose(variances, expected_variances, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("window", [1, 2, 16, 512, 4999])
@pytest.mark.parametrize("length", [1, 15, 600, 5000])
def test_rpdi_is_the_ratio_of_means(window: int, length: int) -> None:
    rng = np.random.default_rng(window * 10_007 + length)
    # Mostly certain tokens with a few very open ones, as in reasoning; 32 bits, as the engine measures them.
    values = rng.gamma(0.3, 1.5, size=length).astype(np.float32).astype(np.float64)
    got = meridian.budget.rpdi(values.tolist(), window)
    expected = rpdi_reference(values, window)
    assert [math.isnan(value) for value in got] == np.isnan(expected).tolist()
    np.testing.assert_allclose(got, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_what_was_not_measured_is_left_out() -> None:
    means, variances = meridian.budget.eat([math.nan, 1.0, math.inf, 3.0], 0.5)
    assert math.isnan(means[0])
    assert means[1:] == [1.0, 1.0, 2.0]
    assert variances[1:] == [0.0, 0.0, 0.5]
    assert meridian.budget.rpdi([1.0, math.nan, 3.0], 2)[2] == 1.0


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"alpha: 1\.5: must be in \(0, 1\]"):
        meridian.budget.eat([1.0], 1.5)
    with pytest.raises(ValueError, match="window: 0: must be at least 1"):
        meridian.budget.rpdi([1.0], 0)
