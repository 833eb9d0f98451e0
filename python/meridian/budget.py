"""The two signals that end thinking early, over a whole series. The engine computes the same token by token.

`eat` is EAT (arXiv 2509.26522). `rpdi` is the index of RPDI-EE (arXiv 2603.14251), by the definition of an independent
implementation. Only the abstract of that paper was available, so the authors' definition may differ.
"""

from __future__ import annotations

from collections.abc import Iterable

from meridian import _native


def eat(values: Iterable[float], alpha: float) -> tuple[list[float], list[float]]:
    """Moving mean and variance of probe entropies.

    With `M_0 = x_0` and `V_0 = 0`: `M_i = a x_i + (1 - a) M_{i-1}` and `V_i = a (x_i - M_i)^2 + (1 - a) V_{i-1}`; the
    variance takes the updated mean. The results are in the unit of `values` and its square. A value that is not finite
    repeats the previous result, or gives NaN before the first finite value.

    Args:
        values: entropy of each probe, in nats or bits.
        alpha: weight of the latest probe, in (0, 1].

    Raises:
        ValueError: `alpha` is out of range.
    """
    return _native.eat(list(values), alpha)


def rpdi(values: Iterable[float], window: int) -> list[float]:
    """Reasoning path deviation index after each token: mean entropy of the last `window` tokens over the mean of all.

    NaN before `window` tokens, and while every entropy was 0. A negative or non-finite value counts as not measured and
    is skipped. Values are rounded to 32 bits, as the engine measures them.

    Args:
        values: entropy of each token, nats.
        window: tokens in the window, at least 1.

    Raises:
        ValueError: `window` is 0.
        OverflowError: `window` is negative or does not fit 32 bits.
    """
    return _native.rpdi(list(values), window)
