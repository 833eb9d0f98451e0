"""A defect of Meridian itself, wherever it is, leaves stock vLLM: the same tokens, and nothing else of Meridian."""

from __future__ import annotations

import logging

import pytest
from defects import POINTS, Defect, broken, left_behind, native_for, positions
from harness import Engine, requests


@pytest.fixture(scope="module")
def calls(engine: Engine, stock_tokens: list[list[int]]) -> dict[str, int]:
    """How often each point is called while `requests(24)` are served without a defect."""
    assert engine.scheduler.reset_prefix_cache()
    defect = Defect()
    with broken(engine, native_for(engine), defect):
        assert engine.generate(requests(24)) == stock_tokens
        assert engine.scheduler._meridian is not None
    return dict(defect.calls)


def test_every_point_is_called(calls: dict[str, int]) -> None:
    assert {point for point in POINTS if not calls.get(point)} == set()


@pytest.mark.parametrize("point", POINTS)
def test_a_defect_at_any_call_leaves_stock_vllm(
    engine: Engine,
    stock_tokens: list[list[int]],
    calls: dict[str, int],
    point: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from meridian._native import PanicException

    number = POINTS.index(point)
    # Of the positions and of the errors every point has one, in turn.
    at = positions(calls[point])[-(number % 2)]
    error = PanicException("panicked") if number // 2 % 2 else RuntimeError("broken")
    assert engine.scheduler.reset_prefix_cache()
    defect = Defect(point, at, error)
    with broken(engine, native_for(engine), defect), caplog.at_level(logging.ERROR, logger="vllm.meridian"):
        assert engine.generate(requests(24)) == stock_tokens
        assert defect.is_raised, f"call {at} did not come"
        assert left_behind(engine) == []
        assert "this engine goes on as stock vLLM" in caplog.text
