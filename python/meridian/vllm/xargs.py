"""Options for the thinking of one request, in `vllm_xargs` (OpenAI API) or `SamplingParams.extra_args`.

| key | value | meaning |
|---|---|---|
| `meridian_think_budget` | integer, 0 or more | most think tokens; the operator's limit holds as well |
| `meridian_think_off` | true or false, 1 or 0 | only limits and interrupts end it: no EAT, RPDI, policy or loop |
| `meridian_min_think_tokens` | integer, 0 or more | as `scheduler.min_think_tokens` |
| `meridian_probe_interval` | integer, 1 or more | as `entropy.eat_probe_interval_tokens` |
| `meridian_ema_alpha` | in (0, 1] | as `entropy.ema_alpha` |
| `meridian_eat_variance_threshold` | 0 or more, 0 is off | as `entropy.eat_variance_threshold` |
| `meridian_eat_max_bits` | 0 or more | as `entropy.eat_max_bits` |
| `meridian_min_probes` | integer, 0 or more | as `entropy.min_probes` |
| `meridian_rpdi_window` | integer from 1 to 65536 | as `entropy.rpdi_window` |
| `meridian_rpdi_threshold` | above 0 | as `entropy.rpdi_threshold` |
| `meridian_reasoning_effort` | one of OpenAI's efforts, or `max` | a row of `[scheduler.reasoning_effort]` |
| `meridian_think_report` | true or false, 1 or 0 | the response says how the thinking went |
| `meridian_interrupt` | text, or a list of up to 8 | as `model.interrupt`, besides the operator's |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

# The scheduler's data for the sampler of a request; clients must not set it.
ROW = "meridian_row"
REPORT = "meridian_think_report"
BUDGET = "meridian_think_budget"
# OpenAI's `reasoning_effort`, for the operator's table.
EFFORT = "meridian_reasoning_effort"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class Row(dict[str, Any]):
    """The scheduler's data for the sampler of one request: of a probe, `probe` and `at`; else

    | key | value |
    |---|---|
    | `key` | number of the request in orders and reports; None without a scheduler |
    | `followed` | whether its thinking is followed from its first token on, or only from the first order for it |
    | `limit` | think tokens at which the end is forced |
    | `interrupts` | token sequences that end the thinking |
    | `measured` | whether its entropies are wanted |
    | `reserve` | generated tokens at which the rest is for the answer |
    | `answers` | whether its answer has a least length |
    | `plain` | whether the end marker is forced without the phrase |

    Limits are `NO_LIMIT` for none. Only the scheduler makes one, and vLLM pickles it on its way
    to the workers. The requests of clients come as plain data, so a sampler takes nothing but a `Row`."""


def row_of(extra_args: Mapping[str, Any] | None) -> Row | None:
    """The scheduler's data in a request's `extra_args`; None for what a client put in its place."""
    row = (extra_args or {}).get(ROW)
    return row if type(row) is Row else None


# As `u32::MAX` in meridian-core.
NO_LIMIT = (1 << 32) - 1
MAX_TOKENS = 1 << 24
MAX_INTERRUPTS = 8
MAX_INTERRUPT_BYTES = 256
# A bias of OpenAI's API that bans a token.
_BAN_BIAS = -100.0


@dataclass(frozen=True)
class RequestBudget:
    """The options of a client; None takes the operator's value."""

    off: bool = False
    max_think_tokens: int | None = None
    min_think_tokens: int | None = None
    eat_probe_interval_tokens: int | None = None
    ema_alpha: float | None = None
    eat_variance_threshold: float | None = None
    eat_max_bits: float | None = None
    min_probes: int | None = None
    rpdi_window: int | None = None
    rpdi_threshold: float | None = None
    interrupts: tuple[str, ...] = ()
    # Whether the response says how the thinking went.
    report: bool = False

    @property
    def is_set(self) -> bool:
        """Whether the client set any option that concerns its sampler."""
        return any(getattr(self, field.name) != field.default for field in fields(self) if field.name != "report")


