"""`PhaseAwareCachePolicy` beside a real `MeridianScheduler` in one process, which knows whose thinking is dead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import KV_BLOCK_TOKENS, Engine
from meridian.vllm import kv
from meridian.vllm.bench.request import TraceRequest
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

# vLLM 0.30 does not tell where a key stands in its prefix; there the policy refuses to start (test_start.py).
pytestmark = pytest.mark.skipif(not hasattr(ReqContext, "set_offload_key_position"), reason="vLLM 0.30")
PROMPT_CHUNKS = 3
CHAT = TraceRequest(0.0, PROMPT_CHUNKS * KV_BLOCK_TOKENS + 8, 3 * KV_BLOCK_TOKENS, KV_BLOCK_TOKENS)
CHUNKS = 10


@pytest.fixture
def joined(
    engine: Engine, policies: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Engine, Any, CPUOffloadingManager]]:
    """The engine, its native part, and a manager whose policy has found it."""
    monkeypatch.setattr(kv, "_ended", None)
    assert engine.run.engine.reset_prefix_cache() is not False
    lru = str(policies / "tiered-lru.wasm")
    with engine.using(engine.native("native:output-first", eviction=lru, model={"strips_reasoning": True})) as native:
        store = CPUOffloadingManager(
            CHUNKS, cache_policy="PhaseAwareCachePolicy", cache_policy_module_path="meridian.vllm"
        )
        yield engine, native, store


def chat(engine: Engine) -> str:
    """Run one chat to its end; the engine's own name of it."""
    names: list[str] = []
    engine.generate([CHAT], lambda: names.extend(engine.scheduler.requests))
    return names[0]


def chunks(name: str, request_id: str, count: int) -> tuple[list[Any], ReqContext]:
    """Keys of a request's chunks, head first, as the connector makes them."""
    context = ReqContext(request_id)
    keys = [make_offload_key(f"{name}-{i}".encode(), 0) for i in range(count)]
    for i, key in enumerate(keys):
        context.set_offload_key_position(key, (i + 1) * KV_BLOCK_TOKENS)
    return keys, context


def store(manager: CPUOffloadingManager, keys: list[Any], context: ReqContext) -> list[Any]:
    """Store, complete and end; returns what was evicted for it."""
    prepared = manager.prepare_store(keys, context)
    assert prepared is not None
    manager.complete_store(prepared.keys_to_store, context)
    manager.on_request_finished(context)
    return list(prepared.evicted_keys)


def test_dead_thinking_of_the_engines_requests_goes_first(
    joined: tuple[Engine, Any, CPUOffloadingManager],
) -> None:
    engine, native, manager = joined
    old, old_context = chunks("old", "nobody", 3)
    store(manager, old, old_context)
    keys, context = chunks("chat", chat(engine), 7)
    store(manager, keys, context)
    # The tail first, though an older request's chunks are there; then what was used longest ago.
    evicted = store(manager, *chunks("next", "another", 6))
    assert evicted == [*reversed(keys[PROMPT_CHUNKS:]), old[2], old[1]]
    kv_stats = native.stats()["kv"]
    assert kv_stats["offload_evictions"] == {"think_complete": 4, "think_active": 2, "output_critical": 0}


def test_a_swap_of_the_eviction_slot_reaches_what_is_stored(
    joined: tuple[Engine, Any, CPUOffloadingManager], policies: Path
) -> None:
    _, native, manager = joined
    reused, reused_context = chunks("reused", "first", 5)
    store(manager, reused, reused_context)
    manager.prepare_load(reused, reused_context)
    manager.complete_load(reused, reused_context)
    once, once_context = chunks("once", "second", 5)
    store(manager, once, once_context)
    component = (policies / "prefix-value.wasm").read_bytes()
    native.policies.put("eviction", component, "active", "test")
    # Stored before the swap and judged by the policy after it: what was read again stays.
    assert store(manager, *chunks("next", "third", 4)) == [once[4], once[3], once[2], once[1]]
