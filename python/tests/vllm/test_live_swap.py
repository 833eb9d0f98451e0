"""Policies that change while the real engine serves."""

import json
import threading
from pathlib import Path

import pytest
from harness import Engine, requests

SWAPS = 200


@pytest.mark.parametrize("name", ["output-first", "fcfs"])
def test_swaps_between_equal_policies_change_no_output(
    engine: Engine, stock_tokens: list[list[int]], policies: Path, name: str
) -> None:
    component = (policies / f"{name}.wasm").read_bytes()
    with engine.using(engine.native(str(policies / f"{name}.wasm"))) as native:
        serving = threading.Event()
        serving.set()
        reports: list[dict[str, object]] = []

        def swap() -> None:
            while serving.is_set():
                reports.append(json.loads(native.policies.put("dispatch", component, "active", "test")))

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


def test_what_the_host_logs_reaches_pythons_log(
    engine: Engine, policies: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine.using(engine.native("native:output-first")) as native:
        native.policies.put("dispatch", (policies / "fcfs.wasm").read_bytes(), "active", "test")
        with caplog.at_level("INFO", logger="vllm.meridian"):
            engine.generate(requests(1))
        assert "the policy of a slot was changed" in caplog.text
        assert "active=fcfs" in caplog.text.replace('"', "")
