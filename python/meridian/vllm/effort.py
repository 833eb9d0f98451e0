"""OpenAI's `reasoning_effort`, which is another door of a client to the budget of its thinking.

vLLM gives `reasoning_effort` to the chat template only (vllm/entrypoints/openai, `build_chat_params`). The general
plugin `meridian` therefore wraps `to_sampling_params` of the two protocols that have it, and adds
`meridian_reasoning_effort` to the request's `extra_args`. A client may also give this key in `vllm_xargs`. The
scheduler looks the effort up in the operator's table `[scheduler.reasoning_effort]`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meridian.vllm.imports import when_imported
from meridian.vllm.xargs import EFFORT, EFFORTS, RequestBudget

if TYPE_CHECKING:
    from types import ModuleType

    from meridian._tables import ReasoningEfforts

# Modules with a request that has an effort, and the request's class.
_PROTOCOLS = {
    "vllm.entrypoints.openai.chat_completion.protocol": "ChatCompletionRequest",
    "vllm.entrypoints.openai.responses.protocol": "ResponsesRequest",
}


def for_request(client: RequestBudget, extra_args: Mapping[str, Any], efforts: ReasoningEfforts) -> RequestBudget:
    """The client's options with the thresholds of its effort. Its `meridian_*` options win over the effort."""
    name = extra_args.get(EFFORT)
    if name not in EFFORTS:
        return client
    row = getattr(efforts, name)
    if client.max_think_tokens is None and row.max_think_tokens != "unchanged":
        client = replace(client, max_think_tokens=row.max_think_tokens)
    if client.min_think_tokens is None and row.min_think_tokens != "unchanged":
        client = replace(client, min_think_tokens=row.min_think_tokens)
    return client


def install() -> None:
    """Wrap the protocols, now or as soon as they are imported; calling it again changes nothing."""
    for name in _PROTOCOLS:
        when_imported(name, _wrap, "reasoning_effort has no effect on thinking budgets")


def effort_of(request: Any) -> str | None:
    """The effort that a request of the API names; None without one that OpenAI knows."""
    effort = getattr(request, "reasoning_effort", None)
    if effort is None:
        effort = getattr(getattr(request, "reasoning", None), "effort", None)
    return effort if effort in EFFORTS else None


def _wrap(module: ModuleType) -> None:
    kind = getattr(module, _PROTOCOLS[module.__name__], None)
    convert = getattr(kind, "to_sampling_params", None)
    if convert is not None and not hasattr(convert, "meridian"):
        setattr(kind, "to_sampling_params", _converting(convert))  # noqa: B010


def _converting(convert: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(convert)
    def converted(self: Any, *args: Any, **kwargs: Any) -> Any:
        params = convert(self, *args, **kwargs)
        effort = effort_of(self)
        if effort is not None and EFFORT not in (params.extra_args or {}):
            params.extra_args = {**(params.extra_args or {}), EFFORT: effort}
        return params

    vars(converted)["meridian"] = convert
    return converted
