"""`BudgetLogitsProcessor` beside speculative decoding, on the model runner V1.

This runner builds no custom logits processor for an engine that speculates, and its rejection sampler would call one
for the bonus token only (vllm/v1/sample/logits_processor/__init__.py, `build_logitsprocs`;
vllm/v1/sample/rejection_sampler.py). `install` wraps both places. It runs in each process of vLLM, as a general plugin,
and changes nothing unless an engine speculates and names `BudgetLogitsProcessor`.

A step gives each request one row of logits per draft token and one for the bonus token. The row of a draft token holds
if all drafts before it are accepted, so meridian-core plans the rows along the drafts. A forced row has one possible
token: the rejection sampler rejects a draft that differs from it, and takes the forced token instead.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from meridian.vllm import effort

logger = logging.getLogger("vllm.meridian")

OURS = ("meridian.vllm:BudgetLogitsProcessor", "meridian.vllm.processor:BudgetLogitsProcessor")
# The number of no token.
NO_TOKEN = (1 << 32) - 1
_RUNNER = "vllm.v1.worker.gpu_model_runner"
# Parameters of the rejection sampler's methods that the wrappers rely on.
_METHODS = {
    "forward": ("metadata", "draft_probs", "logits", "sampling_metadata"),
    "apply_logits_processors": ("logits", "sampling_metadata", "metadata"),
}
# The tensors of logits of the model runner V1: draft tokens, and the token after all of them.
TARGETS, BONUS = 0, 1


@dataclass
class Drafts:
    """The drafts of one step."""

    # Draft tokens of each request of the step.
    tokens: list[list[int]]
    # For each row of the step's logits, the tensor and the row in it that the sampler changes.
    places: list[tuple[int, int]]
    # Whether the sampler splits the step's logits into several tensors.
    is_split: bool = False

    def __post_init__(self) -> None:
        # For each row of the step's logits, the index of its request and the draft token that it verifies.
        self.owners = [i for i, of in enumerate(self.tokens) for _ in range(len(of) + 1)]
        self.verified = [token for of in self.tokens for token in (*of, None)]


def drafts_of(metadata: Any) -> Drafts:
    """The drafts of vLLM's `SpecDecodeMetadata`. Waits for the device."""
    # A draft may be filled up with -1, which no sampler accepts.
    flat = [token if token >= 0 else NO_TOKEN for token in metadata.draft_token_ids.tolist()]
    tokens: list[list[int]] = []
    places: list[tuple[int, int]] = []
    at = 0
    for request, count in enumerate(metadata.num_draft_tokens):
        tokens.append(flat[at : at + count])
        places += [(TARGETS, row) for row in range(at, at + count)]
        places.append((BONUS, request))
        at += count
    return Drafts(tokens, places, is_split=True)


def install() -> None:
    """Entry point `vllm.general_plugins`, in every process of vLLM; calling it again changes nothing. vLLM does not
    catch what a plugin raises, so it must not raise."""
    try:
        effort.install()
    except Exception:
        logger.warning("meridian: reasoning_effort has no effect on thinking budgets", exc_info=True)
    try:
        from vllm.v1.sample import logits_processor

        build = getattr(logits_processor, "build_logitsprocs", None)
        if build is None or hasattr(build, "meridian"):
            return
        wrapped = _building(build)
        for module in (logits_processor, sys.modules.get(_RUNNER)):
            if getattr(module, "build_logitsprocs", None) is build:
                vars(module)["build_logitsprocs"] = wrapped
    except Exception:
        # The processor then refuses an engine that speculates.
        logger.warning("meridian: no thinking budgets with speculative decoding", exc_info=True)


def is_ours(processor: Any) -> bool:
    """Whether an entry of vLLM's `logits_processors` is `BudgetLogitsProcessor`."""
    if isinstance(processor, str):
        return processor in OURS
    # Without this module, nobody can have given the class.
    module = sys.modules.get("meridian.vllm.processor")
    return module is not None and isinstance(processor, type) and issubclass(processor, module.BudgetLogitsProcessor)


def _speculating(build: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The bound arguments of a call for an engine that speculates and names Meridian's processor; None for others."""
    try:
        given = inspect.signature(build).bind(*args, **kwargs)
    except TypeError:
        return None
    given.apply_defaults()
    config = given.arguments.get("vllm_config")
    if getattr(config, "speculative_config", None) is None or given.arguments.get("is_pooling_model"):
        return None
    return given if any(map(is_ours, given.arguments.get("custom_logitsprocs", ()))) else None


def _building(build: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's `build_logitsprocs`, which also builds Meridian's processor for an engine that speculates."""

    @functools.wraps(build)
    def built(*args: Any, **kwargs: Any) -> Any:
        given = _speculating(build, args, kwargs)
        if given is None:
            return build(*args, **kwargs)
        from meridian.vllm.processor import BudgetLogitsProcessor

        processors = given.arguments["custom_logitsprocs"]
        own = next(processor for processor in processors if is_ours(processor))
        # vLLM refuses the others itself.
        given.arguments["custom_logitsprocs"] = tuple(other for other in processors if not is_ours(other))
        found = build(*given.args, **given.kwargs)
        _wrap_rejection_sampler()
        kind = own if isinstance(own, type) else BudgetLogitsProcessor
        config, device, pins = (given.arguments[name] for name in ("vllm_config", "device", "is_pin_memory"))
        found.non_argmax_invariant.append(kind(config, device, pins, speculates=True))
        return found

    vars(built)["meridian"] = build
    return built


def _wrap_rejection_sampler() -> None:
    """Wrap vLLM's rejection sampler, once in a process.

    Raises:
        RuntimeError: names the method that has moved.
    """
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    for name, parameters in _METHODS.items():
        method = getattr(RejectionSampler, name, None)
        found = () if method is None else tuple(inspect.signature(method).parameters)[1:]
        if found != parameters:
            raise RuntimeError(
                f"speculative_config: this vLLM's RejectionSampler.{name}({', '.join(found)}) is not supported by "
                f"this Meridian, expected {', '.join(parameters)}"
            )
    if hasattr(RejectionSampler.forward, "meridian"):
        return
    forward, change = RejectionSampler.forward, RejectionSampler.apply_logits_processors

    @functools.wraps(forward)
    def sampled(self: Any, metadata: Any, draft_probs: Any, logits: Any, sampling_metadata: Any) -> Any:
        processor = _processor(sampling_metadata)
        if processor is None:
            return forward(self, metadata, draft_probs, logits, sampling_metadata)
        processor.begin_drafts(metadata, logits)
        try:
            return forward(self, metadata, draft_probs, logits, sampling_metadata)
        finally:
            processor.end_drafts()

    @functools.wraps(change)
    def changed(self: Any, logits: torch.Tensor, sampling_metadata: Any, metadata: Any) -> torch.Tensor:
        logits = change(self, logits, sampling_metadata, metadata)
        processor = _processor(sampling_metadata)
        return logits if processor is None else processor.apply_drafts(logits)

    vars(sampled)["meridian"] = forward
    setattr(RejectionSampler, "forward", sampled)  # noqa: B010
    setattr(RejectionSampler, "apply_logits_processors", changed)  # noqa: B010


def _processor(sampling_metadata: Any) -> Any:
    from meridian.vllm.processor import BudgetLogitsProcessor

    processors = sampling_metadata.logitsprocs.non_argmax_invariant
    return next((own for own in processors if isinstance(own, BudgetLogitsProcessor)), None)
