"""Policies that change while the real engine serves."""

import json
import threading
from pathlib import Path

import pytest
from harness import KV_BLOCK_TOKENS, Engine, requests
from meridian.vllm.bench.request import TraceRequest
from test_kv import finish, send

SWAPS = 200


@pytest.mark.parametrize("name", ["output-first", "fcfs"])
def test_swaps_between_equal_policies_change_no_output(
    engine: Engine, stock_tokens: list[list[int]], policies: Path, name: str
) -> None:
    component = (policies / f"{name}.wasm").read_bytes()
    # Another version of the same: an empty custom section at its end. Equal bytes are no new version.
    versions = (component + b"\0\x02\x01x", component)
    with engine.using(engine.native(str(policies / f"{name}.wasm"))) as native:
        serving = threading.Event()
        serving.set()
        reports: list[dict[str, object]] = []

        def swap() -> None:
            while serving.is_set():
                version = versions[len(reports) % 2]
                reports.append(json.loads(native.policies.put("dispatch", version, "active", "test")))

        swapper = threading.Thread(target=swap)
        swapper.start()
        try:
            for _ in range(100):
                assert engine.generate(requests(24)) == stock_tokens
                if len(reports) >= SWAPS:
                    break
        finally:
            serving.clear()
            swapper.join()
        assert len(reports) >= SWAPS
        status = json.loads(native.policies.status())["slots"][0]
        assert status["swaps"] == len(reports)
        assert not any(count for _, count in status["faults"])
        assert native.stats()["requests"] == 0
        assert engine.scheduler._meridian is native
        native.policies.close()


def test_shadow_changes_nothing_and_is_compared(engine: Engine, stock_tokens: list[list[int]], policies: Path) -> None:
    with engine.using(engine.native("native:output-first")) as native:
        native.policies.put("dispatch", (policies / "output-first.wasm").read_bytes(), "shadow", "test")
        assert engine.generate(requests(24)) == stock_tokens
        shadow = json.loads(native.policies.status())["slots"][0]["shadow"]
        assert shadow["compared"] > 0
        assert (shadow["rank_correlation"], shadow["differences"], shadow["faults"]) == (1.0, 0, 0)
        assert native.stats()["policy_sha256"] == ""
        promoted = json.loads(native.policies.promote("dispatch"))
        assert promoted["active"]["source"] == "test"
        assert engine.generate(requests(24)) == stock_tokens


def test_swaps_of_the_eviction_slot_change_no_output_and_lose_no_block(
    engine: Engine, stock_tokens: list[list[int]], policies: Path
) -> None:
    names = ["prefix-value", "wa-lru", "noop", "tiered-lru"]
    components = [(policies / f"{name}.wasm").read_bytes() for name in names]
    assert engine.run.engine.reset_prefix_cache() is not False
    native = engine.native(
        "native:output-first",
        eviction=str(policies / "tiered-lru.wasm"),
        model={"strips_reasoning": True},
        kv_memory={"growth_blocks": 0.0},
    )
    steps = 0
    with engine.using(native):

        def swap() -> None:
            nonlocal steps
            steps += 1
            if steps % 5 == 0:
                native.policies.put("eviction", components[steps // 5 % len(components)], "active", "test")
            for hook in engine.scheduler._meridian_kv.pools:
                hook.audit()

        assert engine.generate(requests(24), swap) == stock_tokens
        slot = json.loads(native.policies.status())["slots"][1]
        assert slot["swaps"] == steps // 5 > 20
        assert not any(count for _, count in slot["faults"])
        assert sum(native.stats()["preemptions"].values()) > 0
        assert engine.scheduler._meridian is native
        native.policies.close()


def test_an_eviction_policy_that_takes_over_orders_what_is_cached(engine: Engine, policies: Path) -> None:
    chat = TraceRequest(0.0, 3 * KV_BLOCK_TOKENS + 8, 4, 4)
    assert engine.run.engine.reset_prefix_cache() is not False
    lru = str(policies / "tiered-lru.wasm")
    with engine.using(engine.native("native:output-first", eviction=lru)) as native:
        (hook,) = engine.scheduler._meridian_kv.pools

        def order() -> list[int]:
            return hook.mirror.first(100)

        engine.generate([chat])
        first = order()
        engine.generate([chat])  # the same prompt, which is found
        assert order() == first
        send(engine, "another prompt", max_tokens=8, think_tokens=4)
        finish(engine)
        second = [block for block in order() if block not in first]
        assert len(second) >= 3
        assert order() == [*first, *second], "the one longest unused goes first"
        orders: list[list[int]] = []

        def swap() -> None:
            if not orders:
                native.policies.put("eviction", (policies / "prefix-value.wasm").read_bytes(), "active", "test")
            orders.append(order())

        # It neither lets go of a block nor takes one of those that are cached.
        engine.generate([TraceRequest(0.0, 20, 4, 1)], swap)
        assert orders[0] == [*first, *second]
        assert orders[1] == [*second, *first], "what was found again stays, from the first step on"
        native.policies.close()


def test_what_the_host_logs_reaches_pythons_log(
    engine: Engine, policies: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine.using(engine.native("native:output-first")) as native:
        native.policies.put("dispatch", (policies / "fcfs.wasm").read_bytes(), "active", "test")
        with caplog.at_level("INFO", logger="vllm.meridian"):
            engine.generate(requests(1))
        assert "the policy of a slot was changed" in caplog.text
        assert "active=fcfs" in caplog.text.replace('"', "")
