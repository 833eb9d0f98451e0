"""`native:fcfs` is stock vLLM, step by step, with everything on that follows it; a swap takes over while it serves."""

from __future__ import annotations

import json
import os
import re
import socket
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import meridian
import pytest
from harness import Engine, requests

# What a step gave to whom, in order.
Step = list[tuple[str, int]]


@contextmanager
def watched_steps(engine: Engine, before_step: Callable[[int], None] = lambda step: None) -> Iterator[list[Step]]:
    """What every step gives; requests are known by their number."""
    steps: list[Step] = []
    schedule = engine.scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        before_step(len(steps))
        output = schedule(*args, **kwargs)
        steps.append([(name.partition("-")[0], tokens) for name, tokens in output.num_scheduled_tokens.items()])
        return output

    engine.scheduler.schedule = watched
    try:
        yield steps
    finally:
        del engine.scheduler.schedule


def run(engine: Engine, native: Any, before_step: Callable[[int], None] = lambda step: None) -> tuple[Any, list[Step]]:
    """Tokens and steps of the same requests from an empty cache."""
    with engine.using(native):
        assert engine.scheduler.reset_prefix_cache()
        with watched_steps(engine, before_step) as steps:
            tokens = engine.generate(requests(24))
    return tokens, steps


@pytest.fixture(scope="module")
def stock(engine: Engine) -> tuple[Any, list[Step]]:
    """What stock vLLM does; its KV memory is too small for all."""
    return run(engine, None)


