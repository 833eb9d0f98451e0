"""Forced endings in the real engine, to the token: `checks/engine/forced_ends.py`, which says what they have to be."""

from __future__ import annotations

from typing import Any

import fresh
import pytest
import vllm

REQUESTS = 60


def forced_ends(**options: Any) -> dict[str, Any]:
    """What was found of so many requests."""
    if "speculate" in options and vllm.__version__.startswith("0.30."):
        pytest.skip("vLLM 0.30 cannot speculate on a CPU")
    return fresh.measure("forced_ends", requests=REQUESTS, **options)


@pytest.mark.parametrize(
    ("scheduling", "marker", "scheduler", "marker_is_one_token"),
    [
        pytest.param("sync", "</think>", "SyncMeridianScheduler", True, marks=pytest.mark.exhaustive),
        pytest.param("async", "</think>", "AsyncMeridianScheduler", True, marks=pytest.mark.exhaustive),
        ("async", "so much for that", "AsyncMeridianScheduler", False),
    ],
)
def test_every_ending_is_exact_under_preemption(
    scheduling: str, marker: str, scheduler: str, marker_is_one_token: bool
) -> None:
    found = forced_ends(scheduling=scheduling, marker=marker)
    assert found["exact"] == REQUESTS
    assert found["wrong"] == []
    assert found["missed"] == 0
    assert found["scheduler"] == scheduler
    assert (found["marker_tokens"] == 1) == marker_is_one_token
    assert found["preemptions"] > 0
    assert found["kinds"] == dict.fromkeys(["budget", "changed", "pattern", "eos", "free"], REQUESTS // 5)
    assert found["interrupted"] > 0
    forced = {reason: count for reason, count in found["forced"].items() if count}
    assert forced == {"hard-cap": 2 * REQUESTS // 5, "pattern": found["interrupted"], "eos-guard": REQUESTS // 5}


@pytest.mark.parametrize(
    ("scheduling", "drafts", "marker"),
    [
        pytest.param("sync", "draft", "</think>", marks=pytest.mark.exhaustive),
        pytest.param("async", "draft", "</think>", marks=pytest.mark.exhaustive),
        ("async", "draft", "so much for that"),
        pytest.param("sync", "ngram", "so much for that", marks=pytest.mark.exhaustive),
    ],
)
def test_every_ending_is_exact_with_speculative_decoding(scheduling: str, drafts: str, marker: str) -> None:
    found = forced_ends(scheduling=scheduling, speculate=drafts, marker=marker)
    assert found["exact"] == REQUESTS
    assert found["wrong"] == []
    assert found["missed"] == 0
    assert found["preemptions"] > 0
    assert found["accepted"] > 0
    assert found["proposed"] > found["accepted"]
    assert found["forced"]["eos-guard"] > 0


@pytest.mark.parametrize(
    "drafts", [{}, *(pytest.param({"speculate": kind}, marks=pytest.mark.exhaustive) for kind in ("draft", "ngram"))]
)
def test_a_processor_that_is_only_loaded_changes_nothing(drafts: dict[str, str]) -> None:
    found = forced_ends(loaded_only=True, **drafts)
    assert found["exact"] == found["requests"] == REQUESTS
    assert found.get("loaded") == found.get("stock")
