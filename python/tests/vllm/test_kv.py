"""KV memory in the real engine: what is dead goes first, what is not stays, and whoever must go is chosen by phase."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from defects import PassesOn
from harness import KV_BLOCK_TOKENS, Engine, requests
from meridian.vllm.bench.probe import SchedulerProbe
from meridian.vllm.bench.request import TraceRequest
from meridian.vllm.kv import KvHook
from pool_soak import KINDS, Soak

STRIPS = {"strips_reasoning": True}
# A prompt of 3 blocks and a bit, thinking of 3 more, an answer of one.
CHAT = TraceRequest(0.0, 3 * KV_BLOCK_TOKENS + 8, 3 * KV_BLOCK_TOKENS, KV_BLOCK_TOKENS)


def pool_of(engine: Engine) -> Any:
    return engine.scheduler.kv_cache_manager.block_pool


def cached_blocks(engine: Engine) -> list[int]:
    """Tokens of the prefix that each cached block ends, in the order in which vLLM's queue hands them out."""
    free = pool_of(engine).free_block_queue.get_all_free_blocks()
    return [block.block_hash_num_tokens for block in free if block.block_hash is not None]


def empty_come_first(engine: Engine) -> bool:
    free = [block.block_hash is None for block in pool_of(engine).free_block_queue.get_all_free_blocks()]
    return free == sorted(free, reverse=True)


@pytest.mark.parametrize("kept", [False, True])
def test_thinking_that_is_stripped_leaves_with_its_request(clean: Engine, kept: bool) -> None:
    with clean.using(clean.native("native:output-first", model={"strips_reasoning": not kept})) as native:
        clean.generate([CHAT])
        total = CHAT.prompt_tokens + CHAT.think_tokens + CHAT.output_tokens
        full = total // KV_BLOCK_TOKENS
        expected = full if kept else CHAT.prompt_tokens // KV_BLOCK_TOKENS
        # The tail of a chain goes before its head.
        assert cached_blocks(clean) == [KV_BLOCK_TOKENS * i for i in range(expected, 0, -1)]
        assert empty_come_first(clean)
        evicted = native.stats()["kv"]["evictions"]["think_complete"]
        assert evicted == (0 if kept else full - expected)


def test_a_conversation_finds_its_prompts_again(clean: Engine) -> None:
    with clean.using(clean.native("native:output-first", model=STRIPS)) as native:
        clean.generate([CHAT])
        clean.generate([CHAT])  # the same prompt: seeded
        kv = native.stats()["kv"]
        assert kv["hit_tokens"]["prefill"] == CHAT.prompt_tokens // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
        assert kv["hit_tokens"]["think"] == kv["hit_tokens"]["output"] == 0


def send(
    engine: Engine, name: str, *, max_tokens: int, extra: dict[str, Any] | None = None, think_tokens: int | None = 40
) -> str:
    """A request that thinks so long, or to its end, and then answers."""
    from vllm import SamplingParams

    rng = random.Random(3)
    body = [rng.choice(engine.run.vocabulary) for _ in range(3 * KV_BLOCK_TOKENS)]
    params = SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        max_tokens=max_tokens,
        extra_args=extra,
        thinking_token_budget=think_tokens,
    )
    return engine.run.engine.add_request(name, {"prompt_token_ids": [*body, *engine.run.template.tail]}, params)


def finish(engine: Engine) -> None:
    while engine.run.engine.has_unfinished_requests():
        engine.run.engine.step()


@pytest.mark.parametrize("flag", [True, 1])
def test_a_client_may_say_that_it_sends_its_thinking_back(clean: Engine, flag: object) -> None:
    with clean.using(clean.native("native:output-first", model=STRIPS)):
        send(clean, "kept", max_tokens=80, extra={"meridian_keep_thinking": flag})
        finish(clean)
        assert max(cached_blocks(clean)) > 4 * KV_BLOCK_TOKENS


@pytest.mark.parametrize("flag", ["yes", None, [1], 0, False])
def test_what_does_not_make_sense_counts_as_not_said(clean: Engine, flag: object) -> None:
    with clean.using(clean.native("native:output-first", model=STRIPS)):
        send(clean, "odd", max_tokens=80, extra={"meridian_keep_thinking": flag})
        finish(clean)
        assert max(cached_blocks(clean)) == 3 * KV_BLOCK_TOKENS