def read_budget(extra_args: Mapping[str, Any] | None) -> RequestBudget:
    """The budget in a request's `extra_args`.

    Raises:
        ValueError: names the key, the value and what was expected.
    """
    if not extra_args:
        return RequestBudget()
    given: dict[str, Any] = {}
    for key, value in extra_args.items():
        if key in _READERS:
            name, read = _READERS[key]
            given[name] = read(key, value)
        elif key == EFFORT:
            if value not in EFFORTS:
                raise ValueError(f"{EFFORT}: {_shown(value)}: expected one of {', '.join(EFFORTS)}")
        elif key == ROW or key.startswith(_PREFIXES):
            near = ", ".join(sorted(_READERS))
            named = key if key.isprintable() and len(key) <= 64 else _shown(key)
            raise ValueError(f"{named}: {_shown(value)}: unknown, expected one of {near}")
    return RequestBudget(**given)


# An unknown key with one of these prefixes is a typing mistake.
_PREFIXES = (
    "meridian_think",
    "meridian_ema",
    "meridian_eat",
    "meridian_rpdi",
    "meridian_min",
    "meridian_probe",
    "meridian_interrupt",
    "meridian_reasoning",
)


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"{type(value).__name__} that is too large to show"
    return text if len(text) <= 80 else text[:77] + "..."


def _integer(least: int, most: int) -> Callable[[str, Any], int]:
    def read(key: str, value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"{key}: {_shown(value)}: expected an integer from {least} to {most}")
        return value

    return read


def _number(expected: str, holds: Callable[[float], bool]) -> Callable[[str, Any], float]:
    def read(key: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # The integer may have any size.
        if not is_number or (isinstance(value, int) and abs(value) > 1 << 53) or not holds(float(value)):
            raise ValueError(f"{key}: {_shown(value)}: expected a number {expected}")
        return float(value)

    return read


def _flag(key: str, value: Any) -> bool:
    if value is True or value is False or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise ValueError(f"{key}: {_shown(value)}: expected true, false, 1 or 0")


def _is_interrupt(text: Any) -> bool:
    try:
        return isinstance(text, str) and 1 <= len(text.encode()) <= MAX_INTERRUPT_BYTES
    except UnicodeEncodeError:  # half of a character
        return False


def _texts(key: str, value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    good = isinstance(texts, list | tuple) and 1 <= len(texts) <= MAX_INTERRUPTS
    if not good or not all(map(_is_interrupt, texts)):
        raise ValueError(
            f"{key}: {_shown(value)}: expected a text of 1 to {MAX_INTERRUPT_BYTES} bytes, or a list of at most "
            f"{MAX_INTERRUPTS}"
        )
    return tuple(texts)


_READERS: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    BUDGET: ("max_think_tokens", _integer(0, MAX_TOKENS)),
    "meridian_think_off": ("off", _flag),
    "meridian_min_think_tokens": ("min_think_tokens", _integer(0, MAX_TOKENS)),
    "meridian_probe_interval": ("eat_probe_interval_tokens", _integer(1, 1 << 16)),
    "meridian_ema_alpha": ("ema_alpha", _number("in (0, 1]", lambda x: 0 < x <= 1)),
    "meridian_eat_variance_threshold": ("eat_variance_threshold", _number("of at least 0", lambda x: x >= 0)),
    "meridian_eat_max_bits": ("eat_max_bits", _number("of at least 0", lambda x: x >= 0)),
    "meridian_min_probes": ("min_probes", _integer(0, 1 << 16)),
    "meridian_rpdi_window": ("rpdi_window", _integer(1, 1 << 16)),
    "meridian_rpdi_threshold": ("rpdi_threshold", _number("above 0", lambda x: x > 0 and not math.isnan(x))),
    "meridian_interrupt": ("interrupts", _texts),
    REPORT: ("report", _flag),
}
OPTIONS = _READERS.keys()


def is_banned(bias: Mapping[int, float] | None, token: int) -> bool:
    """Whether a client's `logit_bias` forbids the token."""
    return bool(bias) and bias.get(token, 0.0) <= _BAN_BIAS


def forbidding(params: Any, tokens: Sequence[int]) -> str | None:
    """The field of a client's parameters that forbids a token of this sequence wherever it stands; None if none does.
    A grammar, `min_tokens` and a bad word that begins before the sequence forbid it in some places only."""
    if params.allowed_token_ids and not set(tokens) <= set(params.allowed_token_ids):
        return "allowed_token_ids"
    if any(is_banned(params.logit_bias, token) for token in tokens):
        return "logit_bias"
    words = map(list, params.bad_words_token_ids or ())
    inside = any(list(tokens[at : at + len(word)]) == word for word in words for at in range(len(tokens)))
    return "bad_words" if inside else None
