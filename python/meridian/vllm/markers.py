"""Thinking markers, resolved with the model's own tokenizer."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from vllm.config import ModelConfig as VllmModelConfig

    from meridian.config import ModelConfig

logger = logging.getLogger("vllm.meridian")

# Templates and models put these around the markers.
_WHITESPACE = (" ", "\n", "\n\n", "\n\n\n", " \n", "\r\n", "\t")


class Tokenizer(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`."""
        ...


@dataclass(frozen=True)
class TokenMarkers:
    """Token sequences that start and end thinking, and the whitespace tokens that may stand around them."""

    starts: list[list[int]] = field(default_factory=list)
    ends: list[list[int]] = field(default_factory=list)
    padding: list[int] = field(default_factory=list)


def resolve(model: ModelConfig, tokenizer: Tokenizer | None) -> TokenMarkers:
    """Token sequences of the configured marker texts; none when there is no tokenizer or no marker."""
    if not model.think_start:
        return TokenMarkers()
    if tokenizer is None:
        logger.warning("meridian: the engine has no tokenizer, so phases are not told apart: all is output")
        return TokenMarkers()

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    start, end = encode(model.think_start), encode(model.think_end)
    padding = sorted({ids[0] for ids in map(encode, _WHITESPACE) if len(ids) == 1})
    if len(start) > 1 or len(end) > 1:
        logger.info("meridian: thinking markers take several tokens: start %s, end %s", start, end)
    return TokenMarkers(starts=[start], ends=[end], padding=padding)


def engine_tokenizer(model_config: VllmModelConfig) -> Tokenizer | None:
    """The served model's tokenizer, or None when vLLM was told to do without."""
    if model_config.skip_tokenizer_init:
        return None
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(model_config=model_config)