def test_a_turn_that_calls_a_tool_keeps_its_thinking(clean: Engine) -> None:
    with clean.using(clean.native("native:output-first", model=STRIPS)):
        send(clean, "first", max_tokens=80)
        generated: list[int] = []
        while clean.run.engine.has_unfinished_requests():
            live = list(clean.scheduler.requests.values())
            clean.run.engine.step()
            generated = list(live[0].output_token_ids)
        assert max(cached_blocks(clean)) == 3 * KV_BLOCK_TOKENS
    # The same tokens again, two of which now begin a tool call.
    native = clean.native("native:output-first", model=STRIPS)
    with clean.using(native):
        hook = clean.scheduler._meridian_kv
        hook._tool_calls = [[generated[40], generated[41]]]
        send(clean, "again", max_tokens=80)
        finish(clean)
        assert max(cached_blocks(clean)) > 4 * KV_BLOCK_TOKENS


def test_thinking_that_was_cut_off_may_be_continued(clean: Engine) -> None:
    with clean.using(clean.native("native:output-first", model=STRIPS)):
        send(clean, "cut-off", max_tokens=80, think_tokens=None)
        finish(clean)
        assert max(cached_blocks(clean)) > 4 * KV_BLOCK_TOKENS


def test_aborted_thinking_is_dead_too(clean: Engine) -> None:
    with clean.using(clean.native("native:output-first", model=STRIPS)) as native:
        request_id = send(clean, "aborted", max_tokens=300, think_tokens=None)
        for _ in range(3 * KV_BLOCK_TOKENS):
            clean.run.engine.step()
        clean.run.engine.abort_request([request_id], internal=True)
        finish(clean)
        assert max(cached_blocks(clean)) == 3 * KV_BLOCK_TOKENS
        assert native.stats()["kv"]["evictions"]["think_complete"] > 0


def test_told_not_to_it_leaves_thinking_alone(clean: Engine) -> None:
    native = clean.native("native:output-first", model=STRIPS, kv_memory={"evict_dead_thinking": False})
    with clean.using(native):
        send(clean, "kept", max_tokens=80)
        finish(clean)
        assert max(cached_blocks(clean)) > 4 * KV_BLOCK_TOKENS


@pytest.mark.parametrize("eviction", ["native:tiered-lru", "native:wa-lru", "prefix-value.wasm", "wa-lru.wasm"])
def test_answers_are_not_preempted_and_no_token_changes(
    clean: Engine, stock_tokens: list[list[int]], policies: Path, eviction: str
) -> None:
    source = str(policies / eviction) if eviction.endswith(".wasm") else eviction
    native = clean.native("native:output-first", eviction=source, model=STRIPS, kv_memory={"growth_blocks": 0.0})
    with clean.using(native):
        probe = SchedulerProbe(clean.scheduler, clean.run.seen)
        try:
            assert clean.generate(requests(24)) == stock_tokens
        finally:
            del clean.scheduler.schedule, clean.scheduler._preempt_request
        stats = native.stats()
        assert sum(stats["preemptions"].values()) == sum(probe.preemptions.values()) > 0
        assert stats["kv"]["avoidable_output_preemptions"] == probe.output_preempted_while_think_held == 0
        # What the probe counts on the scheduler, the engine's own statistics say too.
        assert stats["kv"]["recomputed_tokens"] == probe.recomputed_tokens
        assert clean.scheduler._meridian is native
        for hook in clean.scheduler._meridian_kv.pools:
            hook.audit()


def test_room_to_grow_saves_preemptions(clean: Engine, stock_tokens: list[list[int]]) -> None:
    def preemptions(growth_blocks: float) -> int:
        native = clean.native("native:output-first", kv_memory={"growth_blocks": growth_blocks})
        with clean.using(native):
            assert clean.generate(requests(24)) == stock_tokens
            assert clean.scheduler.kv_cache_manager.watermark_blocks == 0, "given back after each step"
            return sum(native.stats()["preemptions"].values())

    assert preemptions(2.0) < preemptions(0.0)


