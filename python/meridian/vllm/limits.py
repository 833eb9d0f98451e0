"""Limits of thinking where requests enter vLLM. A request for which its limit could not hold returns HTTP 400.

A sampler counts the tokens of one engine request, and forces no token that its client forbids. Three kinds of request
need more than that:

- `allowed_token_ids`, `bad_words` and `logit_bias` may forbid the end of thinking for good.
- Beam search asks the engine for one token at a time, and chooses tokens by log probabilities in which nothing is
  forced (vllm/entrypoints/generate/beam_search).
- `/v1/responses` asks the engine again after each tool that the server has run. The limit of the next request is then
  lower by the think tokens so far.

The general plugin `meridian` wraps these places in the process that talks to clients. Like `model.stop_strings`, they
read the `meridian.toml` of that process.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from meridian.vllm.effort import effort_of, for_request
from meridian.vllm.imports import when_imported
from meridian.vllm.markers import resolve
from meridian.vllm.speculation import is_ours
from meridian.vllm.stops import Rules, Thought, configured
from meridian.vllm.xargs import BUDGET, EFFORT, MAX_TOKENS, OPTIONS, forbidding, read_budget

if TYPE_CHECKING:
    from types import ModuleType

    from meridian.config import MeridianConfig
    from meridian.vllm.markers import TokenMarkers

logger = logging.getLogger("vllm.meridian")

# Where the input processor of an engine keeps its `Limits`, and vLLM's `BeamSearchParams` the client's options.
_LIMITS, _ASKED = "meridian_limits", "meridian_asked"


@dataclass(frozen=True)
class Limit:
    """Most think tokens of a request, and the field that says so."""

    field: str
    tokens: int


class Limits:
    """The limits of one engine's requests."""

    def __init__(self, config: MeridianConfig, markers: TokenMarkers, *, plans: bool) -> None:
        """`plans`: the engine has `MeridianScheduler`. Without it, only the client's own options hold."""
        self._scheduler = config.scheduler if plans else None
        self._markers = markers
        self._rules = Rules.of(markers)

    def of(self, extra: Mapping[str, Any]) -> Limit | None:
        """The least limit of a request with these options; None without one."""
        client = read_budget(extra)
        if self._scheduler is not None:
            client = for_request(client, extra, self._scheduler.reasoning_effort)
        found: list[Limit] = []
        if client.max_think_tokens is not None:
            found.append(Limit(BUDGET if BUDGET in extra else "reasoning_effort", client.max_think_tokens))
        if self._scheduler is not None and self._scheduler.max_think_tokens < MAX_TOKENS:
            found.append(Limit("scheduler.max_think_tokens", self._scheduler.max_think_tokens))
        return min(found, key=lambda limit: limit.tokens, default=None)

    def check(self, params: Any, prompt: Sequence[int]) -> None:
        """Refuse a request that may think and may not stop thinking at its limit."""
        if params is None or not (params.allowed_token_ids or params.logit_bias or params.bad_words):
            return
        field = forbidding(params, self._markers.ends[0])
        if field is None or not self._may_think(params, prompt):
            return
        limit = self.of(params.extra_args or {})
        if limit is not None and limit.tokens < params.max_tokens:
            end = self._markers.model.think_end
            _refuse(
                field,
                f"forbids {end if isinstance(end, str) else end[0]!r}, which ends the thinking at {limit.tokens} "
                f"tokens ({limit.field}): expected to permit it, or max_tokens of at most {limit.tokens}",
            )

    def check_beams(self, params: Any) -> None:
        """Refuse a beam search whose thinking has a limit, by vLLM's `BeamSearchParams`."""
        asked: Mapping[str, Any] = vars(params).get(_ASKED, {})
        for key in asked.keys() & OPTIONS:
            _refuse(key, f"{asked[key]!r:.80}: has no effect with use_beam_search: expected one of the two")
        limit = self.of({key: asked[key] for key in asked.keys() & {EFFORT}})
        if limit is not None and limit.tokens < params.max_tokens:
            _refuse(
                "use_beam_search",
                f"true: thinking cannot be ended at {limit.tokens} tokens ({limit.field}) there: expected false, or "
                f"max_tokens of at most {limit.tokens}",
            )

    def _may_think(self, params: Any, prompt: Sequence[int]) -> bool:
        begins = any(forbidding(params, start) is None for start in self._markers.starts)
        return begins or Thought(self._rules, prompt).is_open


def _refuse(field: str, why: str) -> NoReturn:
    from vllm.exceptions import VLLMValidationError

    raise VLLMValidationError(f"{field}: {why}", parameter=field)


