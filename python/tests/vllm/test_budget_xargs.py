"""`vllm_xargs` of a thinking budget: what is taken, what is refused, and what a refusal says."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

INTEGERS = {
    "meridian_think_budget": ("max_think_tokens", 0, 1 << 24),
    "meridian_min_think_tokens": ("min_think_tokens", 0, 1 << 24),
    "meridian_probe_interval": ("eat_probe_interval_tokens", 1, 1 << 16),
    "meridian_min_probes": ("min_probes", 0, 1 << 16),
    "meridian_rpdi_window": ("rpdi_window", 1, 1 << 16),
}
NUMBERS = {
    "meridian_ema_alpha": ("ema_alpha", (5e-324, 0.1, 1, 1.0), (0, -0.1, 1.0000001, math.inf)),
    "meridian_eat_variance_threshold": ("eat_variance_threshold", (0, 0.0, 1e-9, 7), (-1e-9, -math.inf)),
    "meridian_eat_max_bits": ("eat_max_bits", (0, 0.5, math.inf), (-1, -math.inf)),
    "meridian_rpdi_threshold": ("rpdi_threshold", (5e-324, 2, 3.5), (0, 0.0, -1.0, -math.inf)),
}
FLAGS = {"meridian_think_off": "off"}
TEXTS = {"meridian_interrupt": "interrupts"}
SLIPS = (
    *("meridian_think_budgets", "meridian_think", "meridian_eat_max", "meridian_rpdi", "meridian_min_probe"),
    *("meridian_probes", "meridian_interrupts", "meridian_ema", "meridian_ema_alfa", "meridian_row"),
)
KEYS = [*INTEGERS, *NUMBERS, *FLAGS, *TEXTS]
LONGEST_MESSAGE = 700


def refusal(extra: dict[str, Any], key: str) -> str:
    """The message with which a budget is refused: one line, not long, about this key."""
    from meridian.vllm.xargs import read_budget

    with pytest.raises(ValueError) as refused:  # noqa: PT011 the message is looked at below
        read_budget(extra)
    message = str(refused.value)
    # A key that cannot be shown as it is may be quoted.
    assert message.lstrip("'").startswith(key[:40]), message[:200]
    assert "expected" in message
    assert "\n" not in message
    assert "\r" not in message
    assert len(message) <= LONGEST_MESSAGE
    return message


@pytest.mark.parametrize(("key", "field", "least", "most"), [(key, *rest) for key, rest in INTEGERS.items()])
def test_integers(key: str, field: str, least: int, most: int) -> None:
    from meridian.vllm.xargs import read_budget

    for value in (least, least + 1, most, float(least), float(most)):
        budget = read_budget({key: value})
        assert getattr(budget, field) == value
        assert type(getattr(budget, field)) is int
        assert budget.is_set
    wrong = [least - 1, most + 1, -(10**30), 10**30, 1e300, 0.5, math.nan, math.inf, -math.inf, True, False]
    for value in [*wrong, None, "", "5", [5], {"n": 5}]:
        message = refusal({key: value}, key)
        assert f"an integer from {least} to {most}" in message
        assert message.startswith(f"{key}: ")


@pytest.mark.parametrize(("key", "field", "good", "bad"), [(key, *rest) for key, rest in NUMBERS.items()])
def test_numbers(key: str, field: str, good: tuple[float, ...], bad: tuple[float, ...]) -> None:
    from meridian.vllm.xargs import read_budget

    for value in good:
        found = getattr(read_budget({key: value}), field)
        assert (found, type(found)) == (value, float)
    for value in (*bad, math.nan, True, False, None, "0.5", [0.5], 10**400, -(10**400)):
        refusal({key: value}, key)


def test_flags() -> None:
    from meridian.vllm.xargs import read_budget

    for value in (True, False, 1, 0):
        found = read_budget({"meridian_think_off": value})
        assert found.off is bool(value)
        assert found.is_set is bool(value)
    for value in (2, -1, 1.0, "true", "", None, [], [True], math.nan):
        refusal({"meridian_think_off": value}, "meridian_think_off")


def test_interrupts() -> None:
    from meridian.vllm.xargs import read_budget

    key = "meridian_interrupt"
    assert read_budget({key: "Wait"}).interrupts == ("Wait",)
    assert read_budget({key: ["a", "b"]}).interrupts == ("a", "b")
    assert read_budget({key: ["é" * 128] * 8}).interrupts == ("é" * 128,) * 8
    long = "x" * 257
    for value in ("", long, "é" * 129, [], ["a"] * 9, ["a", ""], ["a", long], ["a", 1], 5, True, None, {"a": "b"}):
        refusal({key: value}, key)
    refusal({key: ["x" * 200] * 100_000}, key)
    refusal({key: "line\nbreak" * 1000}, key)


def test_an_integer_with_more_digits_than_python_writes_is_refused_by_its_key() -> None:
    for key in KEYS:
        refusal({key: 10**5000}, key)


def test_a_value_nested_deeper_than_python_writes_is_refused_by_its_key() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    for key in KEYS:
        refusal({key: nested}, key)


def test_a_text_that_is_not_unicode_is_refused_by_its_key() -> None:
    """JSON can hold half of a surrogate pair."""
    refusal({"meridian_interrupt": "\ud800"}, "meridian_interrupt")
    refusal({"meridian_interrupt": ["fine", "\udfff"]}, "meridian_interrupt")


@pytest.mark.parametrize("key", SLIPS)
def test_a_key_that_is_nearly_right_is_refused(key: str) -> None:
    message = refusal({key: 5}, key)
    assert message.startswith(f"{key}: 5: unknown, expected one of ")
    assert "meridian_think_budget" in message


@pytest.mark.parametrize("rest", ["x" * 100_000, "\nforged line", "\r\n"])
def test_a_key_that_is_long_or_has_line_breaks_does_not_make_the_message_so(rest: str) -> None:
    refusal({f"meridian_think{rest}": 5}, "meridian_think")


def test_keys_of_others_are_left_alone() -> None:
    from meridian.vllm.xargs import RequestBudget, read_budget

    others = {"meridian_tenant": "a", "meridian_deadline_ms": -1, "think_budget": "x", "": None, "other": {"a": [1]}}
    before = dict(others)
    assert read_budget(others) == RequestBudget()
    assert others == before
    assert not read_budget(others).is_set
    assert read_budget({**others, "meridian_think_budget": 3}) == RequestBudget(max_think_tokens=3)
    assert read_budget(None) == read_budget({}) == RequestBudget()


def value_of(rng: random.Random, depth: int = 0) -> Any:
    """Anything that JSON can hold."""
    kind = rng.randrange(9 if depth < 3 else 7)
    if kind == 7:
        return [value_of(rng, depth + 1) for _ in range(rng.randrange(12))]
    if kind == 8:
        return {f"k{i}": value_of(rng, depth + 1) for i in range(rng.randrange(4))}
    text = "".join(chr(rng.choice([0, 10, 34, 92, 65, 0xE9, 0x4E2D, 0x1F600])) for _ in range(rng.randrange(200)))
    whole = rng.choice([0, 1, -1, rng.randrange(1 << 17), rng.randrange(-(1 << 80), 1 << 80)])
    number = rng.choice([0.0, -0.0, 1.0, math.nan, math.inf, -math.inf, rng.uniform(-2, 2), 1e308, 5e-324, 65536.0])
    return [None, True, False, whole, number, text, whole][kind]


def test_whatever_json_holds_is_a_budget_or_a_value_error() -> None:
    from meridian.vllm.xargs import RequestBudget, read_budget

    rng = random.Random(0)
    taken = 0
    refused: list[tuple[str, dict[str, Any]]] = []
    for _ in range(20_000):
        some = rng.sample(KEYS, rng.choice([1, 1, 2]))
        extra = {key: value_of(rng) for key in some}
        try:
            budget = read_budget(extra)
        except ValueError as why:
            refused.append((str(why), extra))
            continue
        taken += 1
        assert isinstance(budget, RequestBudget)
        for name, *_ in (*INTEGERS.values(), *NUMBERS.values()):
            value = getattr(budget, name)
            assert value is None or value >= 0
    for message, extra in refused:
        assert message.partition(":")[0] in extra
        assert "\n" not in message
        assert len(message) <= LONGEST_MESSAGE
    assert taken > 1000


def test_the_processor_refuses_what_read_budget_refuses() -> None:
    from meridian.vllm import BudgetLogitsProcessor
    from vllm import SamplingParams

    BudgetLogitsProcessor.validate_params(SamplingParams())
    BudgetLogitsProcessor.validate_params(SamplingParams(extra_args={"meridian_think_budget": 3, "other": object()}))
    for extra in ({"meridian_think_budget": -1}, {"meridian_row": {"probe": 1}}, {"meridian_think_of": True}):
        with pytest.raises(ValueError, match=next(iter(extra))):
            BudgetLogitsProcessor.validate_params(SamplingParams(extra_args=extra))
