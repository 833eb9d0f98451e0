"""`PhaseAwareCachePolicy` in vLLM's real `CPUOffloadingManager`. Transfers are only told: moving bytes needs a GPU
(vllm/v1/kv_offload/cpu/spec.py refuses CPU-only platforms)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from meridian.vllm import kv
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

# vLLM 0.30 does not tell where a key stands in its prefix; there the policy refuses to start (test_start.py).
pytestmark = pytest.mark.skipif(not hasattr(ReqContext, "set_offload_key_position"), reason="vLLM 0.30")
CHUNK_TOKENS = 16
CHUNKS = 8


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """No scheduler in this process, and no meridian.toml."""
    monkeypatch.setattr(kv, "_attached", None)
    monkeypatch.setattr(kv, "_ended", None)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MERIDIAN_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)


def manager(policy: str = "PhaseAwareCachePolicy", chunks: int = CHUNKS) -> CPUOffloadingManager:
    return CPUOffloadingManager(
        chunks, cache_policy=policy, cache_policy_module_path="meridian.vllm" if policy[0].isupper() else None
    )


def chain(name: str, chunks: int, request_id: str | None = None) -> tuple[list[Any], ReqContext]:
    """Keys of a request's chunks, head first, and its context."""
    context = ReqContext(request_id or name)
    keys = [make_offload_key(f"{name}-{i}".encode(), 0) for i in range(chunks)]
    for i, key in enumerate(keys):
        context.set_offload_key_position(key, (i + 1) * CHUNK_TOKENS)
    return keys, context


def store(m: CPUOffloadingManager, keys: list[Any], context: ReqContext) -> list[Any]:
    """Store and complete; returns what was evicted for it."""
    prepared = m.prepare_store(keys, context)
    assert prepared is not None
    m.complete_store(prepared.keys_to_store, context)
    return list(prepared.evicted_keys)


def test_dead_thinking_goes_first() -> None:
    m = manager()
    old, old_context = chain("old", 3)
    store(m, old, old_context)
    m.on_request_finished(old_context)
    new, new_context = chain("new", 5)
    store(m, new, new_context)
    # Told by the scheduler when the request ended: its first two chunks are prompt.
    assert kv._ended is not None
    kv._ended["new"] = 2 * CHUNK_TOKENS
    m.on_request_finished(new_context)
    assert kv.ended_request("new") is None, "asked once"
    evicted = store(m, *chain("next", 3))
    assert evicted == [new[4], new[3], new[2]], "the tail first, though older chunks are there"
    assert store(m, *chain("after", 2)) == [old[2], old[1]], "then the one longest unused"


def test_both_signatures_of_vllm_are_taken() -> None:
    """vLLM 0.33 names the request when it inserts a chunk, and says which chunks a request reads or stores."""
    m = manager()
    policy: Any = m._policy
    keys, context = chain("new", 2)
    store(m, keys, context)
    chunk = policy.get(keys[1])
    policy.remove(keys[1])
    policy.insert(keys[1], chunk, context)
    policy.on_request_access(keys, context)
    policy.on_request_access(keys, context, inserted=True)
    assert [policy.get(key) is not None for key in keys] == [True, True]


def test_without_a_scheduler_it_is_least_recently_used() -> None:
    """The same random traffic through vLLM's own LRU: the same chunks are evicted, in the same order."""
    rng = random.Random(0)
    ours, theirs = manager(chunks=24), manager("lru", chunks=24)
    evictions = 0
    for step in range(600):
        name = f"chat-{rng.randrange(8)}"
        length = rng.randint(1, 8)
        evicted = []
        for m in (ours, theirs):
            keys, context = chain(name, length, f"{name}-{step}")
            prepared = m.prepare_store(keys, context)
            assert prepared is not None
            m.complete_store(prepared.keys_to_store, context)
            m.on_request_finished(context)
            evicted.append(prepared.evicted_keys)
        assert evicted[0] == evicted[1], f"step {step}"
        evictions += len(evicted[0])
    assert evictions > 200


