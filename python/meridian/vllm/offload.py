"""`PhaseAwareCachePolicy`: the tiers and the eviction policy of Meridian for vLLM's offloading connector.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config":
        {"cpu_bytes_to_use": 8589934592, "eviction_policy": "PhaseAwareCachePolicy",
         "cache_policy_module_path": "meridian.vllm"}}'

vLLM makes the policy by name (vllm/v1/kv_offload/cpu/policies/factory.py) before the scheduler is complete, so it finds
Meridian's engine in this process when it first needs it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from meridian import _native
from meridian.config import load_config
from meridian.vllm import kv

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey, ReqContext

# Below vLLM's own logger, whose handlers and level it shares.
logger = logging.getLogger("vllm.meridian")


class PhaseAwareCachePolicy(CachePolicy):
    """Chunks of dead thinking go first, the others in the order of the eviction policy, by default the one longest
    unused. Which thinking is dead, the `MeridianScheduler` of this process knows; without one no chunk is dead, and the
    policy is that of the `meridian.toml` of this process.

    `chunk_id` of a chunk is below `cache_capacity` and belongs to one chunk at a time
    (vllm/v1/kv_offload/cpu/manager.py: `_allocate_chunks`).
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        self._keys: dict[int, OffloadKey] = {}
        # End of each chunk's prefix in tokens, from the request that was last seen with it.
        self._tokens: dict[OffloadKey, int] = {}
        self._order: _native.BlockPool | None = None
        kv.follow_ended_requests()

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        """The chunk of this key, or None."""
        return self._chunks.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus) -> None:
        """A chunk was allocated; it can go once it is ready (`mark_evictable`)."""
        self._chunks[key] = chunk
        self._keys[chunk.chunk_id] = key
        self._evictions().taken([chunk.chunk_id], _now_ms())
        if chunk.ref_cnt == 0:
            self.mark_evictable(key)

    def remove(self, key: OffloadKey) -> None:
        """A chunk could not be stored."""
        self._evictions().touched([self._forget(key).chunk_id])

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """These are the last to go now, the first of them last."""
        self._note_positions(keys := list(keys), req_context)
        order = self._evictions()
        idle = [key for key in reversed(keys) if (chunk := self._chunks.get(key)) is not None and chunk.ref_cnt == 0]
        order.touched([self._chunks[key].chunk_id for key in idle])
        self._leave(idle)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """The request has ended: what it reused was worth keeping, what it thought will not be found again."""
        order = self._evictions()
        reused = [self._chunks[key].chunk_id for key in reused_keys if key in self._chunks]
        order.matched(reused, reused)
        think_from = kv.ended_request(req_context.req_id)
        if think_from is not None:
            end = req_context.get_offload_key_position
            own = [key for key in insertion_only_keys if key in self._chunks]
            order.mark_dead([self._chunks[key].chunk_id for key in own if (end(key) or 0) > think_from])
        for keys in key_groups:
            self.touch(keys, req_context)

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """The first `n` chunks to go that are not protected; None, and nothing has changed, when there are fewer."""
        order = self._evictions()
        found = [self._keys[chunk_id] for chunk_id in order.first(n + len(protected))]
        going = [key for key in found if key not in protected][:n]
        if len(going) < n:
            return None
        order.taken([self._chunks[key].chunk_id for key in going], _now_ms())
        return [(key, self._forget(key)) for key in going]

    def clear(self) -> None:
        """Everything is gone."""
        self._chunks.clear()
        self._keys.clear()
        self._tokens.clear()
        self._evictions().resync([], [])

    def mark_evictable(self, key: OffloadKey) -> None:
        """No transfer uses the chunk any more."""
        self._leave([key])

    def mark_non_evictable(self, key: OffloadKey) -> None:
        """A transfer uses the chunk."""
        self._evictions().touched([self._chunks[key].chunk_id])

    def _leave(self, keys: list[OffloadKey]) -> None:
        chunks = [self._chunks[key].chunk_id for key in keys]
        self._evictions().leaving(chunks, [self._tokens.get(key, 0) for key in keys], _now_ms())

    def _forget(self, key: OffloadKey) -> ChunkStatus:
        chunk = self._chunks.pop(key)
        self._keys.pop(chunk.chunk_id, None)
        self._tokens.pop(key, None)
        return chunk

    def _note_positions(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        for key in keys:
            end = req_context.get_offload_key_position(key)
            if end is not None and key in self._chunks:
                self._tokens[key] = end

    def _evictions(self) -> _native.BlockPool:
        """The order in which chunks go; made when it is first needed."""
        if self._order is None:
            engine, block_tokens = kv.engine_here() or (_engine_alone(), 1)
            self._order = engine.store(self.cache_capacity, block_tokens)
        return self._order


def _engine_alone() -> _native.Engine:
    config = load_config()
    logger.warning(
        "meridian: PhaseAwareCachePolicy: no MeridianScheduler in this process, so no thinking is known to be dead "
        "(--scheduler-cls meridian.vllm.MeridianScheduler)"
    )
    return _native.Engine(
        config.to_json(), config.base_dir, starts=[], ends=[], padding=[], block_tokens=1, steps_ahead=0
    )


def _now_ms() -> float:
    return time.monotonic() * 1e3
