"""Other doors of a client to the budget of its thinking: OpenAI's `reasoning_effort`, vLLM's `thinking_token_budget`.

vLLM gives `reasoning_effort` to the chat template only (vllm/entrypoints/openai, `build_chat_params`). The general
plugin `meridian` therefore wraps `to_sampling_params` of the two protocols that have it, and adds
`meridian_reasoning_effort` to the request's `extra_args`. A client may also give this key in `vllm_xargs`. The
scheduler looks the effort up in the operator's table `[scheduler.reasoning_effort]`.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meridian.vllm.xargs import EFFORT, EFFORTS, NO_LIMIT, RequestBudget

if TYPE_CHECKING:
    from types import ModuleType

    from meridian._tables import ReasoningEfforts

logger = logging.getLogger("vllm.meridian")

# Modules with a request that has an effort, and the request's class.
_PROTOCOLS = {
    "vllm.entrypoints.openai.chat_completion.protocol": "ChatCompletionRequest",
    "vllm.entrypoints.openai.responses.protocol": "ResponsesRequest",
}


def for_request(
    client: RequestBudget, extra_args: Mapping[str, Any], params: Any, efforts: ReasoningEfforts
) -> RequestBudget:
    """The client's options with `thinking_token_budget` and the thresholds of its effort. Its `meridian_*` options win
    over the effort; of two limits that it names itself, the one that is reached first holds."""
    own = getattr(params, "thinking_token_budget", None)
    if isinstance(own, int) and own >= 0:
        # vLLM's budget may be larger than any limit of Meridian.
        client = replace(client, max_thought_tokens=min(own, NO_LIMIT - 1))
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
    """Wrap the protocols, now or as soon as they are imported; calling it again changes nothing. It must not raise."""
    for name in _PROTOCOLS:
        module = sys.modules.get(name)
        if module is not None:
            _wrap(module)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path) and not _PROTOCOLS.keys() <= sys.modules.keys():
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Wraps a protocol after its import: a worker or an engine process never imports it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec of the other finders, with a loader that wraps."""
        if name not in _PROTOCOLS:
            return None
        spec = None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec = find(name, path, target)
            if spec is not None:
                break
        loader = None if spec is None else spec.loader
        if loader is None:
            return spec
        run = loader.exec_module

        def executed(module: ModuleType) -> None:
            run(module)
            _wrap(module)

        vars(loader)["exec_module"] = executed
        return spec


def _wrap(module: ModuleType) -> None:
    try:
        kind = getattr(module, _PROTOCOLS[module.__name__], None)
        convert = getattr(kind, "to_sampling_params", None)
        if convert is None or hasattr(convert, "meridian"):
            return
        setattr(kind, "to_sampling_params", _converting(convert))  # noqa: B010
    except Exception:
        logger.warning("meridian: reasoning_effort has no effect on thinking budgets", exc_info=True)


def _converting(convert: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(convert)
    def converted(self: Any, *args: Any, **kwargs: Any) -> Any:
        params = convert(self, *args, **kwargs)
        effort = getattr(self, "reasoning_effort", None)
        if effort is None:
            effort = getattr(getattr(self, "reasoning", None), "effort", None)
        if effort in EFFORTS and EFFORT not in (params.extra_args or {}):
            params.extra_args = {**(params.extra_args or {}), EFFORT: effort}
        return params

    vars(converted)["meridian"] = convert
    return converted