def test_recency_is_not_when_a_transfer_ended() -> None:
    """The last store of a request is under way when it ends, and completes from head to tail."""
    m = manager(chunks=4)
    keys, context = chain("late", 4)
    prepared = m.prepare_store(keys, context)
    assert prepared is not None
    m.on_request_finished(context)
    for key in keys:
        m.complete_store([key], context)
    assert store(m, *chain("next", 2)) == [keys[3], keys[2]]


def test_a_defect_does_not_end_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    m = manager()
    keys, context = chain("first", CHUNKS)
    store(m, keys, context)
    policy: Any = m._policy
    policy._order = None
    policy.cache_capacity = "not a number"
    evicted = store(m, *chain("next", 2))
    assert evicted == keys[:2]
    assert "PhaseAwareCachePolicy failed" in caplog.text
    for _ in random_traffic(m, 9):
        assert len(policy._chunks) <= CHUNKS


def test_what_a_transfer_uses_stays() -> None:
    m = manager()
    keys, context = chain("read", CHUNKS)
    store(m, keys, context)
    m.prepare_load(keys[:5], context)
    assert m.prepare_store(chain("too-much", 4)[0], chain("too-much", 4)[1]) is None
    evicted = store(m, *chain("fits", 3))
    assert set(evicted) == set(keys[5:])
    m.complete_load(keys[:5], context)
    assert set(store(m, *chain("later", 8))) <= set(keys[:5]) | set(chain("fits", 3)[0])


def test_a_store_that_failed_leaves_nothing() -> None:
    m = manager()
    keys, context = chain("failed", 4)
    prepared = m.prepare_store(keys, context)
    assert prepared is not None
    m.complete_store(keys, context, success=False)
    store(m, *chain("next", CHUNKS))
    assert all(m._policy.get(key) is None for key in keys)


def test_eviction_is_all_or_nothing_and_spares_the_protected() -> None:
    m = manager()
    keys, context = chain("kept", CHUNKS)
    store(m, keys, context)
    policy = m._policy
    assert policy.evict(1, set(keys)) is None
    assert policy.evict(CHUNKS, {keys[0]}) is None
    assert all(policy.get(key) is not None for key in keys)
    going = policy.evict(2, {keys[0], keys[1]})
    assert going is not None
    assert len({key for key, _ in going} - {keys[0], keys[1]}) == 2
    assert policy.evict(0, set()) == []


def test_a_reset_forgets_everything() -> None:
    m = manager()
    keys, context = chain("gone", CHUNKS)
    store(m, keys, context)
    m.reset_cache()
    assert all(m._policy.get(key) is None for key in keys)
    assert store(m, *chain("fresh", CHUNKS)) == []


def random_traffic(m: CPUOffloadingManager, seed: int) -> Iterator[None]:
    """Stores, loads and ends of requests as the connector orders them."""
    rng = random.Random(seed)
    loading: list[tuple[list[Any], ReqContext]] = []
    for step in range(500):
        keys, context = chain(f"chat-{rng.randrange(6)}", rng.randint(1, 6), f"{step}")
        ready = [key for key in keys if (chunk := m._policy.get(key)) is not None and chunk.is_ready]
        if ready and rng.random() < 0.3:
            m.prepare_load(ready, context)
            loading.append((ready, context))
        prepared = m.prepare_store(keys, context)
        if prepared is not None:
            m.complete_store(prepared.keys_to_store, context, success=rng.random() < 0.9)
        if rng.random() < 0.8:
            if kv._ended is not None and rng.random() < 0.5:
                kv._ended[str(step)] = rng.randint(0, 6) * CHUNK_TOKENS
            m.on_request_finished(context)
        if loading and rng.random() < 0.5:
            m.complete_load(*loading.pop(rng.randrange(len(loading))))
        yield


@pytest.mark.parametrize("seed", range(4))
def test_the_managers_counts_hold(seed: int) -> None:
    m = manager(chunks=16)
    for _ in random_traffic(m, seed):
        policy: Any = m._policy
        idle = [key for key, chunk in policy._chunks.items() if chunk.ref_cnt == 0]
        assert len(idle) == m._num_evictable_cache_chunks
        assert not policy._has_failed
        order = policy._order.first(100)
        assert sorted(order) == sorted(policy._chunks[key].chunk_id for key in idle)
        assert len({chunk.chunk_id for chunk in policy._chunks.values()}) == len(policy._chunks) <= 16
