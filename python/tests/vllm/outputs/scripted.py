"""A logits processor by which the random model says what a request's `script` says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.sample.logits_processor.interface import LogitsProcessor, MoveDirectionality

from outputs import FOLLOWS, SCRIPT

try:
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as RunnerV2LogitsProcessor
except ImportError:  # vLLM 0.30
    RunnerV2LogitsProcessor = object

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor.interface import BatchUpdate

# Far above the model's own logits; a mask of minus infinity still wins.
BOOST = 1e4


class Script(LogitsProcessor, RunnerV2LogitsProcessor):  # type: ignore[misc, valid-type]
    """`extra_args={"script": TEXT}`: token i of the text becomes the likeliest one for output token i.

    After the script the model goes on by itself. A token that a mask or a grammar forbids is lost, unless the request
    has `script_follows`. For both of vLLM's model runners, whose interfaces differ.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Every text is valid."""

    def __init__(self, vllm_config: VllmConfig, *args: Any) -> None:
        # The model runner V2 gives its states, V1 the device and whether memory is pinned.
        self._states: Any = args[0] if len(args) == 1 else None
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
            self._add(row, params, generated)
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

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Of the model runner V2: take in a request in its slot."""
        self._add(req_idx, sampling_params, [])
        return req_idx in self._rows

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        """logits: [rows, vocabulary], float32; changed in place."""
        if ctx is None:
            for row, (_, generated) in self._rows.items():
                self._say(logits[row], row, generated)
            return logits
        for row, (slot, position) in enumerate(zip(ctx.expanded_idx_mapping.tolist(), ctx.pos.tolist(), strict=True)):
            if slot in self._rows:
                prompt = int(self._states.prompt_len.np[slot])
                generated = self._states.all_token_ids.gpu[slot, prompt : position + 1].tolist()
                self._say(logits[row], slot, generated)
        return logits

    def _add(self, row: int, params: SamplingParams, generated: list[int]) -> None:
        script = (params.extra_args or {}).get(SCRIPT)
        self._rows.pop(row, None)
        self._followed.pop(row, None)
        if script is not None:
            ids = script if isinstance(script, list) else self._tokenizer.encode(script, add_special_tokens=False)
            self._rows[row] = (ids, generated)
            if (params.extra_args or {}).get(FOLLOWS):
                self._followed[row] = (0, 0)

    def _say(self, logits: torch.Tensor, row: int, generated: list[int]) -> None:
        """logits: [vocabulary] of one row."""
        ids = self._rows[row][0]
        at = len(generated)
        if row in self._followed:
            at, seen = self._followed[row]
            for token in generated[seen:]:
                at += at < len(ids) and token == ids[at]
            self._followed[row] = at, len(generated)
        if at < len(ids):
            logits[ids[at]] += BOOST