def test_nothing_of_the_hook_is_left(clean: Engine) -> None:
    manager = clean.scheduler.kv_cache_manager
    with clean.using(clean.native("native:output-first")):
        assert "free_blocks" in pool_of(clean).__dict__
        clean.scheduler._meridian_kv.admission_begins()
        assert "allocate_slots" in manager.__dict__
    with clean.using(None):
        assert not {"free_blocks", "get_new_blocks", "touch", "evict_blocks", "reset_prefix_cache"} & set(
            pool_of(clean).__dict__
        )
        assert "allocate_slots" not in manager.__dict__


def test_allocations_are_wrapped_only_while_requests_are_admitted(clean: Engine) -> None:
    manager = clean.scheduler.kv_cache_manager
    from vllm.v1.request import RequestStatus

    own = type(manager).allocate_slots
    wrapped: list[tuple[bool, bool]] = []

    def allocate(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        wrapped.append((request.status is RequestStatus.RUNNING, "allocate_slots" in vars(self)))
        return own(self, request, *args, **kwargs)

    with clean.using(clean.native("native:output-first")), mock.patch.object(type(manager), "allocate_slots", allocate):
        clean.generate([TraceRequest(0.0, 20, 20, 10)])
    # One request has more free blocks than it could take.
    assert Counter(wrapped) == {(False, True): 1, (True, False): len(wrapped) - 1}
    assert len(wrapped) > 20


def test_a_wrapper_around_the_hooks_own_stays_and_passes_calls_on(clean: Engine) -> None:
    manager = clean.scheduler.kv_cache_manager
    calls = 0
    with clean.using(clean.native("native:output-first")):
        kv = clean.scheduler._meridian_kv
        kv.admission_begins()
        inner = manager.allocate_slots

        def outer(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return inner(*args, **kwargs)

        manager.allocate_slots = outer
        kv.step_ends()
        clean.generate([TraceRequest(0.0, 20, 8, 8)] * 3)
        assert clean.scheduler._meridian is not None, "Meridian gave up"
    assert calls > 20
    assert manager.allocate_slots is outer
    del manager.allocate_slots


@pytest.mark.parametrize("method", ["leaving", "choose", "taken", "touched", "mark_dead", "victim", "think_from"])
def test_a_defect_in_the_hook_leaves_stock_vllm(
    clean: Engine, stock_tokens: list[list[int]], caplog: pytest.LogCaptureFixture, method: str
) -> None:
    class Broken(PassesOn):
        """Passes everything on but one call."""

        def __getattr__(self, name: str) -> Any:
            if name == method:
                raise RuntimeError(f"{method} is broken")
            return super().__getattr__(name)

    native = clean.native("native:output-first", model=STRIPS, kv_memory={"growth_blocks": 0.0})
    with clean.using(native), caplog.at_level(logging.ERROR, logger="vllm.meridian"):
        hook = clean.scheduler._meridian_kv
        hook.engine = Broken(hook.engine)
        for pool in hook.pools:
            pool.mirror = Broken(pool.mirror)
        assert clean.generate(requests(24)) == stock_tokens
        assert clean.scheduler._meridian is None
        assert clean.scheduler._meridian_kv is None
        assert f"{method} is broken" in caplog.text
        assert "free_blocks" not in pool_of(clean).__dict__


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("eviction", ["native:tiered-lru", "prefix-value.wasm"])
@pytest.mark.parametrize(("connector", "together"), [(None, False), (None, True), ("some", False)])
def test_the_pools_invariants_hold(kind: str, eviction: str, connector: object, together: bool, policies: Path) -> None:
    source = str(policies / eviction) if eviction.endswith(".wasm") else eviction
    soak = Soak(seed=1, kind=kind, eviction=source, connector=connector, together=together)
    soak.run(600)
    assert soak.violations == []
    assert soak.preempted > 20
    kv = soak.engine.stats()["kv"]
    assert kv is not None
    assert kv["evictions"]["think_complete"] > 100
    # Once at the start, and once for each reset of the cache; the mirror was never found to be wrong.
    assert kv["resyncs"] == 1 + soak.resets
    # With a connector, dead thinking stays in the cache and is put to the front when it is wanted.
    assert (kv["moved_blocks"] > 0) == (eviction != "native:tiered-lru" or connector is not None)


@pytest.mark.parametrize("forgotten", ["touched", "taken", "emptied"])
def test_the_soak_finds_a_mirror_that_is_wrong(forgotten: str) -> None:
    soak = Soak(seed=2)

    class Deaf(PassesOn):
        def __getattr__(self, name: str) -> Any:
            return (lambda *_: 0) if name == forgotten else super().__getattr__(name)

    soak.hook.engine = PassesOn(soak.engine)  # type: ignore[assignment]
    for hook in soak.hook.pools:
        hook.mirror = Deaf(hook.mirror)  # type: ignore[assignment]
    soak.run(300)
    kv = soak.engine.stats()["kv"]
    assert kv is not None
    # Found by the recount, or mended at the next allocation because the numbers of free blocks differ.
    assert soak.violations or kv["resyncs"] > 1 + soak.resets


@pytest.mark.parametrize("eviction", ["native:prefix-value", "native:t-lru", "native:cost-aware"])
def test_looking_ahead_hands_out_the_blocks_of_a_choice_at_each_allocation(
    eviction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A choice made ahead is never used after the order of eviction may have changed."""

    def handed_out(ahead: bool) -> list[list[int]]:
        soak = Soak(seed=6, blocks=96, eviction=eviction, together=True, check=False)
        clock = SimpleNamespace(monotonic=lambda: float(soak.steps), perf_counter_ns=time.perf_counter_ns)
        monkeypatch.setattr("meridian.vllm.kv.time", clock)
        monkeypatch.setattr("pool_soak.time", clock)
        (hook,) = soak.hook.pools
        allocated = []
        allocate = soak.pool.get_new_blocks

        def allocating(num_blocks: int) -> Any:
            if not ahead:
                hook.in_step = hook._in_last_step = hook._ready = 0
            blocks = allocate(num_blocks)
            allocated.append([block.block_id for block in blocks])
            return blocks

        soak.pool.get_new_blocks = allocating
        soak.run(400)
        assert soak.violations == []
        return allocated

    assert handed_out(True) == handed_out(False)


def test_dead_thinking_first_finds_more_prompts() -> None:
    """The same requests with and without Meridian: hits are never fewer, and more where memory is tight."""

    def hits(attached: bool) -> float:
        soaks = [Soak(seed=seed, blocks=64, attached=attached, check=False) for seed in range(3, 9)]
        for soak in soaks:
            soak.run(1500)
        return sum(soak.matched_tokens for soak in soaks) / sum(soak.prompt_tokens for soak in soaks)

    assert hits(True) > hits(False)


def test_without_prefix_caching_no_pool_is_touched() -> None:
    soak = Soak(seed=5, caching=False)
    assert soak.hook.pools == []
    assert "free_blocks" not in soak.pool.__dict__
    soak.run(100)
    assert soak.violations == []


def test_blocks_of_prompts_are_those_of_a_whole_count() -> None:
    """With several priorities, while requests are admitted, and in the next step when some have left."""
    running: list[Any] = []
    manager = SimpleNamespace(block_size=32, req_to_blocks={})
    blocks = SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=(manager,)))
    hook: Any = object.__new__(KvHook)
    hook._scheduler = SimpleNamespace(running=running, kv_cache_manager=blocks)
    hook._preempts_the_last, hook._missing_blocks, hook._counted = False, Counter(), 0

    def whole(priority: int | None) -> int:
        prompts = [r for r in running if r.num_tokens - r.num_computed_tokens > 1]
        urgent = [r for r in prompts if priority is None or r.priority <= priority]
        return sum(max(-(-r.num_tokens // 32) - len(manager.req_to_blocks[r.request_id]), 0) for r in urgent)

    rng = random.Random(1)
    for step in range(20):
        hook.step_begins(1)
        for i in range(rng.randint(1, 5)):
            tokens = rng.randint(1, 500)
            computed = rng.choice([0, tokens - 1, rng.randint(0, tokens)])
            name = f"{step}-{i}"
            facts = {"num_tokens": tokens, "num_computed_tokens": computed, "priority": rng.randint(-1, 1)}
            running.append(SimpleNamespace(request_id=name, **facts))
            manager.req_to_blocks[name] = [None] * rng.randint(0, -(-tokens // 32))
            for priority in (None, -1, 0, 1):
                assert hook._prompt_blocks(running, priority) == whole(priority)
        del running[:: rng.randint(2, 4)]