def stock_config(tmp_path: Path) -> meridian.MeridianConfig:
    """`native:fcfs` with a recording, the admin interface and metrics."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return meridian.MeridianConfig(
        policy=meridian.PolicyConfig(
            # No shadow misses a step for a busy machine.
            dispatch=meridian.SlotConfig("native:fcfs", deadline_ms=1000.0),
            record_dir=str(tmp_path / "recording"),
        ),
        admin=meridian.AdminConfig(listen=f"unix:{tmp_path / 'admin.sock'}"),
        telemetry=meridian.TelemetryConfig(prometheus=f"127.0.0.1:{port}"),
    )


def test_stock_with_everything_on_is_stock(
    engine: Engine, stock: tuple[Any, list[Step]], tmp_path: Path, policies: Path
) -> None:
    from meridian.vllm.parts import make_engine

    native = make_engine(stock_config(tmp_path), engine.scheduler, serves=True)
    assert native.is_stock
    native.policies.put("dispatch", (policies / "output-first.wasm").read_bytes(), "shadow", "test")
    assert run(engine, native) == stock
    assert engine.scheduler._meridian_kv is not None, "the engine before is back"
    stats = native.stats()
    assert stats["policy"] == "fcfs"
    assert stats["requests"] == 0
    assert stats["decided_by_policy"] == stats["decisions"] == len(stock[1])
    assert stats["kv"] is None
    assert sum(stats["preemptions"].values()) > 0
    assert stats["step_time_ms"] is not None
    # The shadow has a thread of its own, and may not have come to the last step.
    seen = 0
    for _ in range(100_000):
        shadow = json.loads(native.policies.status())["slots"][0]["shadow"]
        seen = shadow["compared"] + shadow["skipped"]
        if seen == len(stock[1]):
            break
        os.sched_yield()
    assert seen == len(stock[1])
    native.policies.close()
    assert any((tmp_path / "recording").iterdir())


def test_a_stock_engine_that_nobody_watches_is_not_asked_and_counted(
    engine: Engine, stock: tuple[Any, list[Step]]
) -> None:
    native = engine.native("native:fcfs")
    assert native.is_stock
    assert not native.is_watched
    assert run(engine, native) == stock
    stats = native.stats()
    assert stats["decided_by_policy"] == stats["decisions"] == len(stock[1])
    assert stats["deciding_ms"] == 0.0


def test_a_stock_engine_is_scraped(engine: Engine, tmp_path: Path) -> None:
    from meridian.vllm.parts import make_engine

    config = stock_config(tmp_path)
    native = make_engine(config, engine.scheduler, serves=True)
    found: list[str] = []

    def scrape(step: int) -> None:
        if step == 40:
            with urllib.request.urlopen(f"http://{config.telemetry.prometheus}/metrics", timeout=10) as answer:
                found.append(answer.read().decode())

    run(engine, native, scrape)
    native.policies.close()
    thinking = re.search(r'meridian_requests\{[^}]*phase="think"[^}]*\} (\d+)', found[0])
    assert thinking is not None
    assert int(thinking[1]) > 0


def test_swaps_away_from_stock_and_back_while_it_serves(
    engine: Engine, stock: tuple[Any, list[Step]], policies: Path
) -> None:
    component = (policies / "output-first.wasm").read_bytes()
    scheduler = engine.scheduler
    seen: list[tuple[bool, bool, bool]] = []
    native = engine.native("native:fcfs")

    def change(step: int) -> None:
        if step in (20, 90):
            native.policies.put("dispatch", component, "active", "test")
        if step in (60, 120):
            native.policies.rollback("dispatch")
        if step in (19, 21, 61, 91, 121):
            kv = scheduler._meridian_kv
            wrapped = "free_blocks" in scheduler.kv_cache_manager.block_pool.__dict__
            seen.append((scheduler._meridian_stands_aside, kv is not None, wrapped))
            if kv is not None:
                for pool in kv.pools:
                    pool.audit()

    tokens, steps = run(engine, native, change)
    assert tokens == stock[0]
    assert steps[:20] == stock[1][:20]
    assert steps != stock[1]
    aside, decides = (True, False, False), (False, True, True)
    assert seen == [aside, decides, aside, decides, aside]
    stats = native.stats()
    assert stats["decisions"] == stats["decided_by_policy"] == len(steps)
    assert stats["requests"] == 0


def test_stock_again_after_a_swap_to_it(engine: Engine, stock: tuple[Any, list[Step]], policies: Path) -> None:
    native = engine.native(str(policies / "output-first.wasm"))
    assert not native.is_stock
    fcfs = engine.native("native:fcfs")
    fcfs.policies.put("dispatch", (policies / "output-first.wasm").read_bytes(), "active", "test")
    assert not fcfs.is_stock
    fcfs.policies.rollback("dispatch")
    assert run(engine, fcfs) == stock


def test_other_slots_have_a_say_only_when_somebody_asks(engine: Engine, hostile: Path) -> None:
    native = engine.native("native:fcfs")
    native.policies.put("eviction", (hostile / "rank.wasm").read_bytes(), "active", "test")
    assert not native.is_stock
    native.policies.rollback("eviction")
    assert native.is_stock
    assert not engine.native("native:fcfs", eviction="native:wa-lru").is_stock
    assert not engine.native("native:fcfs", kv_memory={"growth_blocks": 2.0}).is_stock


def test_a_policy_in_shadow_leaves_vllms_order(engine: Engine, stock: tuple[Any, list[Step]]) -> None:
    from meridian.vllm.parts import make_engine

    def in_shadow(source: str) -> meridian.SlotConfig:
        return meridian.SlotConfig(source, mode="shadow", deadline_ms=1000.0)

    policy = meridian.PolicyConfig(
        dispatch=in_shadow("native:balanced"), eviction=in_shadow("native:ttl"), budget=in_shadow("native:patience")
    )
    native = make_engine(meridian.MeridianConfig(policy=policy), engine.scheduler)
    assert native.is_stock
    tokens, steps = run(engine, native)
    assert (tokens, steps) == stock
    stats = native.stats()
    assert (stats["policy"], stats["decisions"]) == ("fcfs", len(steps))
    slot = json.loads(native.policies.status())["slots"][0]
    assert slot["shadow"]["version"]["name"] == "balanced"
    assert slot["shadow"]["compared"] + slot["shadow"]["skipped"] == len(steps)
    # One command to switch, and one to go back.
    native.policies.promote("dispatch")
    assert not native.is_stock
    native.policies.rollback("dispatch")
    assert native.is_stock
