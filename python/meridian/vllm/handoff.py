"""`HandoffConnector`: vLLM's NIXL connector for a request that thinks in one engine and answers in another.

vllm serve MODEL --kv-transfer-config '{"kv_connector": "HandoffConnector", "kv_role": "kv_both",
    "kv_connector_module_path": "meridian.vllm.handoff", "kv_load_failure_policy": "recompute"}'

vLLM's own connector hands over a prompt: all its tokens are computed when the first engine ends. A request that stops
at the end of its thinking is different. Its last token was sampled and never computed, so the second engine pulls one
token less and computes that token itself. vLLM also shows a client the parameters of a transfer only without streaming.
Here they are the `stop_reason` of the last chunk, in JSON, for requests that ask for it with
`"kv_transfer_params": {"do_remote_decode": true, "meridian_handoff": {"min_blocks": 4, "max_blocks": 4096}}`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

# The field of `kv_transfer_params` that asks for a handoff, and that marks the answer to it.
HANDOFF = "meridian_handoff"
# How long NIXL's progress thread waits for an event on a CPU, microseconds; it wakes at once when there is one.
_PROGRESS_US = 1000


class HandoffScheduler(NixlPullConnectorScheduler):
    """The part in vLLM's scheduler."""

    def _prefill_backoff(self) -> int:
        # The engine that answers computes the last token of the prompt, the end of thinking.
        return max(1, super()._prefill_backoff())

    def _truncate_request_for_prefill(self, request: Request) -> None:
        # The engine that thinks generates tokens; it must neither lose one of its prompt nor end after one.
        if not _is_handoff(request):
            super()._truncate_request_for_prefill(request)

    def request_finished(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        if not _is_handoff(request):
            return super().request_finished(request, block_ids)
        # Later tokens may have been scheduled already; only these are computed for certain.
        computed = min(request.num_computed_tokens, request.num_tokens - 1)
        blocks = -(-computed // self.block_size)
        stop_token = request.stop_reason
        has_thought = request.status == RequestStatus.FINISHED_STOPPED and isinstance(stop_token, int)
        if not has_thought or not _limit(request, "min_blocks", 1) <= blocks <= _limit(request, "max_blocks", blocks):
            self._reqs_not_processed.add(request.request_id)
            return False, None
        delays, params = super().request_finished(request, tuple(group[:blocks] for group in block_ids))
        if params is not None:
            params["remote_num_tokens"] = computed
            request.stop_reason = json.dumps({HANDOFF: {"stop_token": stop_token}, **params})
        return delays, params


class HandoffConnector(NixlPullConnector):
    """The connector, for models with full attention in every layer.

    Raises:
        ValueError: the model has layers whose KV blocks cannot be handed over in part.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        with _set_up_for_cpu() if role == KVConnectorRole.WORKER and current_platform.is_cpu() else nullcontext():
            super().__init__(vllm_config, role, kv_cache_config)
        for group in kv_cache_config.transfer_groups:
            if not isinstance(group.kv_cache_spec, FullAttentionSpec):
                kind = type(group.kv_cache_spec).__name__
                raise ValueError(f"HandoffConnector: KV cache of {kind}, expected full attention in every layer")
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = HandoffScheduler(vllm_config, self.engine_id, kv_cache_config)


@contextmanager
def _set_up_for_cpu() -> Iterator[None]:
    """Keep this thread on its cores, and let the progress thread of a NIXL agent sleep, if one is made meanwhile.

    vLLM reserves the last core of each memory node for `start_load_kv`, and moves the calling thread there
    (`NixlBaseConnectorWorker`). That thread also computes the model, so engines with cores of their own would all
    compute on that one. NIXL's Python interface lets the progress thread poll without a pause (`nixl_agent` sets
    `pthrDelay` to 0); that takes a core, or half of one that it shares.
    """
    cores = os.sched_getaffinity(0)
    try:
        bindings = import_module("nixl._api").nixlBind
    except ImportError:
        # vLLM says what is missing.
        yield
        return
    config = bindings.nixlAgentConfig

    class Patient(config):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, _PROGRESS_US if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = Patient
    try:
        yield
    finally:
        bindings.nixlAgentConfig = config
        os.sched_setaffinity(0, cores)


def _asked(request: Request) -> Any:
    return (request.kv_transfer_params or {}).get(HANDOFF)


def _is_handoff(request: Request) -> bool:
    return isinstance(_asked(request), dict) and bool((request.kv_transfer_params or {}).get("do_remote_decode"))


def _limit(request: Request, name: str, default: int) -> int:
    """The client's limit of this name; the default when it is no number."""
    limit = _asked(request).get(name, default)
    return limit if isinstance(limit, int) else default
