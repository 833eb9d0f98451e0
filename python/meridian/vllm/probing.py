"""Probes where vLLM's prefix cache cannot serve them: without prefix caching, and beside a KV connector.

There a probe takes its request's own KV blocks, as many as are full, and computes only the tokens after them. vLLM
itself shares blocks between requests by counting the references of each (vllm/v1/core/block_pool.py). A request that
waits with computed tokens skips vLLM's lookups of prefixes, local and remote (vllm/v1/core/sched/scheduler.py: the
branch for received KV).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    from meridian.vllm.seams import Seams

logger = logging.getLogger("vllm.meridian")

# The manager of blocks that hold every token's KV: those of a request stay valid as long as it has them.
_FULL_ATTENTION = "FullAttentionManager"
# What a connector is told of single requests (vllm/distributed/kv_transfer/kv_connector/v1/base.py), with its answer
# for a request that it must not see.
_OF_ONE: dict[str, Any] = {
    "on_new_request": None,
    "get_num_new_matched_tokens": (0, False),
    "update_state_after_alloc": None,
    "request_finished": (False, None),
    "request_finished_all_groups": (False, None),
    "register_finished_partial_tail": False,
}


class SharedBlocks:
    """Gives probes the KV blocks of their requests."""

    def __init__(self, scheduler: Scheduler) -> None:
        (self._blocks,) = cast("Any", scheduler.kv_cache_manager).coordinator.single_type_managers
        self._manager = scheduler.kv_cache_manager

    @staticmethod
    def are_possible(scheduler: Scheduler) -> bool:
        """Whether the blocks of this engine's requests hold the KV of all their tokens."""
        managers = cast("Any", scheduler.kv_cache_manager).coordinator.single_type_managers
        return len(managers) == 1 and type(managers[0]).__name__ == _FULL_ATTENTION

    def tokens(self, request: Request, tokens: int) -> int:
        """How many of the first `tokens` tokens of a request stand in full blocks of it."""
        held = len(self._blocks.req_to_blocks.get(request.request_id, ()))
        return min(tokens // self._blocks.block_size, held) * self._blocks.block_size

    def give(self, request: Request, probe: Request, tokens: int) -> None:
        """Give the probe the blocks of the request's first `tokens` tokens, a multiple of the block size."""
        shared = self._blocks.req_to_blocks[request.request_id][: tokens // self._blocks.block_size]
        for block in shared:
            # The request holds them too, so none of them is in the queue of free blocks.
            block.ref_cnt += 1
        self._blocks.req_to_blocks[probe.request_id] = list(shared)
        # The prefix cache knows them already, or there is none.
        self._blocks.num_cached_block[probe.request_id] = len(shared)
        probe.num_computed_tokens = tokens

    def take_back(self, probe: Request) -> None:
        """After a step that did not admit the probe."""
        self._manager.free(probe)


class HiddenFromConnector:
    """Keeps probes from a KV connector, which would store their blocks or look for them elsewhere."""

    def __init__(self, connector: Any, seams: Seams, is_probe: Callable[[str], bool]) -> None:
        self._connector = connector
        self._seams = seams
        self._hidden: dict[str, Callable[..., Any]] = {}
        for name, answer in _OF_ONE.items():
            if hasattr(connector, name):
                self._hide(name, _of_others(getattr(connector, name), answer, is_probe))
        self._hide("build_connector_meta", _without(connector.build_connector_meta, is_probe))

    def _hide(self, name: str, method: Callable[..., Any]) -> None:
        self._hidden[name] = method
        self._seams.wrap(self._connector, name, method)

    def close(self) -> None:
        """Show all requests to the connector again."""
        for name, method in self._hidden.items():
            self._seams.unwrap(self._connector, name, method)
        self._hidden.clear()


def _of_others(method: Callable[..., Any], answer: Any, is_probe: Callable[[str], bool]) -> Callable[..., Any]:
    def told(request: Request, *args: Any, **kwargs: Any) -> Any:
        return answer if is_probe(request.request_id) else method(request, *args, **kwargs)

    return told


def _without(build: Callable[..., Any], is_probe: Callable[[str], bool]) -> Callable[..., Any]:
    def built(scheduler_output: Any) -> Any:
        probes = {name for name in scheduler_output.num_scheduled_tokens if is_probe(name)}
        gone = {name for name in scheduler_output.finished_req_ids if is_probe(name)}
        if not probes and not gone:
            return build(scheduler_output)
        # A connector reads this object and keeps nothing of it, so the step's own stays as it is.
        seen = copy.copy(scheduler_output)
        seen.scheduled_new_reqs = [new for new in seen.scheduled_new_reqs if new.req_id not in probes]
        seen.num_scheduled_tokens = {
            name: tokens for name, tokens in seen.num_scheduled_tokens.items() if name not in probes
        }
        seen.total_num_scheduled_tokens = sum(seen.num_scheduled_tokens.values())
        seen.finished_req_ids = seen.finished_req_ids - gone
        return build(seen)

    return built
