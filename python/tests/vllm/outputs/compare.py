"""Where two answers differ."""

from __future__ import annotations

from typing import Any

TOLERANCE = 1e-4


def first_difference(one: Any, other: Any, place: str = "") -> str | None:
    """The first place where two JSON values differ, with both values; None if they are equal.

    Floats are log probabilities and embeddings. They may differ by 1e-4, or by that share of a larger one: rounding
    depends on which requests share a batch. Everything else is equal or not.
    """
    if isinstance(one, dict) and isinstance(other, dict):
        for key in (*one, *(x for x in other if x not in one)):
            if (key in one) != (key in other):
                return f"{place}.{key}: {'only in one' if key in one else 'only in the other'}"
            if found := first_difference(one[key], other[key], f"{place}.{key}"):
                return found
        return None
    if isinstance(one, list) and isinstance(other, list):
        for i, (a, b) in enumerate(zip(one, other, strict=False)):
            if found := first_difference(a, b, f"{place}[{i}]"):
                return found
        return None if len(one) == len(other) else f"{place}: {len(one)} items, {len(other)} in the other"
    if isinstance(one, float) and isinstance(other, float):
        is_equal = abs(one - other) <= TOLERANCE * max(1.0, abs(one))
    else:
        is_equal = type(one) is type(other) and one == other
    return None if is_equal else f"{place}: {one!r:.200}, {other!r:.200} in the other"
