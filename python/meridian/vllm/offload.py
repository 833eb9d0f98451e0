"""`PhaseAwareCachePolicy`: Meridian's tiers and eviction policy for vLLM's offloading connector.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config":
        {"cpu_bytes_to_use": 8589934592, "eviction_policy": "PhaseAwareCachePolicy",
         "cache_policy_module_path": "meridian.vllm"}}'

vLLM creates the policy by name (vllm/v1/kv_offload/cpu/policies/factory.py) before the scheduler is complete. The
policy therefore looks up Meridian's engine in this process on first use.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

import vllm
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from meridian import _native
from meridian.config import load_config
from meridian.vllm import kv
from meridian.vllm.markers import TokenMarkers

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey, ReqContext

# Below vLLM's own logger, whose handlers and level it shares.
logger = logging.getLogger("vllm.meridian")


_T = TypeVar("_T")


class PhaseAwareCachePolicy(CachePolicy):
    """Evicts chunks of dead thinking first, the others in the order of the eviction policy: by default, the chunk that
    was unused for longest. The `MeridianScheduler` of this process knows the dead thinking. Without that scheduler, no
    chunk is dead, and the policy is the one in the `meridian.toml` of this process.

    The `chunk_id` of a chunk is below `cache_capacity` and belongs to one chunk at a time
    (vllm/v1/kv_offload/cpu/manager.py: `_allocate_chunks`).
    """

    def __init__(self, cache_capacity: int) -> None:
        if not hasattr(CachePolicy, "on_request_finished"):
            raise RuntimeError(
                f"PhaseAwareCachePolicy: vLLM {vllm.__version__} does not say where a key stands in its prefix, "
                "expected vLLM 0.31 or newer"
            )
        super().__init__(cache_capacity)
        # In the order of insertion, which remains as the eviction order if Meridian itself fails.
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        self._keys: dict[int, OffloadKey] = {}
        # End of each chunk's prefix in tokens, from the last request that used it.
        self._tokens: dict[OffloadKey, int] = {}
        # Order of the last use of each chunk; it does not change while a transfer uses the chunk.
        self._used: dict[OffloadKey, int] = {}
        self._uses = 0
        self._order: _native.BlockPool | None = None
        self._has_failed = False
        kv.follow_ended_requests()

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        """The chunk of this key, or None."""
        return self._chunks.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext | None = None) -> None:
        """A chunk was allocated; it can go once it is ready (`mark_evictable`). vLLM 0.33 names the request too."""
        self._chunks[key] = chunk
        self._keys[chunk.chunk_id] = key
        self._use([key])
        self._tell(lambda order: order.taken([chunk.chunk_id], _now_ms()))
        if chunk.ref_cnt == 0:
            self.mark_evictable(key)

    def remove(self, key: OffloadKey) -> None:
        """Remove a chunk that could not be stored."""
        chunk = self._forget(key)
        self._tell(lambda order: order.touched([chunk.chunk_id]))

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Note chunks that vLLM is about to insert."""
        self._note_positions(keys, req_context)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Mark these chunks as the last to evict, the first of them last."""
        present = [key for key in keys if key in self._chunks]
        self._note_positions(present, req_context)
        present.reverse()
        self._use(present)
        self._leave([key for key in present if self._chunks[key].ref_cnt == 0])

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """A request has ended: note the chunks that it reused, and mark its dead thinking."""
        think_from = kv.ended_request(req_context.req_id)
        end = req_context.get_offload_key_position

        def tell(order: _native.BlockPool) -> None:
            order.matched([self._chunks[key].chunk_id for key in reused_keys if key in self._chunks], [])
            if think_from is not None:
                own = [key for key in insertion_only_keys if key in self._chunks]
                order.mark_dead([self._chunks[key].chunk_id for key in own if (end(key) or 0) > think_from])

        self._tell(tell)
        self._tell(lambda order: order.stored_chain_ends(req_context.req_id, self._ids(key_groups)))
        # One order over all groups: a prefix is lost with any group's head.
        keys = [key for group in key_groups for key in group]
        positions = [end(key) for key in keys]
        if None not in positions:
            keys.sort(key=lambda key: end(key) or 0)
        self.touch(keys, req_context)

    def on_request_access(self, keys: Iterable[OffloadKey], req_context: ReqContext, *, inserted: bool = False) -> None:
        """A request reads or stores these chunks; only vLLM 0.33 says so, before `touch` and `on_request_finished`."""
        self._note_positions([key for key in keys if key in self._chunks], req_context)

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """Evict the first `n` chunks that are not protected. Returns None without a change if there are fewer."""

        def first_to_go(order: _native.BlockPool) -> list[int]:
            order.rekey(_now_ms())
            return order.first(n + len(protected))

        first = self._tell(first_to_go)
        if first is None:
            found = [key for key, chunk in self._chunks.items() if chunk.ref_cnt == 0]
        else:
            found = [self._keys[chunk_id] for chunk_id in first if chunk_id in self._keys]
        going = [key for key in found if key not in protected][:n]
        if len(going) < n:
            return None
        self._tell(lambda order: order.taken([self._chunks[key].chunk_id for key in going], _now_ms()))
        return [(key, self._forget(key)) for key in going]

    def clear(self) -> None:
        """Forget all chunks."""
        self._chunks.clear()
        self._keys.clear()
        self._tokens.clear()
        self._used.clear()
        self._tell(lambda order: order.resync([], []))

    def mark_evictable(self, key: OffloadKey) -> None:
        """Make a chunk evictable: no transfer uses it any more."""
        self._leave([key])

    def mark_non_evictable(self, key: OffloadKey) -> None:
        """Protect a chunk that a transfer reads, because a prompt has matched it."""
        chunk_id = self._chunks[key].chunk_id

        def tell(order: _native.BlockPool) -> None:
            order.touched([chunk_id])
            order.matched([chunk_id], [])

        self._tell(tell)

    def _ids(self, key_groups: Sequence[Sequence[OffloadKey]]) -> list[int]:
        """The chunks of an ended request that are stored, head first in each group."""
        return [self._chunks[key].chunk_id for group in key_groups for key in group if key in self._chunks]

    def _use(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            self._uses += 1
            self._used[key] = self._uses

    def _leave(self, keys: list[OffloadKey]) -> None:
        chunks = [self._chunks[key].chunk_id for key in keys]

        def tell(order: _native.BlockPool) -> None:
            order.touched(chunks)
            order.leaving(chunks, [self._tokens.get(key, 0) for key in keys], _now_ms())
            order.stamp(chunks, [self._used[key] for key in keys])

        self._tell(tell)

    def _forget(self, key: OffloadKey) -> ChunkStatus:
        chunk = self._chunks.pop(key)
        self._keys.pop(chunk.chunk_id, None)
        self._tokens.pop(key, None)
        self._used.pop(key, None)
        return chunk

    def _note_positions(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        for key in keys:
            end = req_context.get_offload_key_position(key)
            if end is not None:
                self._tokens[key] = end

    def _tell(self, what: Callable[[_native.BlockPool], _T]) -> _T | None:
        """Call the native order. After a failure of Meridian itself, which must not end the engine, always None."""
        if self._has_failed:
            return None
        try:
            if self._order is None:
                engine, block_tokens = kv.engine_here() or (_engine_alone(), 1)
                self._order = engine.store(self.cache_capacity, block_tokens)
            return what(self._order)
        except kv.DEFECTS:
            self._has_failed = True
            logger.exception("meridian: PhaseAwareCachePolicy failed; from here on chunks go in the order they came")
            return None


def _engine_alone() -> _native.Engine:
    config = load_config()
    logger.warning(
        "meridian: PhaseAwareCachePolicy: no MeridianScheduler in this process, so no thinking is known to be dead "
        "(--scheduler-cls meridian.vllm.MeridianScheduler)"
    )
    return _native.Engine(config.to_json(), config.base_dir, markers=TokenMarkers(), block_tokens=1, steps_ahead=0)


def _now_ms() -> float:
    return time.monotonic() * 1e3
