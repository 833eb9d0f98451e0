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
        # By row of the batch: the tokens of the script, whether it follows, and vLLM's own list of generated tokens.
        self._rows: dict[int, tuple[Sequence[int], bool, list[int]]] = {}

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

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Of the model runner V2: take in a request in its slot."""
        self._add(req_idx, sampling_params, [])
        return req_idx in self._rows

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        """logits: [rows, vocabulary], float32; changed in place."""
        if ctx is None:
            for row, (_, _, generated) in self._rows.items():
                self._say(logits[row], row, generated)
            return logits
        inputs = ctx.input_ids.tolist()
        of_rows = (ctx.expanded_idx_mapping.tolist(), ctx.pos.tolist(), ctx.expanded_local_pos.tolist())
        for row, (slot, position, drafts) in enumerate(zip(*of_rows, strict=True)):
            if slot in self._rows:
                prompt = int(self._states.prompt_len.np[slot])
                known = self._states.all_token_ids.gpu[slot, prompt : position - drafts + 1].tolist()
                # The drafts before this one are the inputs of the rows before it, which are of the same request.
                self._say(logits[row], slot, known + inputs[row - drafts + 1 : row + 1])
        return logits

    def _add(self, row: int, params: SamplingParams, generated: list[int]) -> None:
        script = (params.extra_args or {}).get(SCRIPT)
        self._rows.pop(row, None)
        if script is not None:
            ids = script if isinstance(script, list) else self._tokenizer.encode(script, add_special_tokens=False)
            self._rows[row] = (ids, bool((params.extra_args or {}).get(FOLLOWS)), generated)

    def _say(self, logits: torch.Tensor, row: int, generated: list[int]) -> None:
        """logits: [vocabulary] of one row."""
        ids, follows, _ = self._rows[row]
        at = len(generated)
        if follows:
            at = 0
            for token in generated:
                at += at < len(ids) and token == ids[at]
        if at < len(ids):
            logits[ids[at]] += BOOST