def limits_of(processor: Any) -> Limits | None:
    """The limits of the engine behind an input processor; None if Meridian ends no thinking there."""
    known = vars(processor)
    if _LIMITS not in known:
        try:
            known[_LIMITS] = _limits(processor)
        except Exception:
            logger.exception("meridian: requests for which limits of thinking cannot hold are not refused")
            known[_LIMITS] = None
    return known[_LIMITS]


def _limits(processor: Any) -> Limits | None:
    config = processor.vllm_config
    if not any(map(is_ours, config.model_config.logits_processors or ())):
        return None
    own = configured()
    # Quietly: the engine's own process logs which markers there are.
    markers = resolve(own.model, processor.tokenizer, config, quiet=True)
    if not (markers.starts and markers.ends):
        return None
    kind = config.scheduler_config.scheduler_cls
    kinds = [kind] if isinstance(kind, str) else [base.__module__ for base in getattr(kind, "__mro__", ())]
    return Limits(own, markers, plans=any(name.startswith("meridian.") for name in kinds))


def install() -> None:
    """Wrap vLLM's places, now or as soon as they are imported; calling it again changes nothing."""
    for module, (kind, method, wrapped) in _PLACES.items():
        when_imported(module, functools.partial(_wrap, kind, method, wrapped), f"no limit of thinking in {module}")


def _wrap(kind: str, method: str, wrapped: Callable[..., Any], module: ModuleType) -> None:
    own = getattr(getattr(module, kind), method)
    if hasattr(own, "meridian"):
        return
    signature = inspect.signature(own)

    def given(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return signature.bind(*args, **kwargs).arguments

    made = functools.wraps(own)(wrapped(own, given))
    vars(made)["meridian"] = own
    setattr(getattr(module, kind), method, made)


def _processing(own: Callable[..., Any], _: Any) -> Callable[..., Any]:
    """`InputProcessor.process_inputs`."""

    def processed(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = own(self, *args, **kwargs)
        limits = limits_of(self)
        if limits is not None:
            limits.check(request.sampling_params, request.prompt_token_ids or [])
        return request

    return processed


def _asking(own: Callable[..., Any], _: Any) -> Callable[..., Any]:
    """`to_beam_search_params` of a protocol, which drops the client's options."""

    def converted(self: Any, *args: Any, **kwargs: Any) -> Any:
        params = own(self, *args, **kwargs)
        effort = effort_of(self)
        vars(params)[_ASKED] = {**({} if effort is None else {EFFORT: effort}), **(self.vllm_xargs or {})}
        return params

    return converted


def _searching(own: Callable[..., Any], given: Callable[..., dict[str, Any]]) -> Callable[..., Any]:
    """`beam_search`, of a server and of `vllm.LLM`."""

    def searched(self: Any, *args: Any, **kwargs: Any) -> Any:
        engine = self.engine_client if hasattr(self, "engine_client") else self.llm_engine
        limits = limits_of(engine.input_processor)
        if limits is not None:
            limits.check_beams(given(self, *args, **kwargs)["params"])
        return own(self, *args, **kwargs)

    return searched


def _resuming(own: Callable[..., Any], given: Callable[..., dict[str, Any]]) -> Callable[..., Any]:
    """`_generate_with_builtin_tools`, which asks the engine once and after each tool."""

    async def generated(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        limits = limits_of(self.engine_client.input_processor)
        params = given(self, *args, **kwargs)["sampling_params"]
        limit = None if limits is None else limits.of(params.extra_args or {})
        async for context in own(self, *args, **kwargs):
            if limit is not None:
                # The engine has a copy of them; its next request is made from these.
                left = max(limit.tokens - context.num_reasoning_tokens, 0)
                params.extra_args = {**(params.extra_args or {}), BUDGET: left}
            yield context

    return generated


_OPENAI, _BEAMS = "vllm.entrypoints.openai", "vllm.entrypoints.generate.beam_search"
# By module: class, method and what wraps it.
_PLACES: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "vllm.v1.engine.input_processor": ("InputProcessor", "process_inputs", _processing),
    f"{_OPENAI}.completion.protocol": ("CompletionRequest", "to_beam_search_params", _asking),
    f"{_OPENAI}.chat_completion.protocol": ("ChatCompletionRequest", "to_beam_search_params", _asking),
    f"{_BEAMS}.online": ("BeamSearchOnlineMixin", "beam_search", _searching),
    f"{_BEAMS}.offline": ("BeamSearchOfflineMixin", "beam_search", _searching),
    f"{_OPENAI}.responses.serving": ("OpenAIServingResponses", "_generate_with_builtin_tools", _resuming),
}
