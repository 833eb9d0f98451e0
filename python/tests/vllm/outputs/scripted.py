"""A logits processor by which the random model says what a request's `script` says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.sample.logits_processor.interface import LogitsProcessor, MoveDirectionality

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor.interface import BatchUpdate

SCRIPT = "script"
# With it, a token that something else forced does not use up the script.
FOLLOWS = "script_follows"
# Far above the model's own logits; a mask of minus infinity still wins.
BOOST = 1e4


class Script(LogitsProcessor):
    """`extra_args={"script": TEXT}`: token i of the text becomes the likeliest one for output token i.

    After the script the model goes on by itself. A token that a mask or a grammar forbids is lost, unless the request
    has `script_follows`.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Every text is valid."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        model = vllm_config.model_config
        self._tokenizer: Any = None
        if not model.skip_tokenizer_init:
            from vllm.tokenizers import cached_tokenizer_from_config

            self._tokenizer = cached_tokenizer_from_config(model_config=model)
        # By row of the batch: the tokens of the script, and vLLM's own list of those that were generated.
        self._rows: dict[int, tuple[Sequence[int], list[int]]] = {}
        # For scripts that follow: how far the script is, and how many tokens were looked at.
        self._followed: dict[int, tuple[int, int]] = {}

    def is_argmax_invariant(self) -> bool:
        """It changes the likeliest token."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the requests through the batch."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, _, generated in batch_update.added:
            script = (params.extra_args or {}).get(SCRIPT)
            self._rows.pop(row, None)
            self._followed.pop(row, None)
            if script is not None:
                ids = script if isinstance(script, list) else self._tokenizer.encode(script, add_special_tokens=False)
                self._rows[row] = (ids, generated)
                if (params.extra_args or {}).get(FOLLOWS):
                    self._followed[row] = (0, 0)
        for source, target, direction in batch_update.moved:
            moved, displaced = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if displaced is not None and direction == MoveDirectionality.SWAP:
                self._rows[source] = displaced
            first, second = self._followed.pop(source, None), self._followed.pop(target, None)
            if first is not None:
                self._followed[target] = first
            if second is not None and direction == MoveDirectionality.SWAP:
                self._followed[source] = second

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """logits: [rows, vocabulary], float32; changed in place."""
        for row, (ids, generated) in self._rows.items():
            at = len(generated)
            if row in self._followed:
                at, seen = self._followed[row]
                for token in generated[seen:]:
                    at += at < len(ids) and token == ids[at]
                self._followed[row] = at, len(generated)
            if at < len(ids):
                logits[row, ids[at]] += BOOST
        return logits
