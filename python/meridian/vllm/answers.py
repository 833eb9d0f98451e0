"""Answers after thinking: which tokens show nothing, tokens that an answer must not have yet, and reports to clients.

meridian-core counts the tokens of an answer and says in which rows no end of the sequence may be sampled
(`AnswerRules`); this module changes the logits accordingly.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from meridian._torch_rows import on_device
from meridian.vllm.xargs import REPORT, ROW, read_budget

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    from meridian import _native
    from meridian.vllm.markers import TokenMarkers

logger = logging.getLogger("vllm.meridian")


def blank_tokens(tokenizer: Any, markers: TokenMarkers) -> list[int]:
    """Tokens that show nothing in an answer: white space, special tokens, and markers of one token."""
    blank = {ids[0] for ids in (*markers.starts, *markers.ends) if len(ids) == 1}
    blank.update(token for token in getattr(tokenizer, "all_special_ids", ()) if isinstance(token, int))
    vocabulary = getattr(tokenizer, "get_vocab", dict)()
    for text, token in vocabulary.items():
        # Vocabularies write white space in their own way; one with ASCII letters or digits has none or is `<0x0A>`.
        if text.startswith("<0x") or not any(char.isascii() and char.isalnum() for char in text):
            shown = tokenizer.decode([token], skip_special_tokens=False)
            if not shown.strip():
                blank.add(token)
    return sorted(blank)


class AnswerGuard:
    """The tokens that would end each request's sequence."""

    def __init__(self, eos: Sequence[int]) -> None:
        self._eos = set(eos)
        # Slot -> tokens.
        self._stops: dict[int, list[int]] = {}

    def add(self, index: int, params: SamplingParams) -> None:
        """Take in the request of a slot. One that ignores ends of sequence has only its own `stop_token_ids`."""
        own = set(params.stop_token_ids or ())
        stops = own if params.ignore_eos else own | self._eos | set(params.all_stop_token_ids)
        self._stops[index] = sorted(stops)

    def move(self, one: int, other: int, *, swaps: bool) -> None:
        """Swap two slots, or move one into the place of the other."""
        first, second = self._stops.pop(one, []), self._stops.pop(other, [])
        self._stops[other] = first
        if swaps:
            self._stops[one] = second

    def banned(
        self, answering: tuple[list[int], list[tuple[int, int]]], slots: Mapping[int, int] | None = None
    ) -> dict[int, list[int]]:
        """Rows with the tokens that they must not sample. `answering` is from `BudgetRows`; `slots` has the slot of
        each row, None if they are equal."""
        banned: dict[int, list[int]] = {}
        unended, openers = answering
        for row in unended:
            stops = self._stops.get(row if slots is None else slots[row])
            if stops:
                banned[row] = list(stops)
        for row, token in openers:
            # A request without any end has a fixed length: its client does not read the answer.
            if self._stops.get(row if slots is None else slots[row]):
                banned.setdefault(row, []).append(token)
        return banned


def ban(logits: torch.Tensor, banned: Mapping[int, Sequence[int]]) -> None:
    """Make tokens impossible in rows of the logits. A row that would have no possible token keeps its own: a grammar
    may permit nothing but the end."""
    if not banned:
        return
    at = on_device(list(banned), logits.device, torch.int64)
    of = [i for i, tokens in enumerate(banned.values()) for _ in tokens]
    tokens = [token for tokens in banned.values() for token in tokens]
    own = logits[at]
    left = own.clone()
    left[on_device(of, logits.device, torch.int64), on_device(tokens, logits.device, torch.int64)] = float("-inf")
    possible = left.max(dim=1).values > float("-inf")
    logits[at] = torch.where(possible[:, None], left, own)


def report(thinking: _native.Thinking, ended: Iterable[Request], outputs: Iterable[Any]) -> None:
    """Say in the last output of each request that asked for it how its thinking went: in `kv_transfer_params`, which
    vLLM passes on to the response (ADR 0026). A KV connector's own parameters stay as they are."""
    asked = {request.request_id for request in ended if _asks(request.sampling_params)}
    if not asked:
        return
    for output in (output for of_client in outputs for output in of_client.outputs):
        if output.request_id not in asked or output.finish_reason is None or output.kv_transfer_params is not None:
            continue
        course = thinking.course(output.request_id)
        if course is not None:
            think_tokens, end, reopened, *_ = course
            told = {"think_tokens": think_tokens, "think_end": end, "reopened": reopened}
            output.kv_transfer_params = {"meridian": told}


def _asks(params: SamplingParams | None) -> bool:
    extra = {} if params is None else params.extra_args or {}
    if REPORT not in extra:
        return False
    try:
        return read_budget({key: value for key, value in extra.items() if key != ROW}).report
    except ValueError:
        return False


def install() -> None:
    """Make a response of several choices (`n` above 1) carry the report of each; calling it again changes nothing.

    vLLM splits such a request where it talks to clients, so the engines see independent requests, and its response has
    the `kv_transfer_params` of the choice that ends last. The reports therefore come together in that process.

    Raises:
        ImportError, AttributeError: this vLLM has no such place.
    """
    from vllm.v1.engine.output_processor import OutputProcessor

    add = OutputProcessor.add_request
    if hasattr(add, "meridian"):
        return

    @functools.wraps(add)
    def added(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        is_new = request.request_id not in self.request_states
        add(self, request, *args, **kwargs)
        if not is_new:
            return
        try:
            state = self.request_states[request.request_id]
            if state.parent_req is not None and _asks(request.sampling_params):
                state.__class__ = _of_choice(type(state))
        except Exception:
            logger.exception("meridian: request %s does not report all of its choices", request.request_id)

    vars(added)["meridian"] = add
    setattr(OutputProcessor, "add_request", added)  # noqa: B010


class _OfChoice:
    """Mixin over vLLM's state of one choice in the process that talks to clients."""

    parent_req: Any
    request_index: int

    def make_request_output(
        self,
        new_token_ids: list[int],
        pooling_output: Any,
        finish_reason: Any,
        stop_reason: Any,
        kv_transfer_params: dict[str, Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The output for the client; the last one of a choice has the reports of all choices that have ended."""
        if finish_reason is not None:
            kv_transfer_params = _with_choices(self.parent_req, self.request_index, kv_transfer_params)
        make: Any = super().make_request_output  # type: ignore[misc]
        return make(new_token_ids, pooling_output, finish_reason, stop_reason, kv_transfer_params, *args, **kwargs)


@functools.cache
def _of_choice(state: type) -> type:
    return type(f"Meridian{state.__name__}", (_OfChoice, state), {})


def _with_choices(parent: Any, index: int, told: dict[str, Any] | None) -> dict[str, Any] | None:
    """A choice's last `kv_transfer_params` with the reports so far. They lie in vLLM's own object for the whole
    request, and go with it. A choice that vLLM ended by a stop string, or for its client, has no report of its own."""
    own = None if told is None else told.get("meridian")
    if told is not None and own is None:
        return told
    choices: dict[int, dict[str, Any]] = vars(parent).setdefault("meridian_choices", {})
    if own is not None:
        choices[index] = own
    if not choices:
        return None
    return {"meridian": {**(own or {}), "choices": {str(choice): choices[choice] for choice in sorted(choices)}}}
