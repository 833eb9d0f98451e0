"""Thinking markers, resolved with the model's own tokenizer."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from meridian import _native
from meridian._native import ConfigError

if TYPE_CHECKING:
    from vllm.config import ModelConfig as VllmModelConfig

    from meridian.config import ModelConfig

logger = logging.getLogger("vllm.meridian")

# Templates and models put these around the markers.
_WHITESPACE = (" ", "\n", "\n\n", "\n\n\n", " \n", "\r\n", "\t")


class Tokenizer(Protocol):
    """The tokenizer methods that Meridian needs."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`."""
        ...


@dataclass(frozen=True)
class TokenMarkers:
    """Token sequences that start and end thinking, the whitespace tokens that may surround them, and the token
    sequences that begin a tool call.
    """

    starts: list[list[int]] = field(default_factory=list)
    ends: list[list[int]] = field(default_factory=list)
    padding: list[int] = field(default_factory=list)
    tool_calls: list[list[int]] = field(default_factory=list)


def resolve(model: ModelConfig, tokenizer: Tokenizer | None) -> TokenMarkers:
    """Token sequences of the configured marker texts; none without a tokenizer or a marker.

    Raises:
        ConfigError: the tokenizer does not encode a marker as the configured family's tokenizers do.
    """
    start_texts, end_texts = _texts(model.think_start), _texts(model.think_end)
    if not start_texts:
        return TokenMarkers()
    if tokenizer is None:
        logger.warning("meridian: the engine has no tokenizer, so phases are not told apart: all is output")
        return TokenMarkers()

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    expected = _expected_ids(model.family)

    def marker(text: str) -> list[int]:
        ids = encode(text)
        shown = json.dumps(text, ensure_ascii=False)
        if not ids:
            raise ConfigError(f"model: {shown}: the model's tokenizer gives no token")
        if ids != expected.get(text, ids):
            raise ConfigError(
                f'model.family: "{model.family}": {shown}: the model\'s tokenizer gives {ids}, expected '
                f"{expected[text]}: the model is not of this family"
            )
        return ids

    starts, ends = [marker(text) for text in start_texts], [marker(text) for text in end_texts]
    tool_calls = [marker(text) for text in _texts(model.tool_call)]
    padding = sorted({ids[0] for ids in map(encode, _WHITESPACE) if len(ids) == 1})
    if any(len(ids) > 1 for ids in starts + ends):
        logger.info("meridian: thinking markers take several tokens: starts %s, ends %s", starts, ends)
    return TokenMarkers(starts=starts, ends=ends, padding=padding, tool_calls=tool_calls)


def around_end(tokenizer: Tokenizer, text: str, end_texts: str | list[str]) -> list[int]:
    """Tokens of a text that contains an end marker. The marker and the text around it are encoded separately, because a
    tokenizer could join them."""
    if not text:
        return []
    marker = next(end for end in _texts(end_texts) if end in text)
    before, _, behind = text.partition(marker)
    parts = (before, marker, behind)
    return [token for part in parts if part for token in tokenizer.encode(part, add_special_tokens=False)]


def _texts(texts: str | list[str]) -> list[str]:
    """The alternatives of a marker."""
    return [text for text in ([texts] if isinstance(texts, str) else texts) if text]


def _expected_ids(family: str) -> dict[str, list[int]]:
    """Marker text -> token ids, where the family's ids are known."""
    if not family:
        return {}
    known = json.loads(_native.model_family(family))
    return {marker["text"]: marker["ids"] for marker in known["start"] + known["end"] if marker["ids"]}


def engine_tokenizer(model_config: VllmModelConfig) -> Tokenizer | None:
    """The served model's tokenizer; None with `skip_tokenizer_init`."""
    if model_config.skip_tokenizer_init:
        return None
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(model_config=model_config)
