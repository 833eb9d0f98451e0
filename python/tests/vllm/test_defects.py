"""A defect of Meridian itself, wherever it is, leaves stock vLLM: the same tokens, and nothing else of Meridian."""

from __future__ import annotations

import logging

import pytest
from defects import POINTS, Defect, broken, left_behind, native_for, positions, serve
from harness import Engine


@pytest.fixture(scope="module")
def stock(engine: Engine) -> list[list[int]]:
    """What stock vLLM generates."""
    with engine.using(None):
        return serve(engine)


@pytest.fixture(scope="module")
def calls(engine: Engine, stock: list[list[int]]) -> dict[str, int]:
    """How often each point is called while the requests are served without a defect."""
    defect = Defect()
    with broken(engine, native_for(engine), defect):
        assert serve(engine) == stock
        assert engine.scheduler._meridian is not None
    return dict(defect.calls)


def test_every_point_is_called(calls: dict[str, int]) -> None:
    assert {point for point in POINTS if not calls.get(point)} == set()


@pytest.mark.parametrize("point", POINTS)
def test_a_defect_at_any_call_leaves_stock_vllm(
    engine: Engine,
    stock: list[list[int]],
    calls: dict[str, int],
    point: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from meridian._native import PanicException

    number = POINTS.index(point)
    # Of the positions and of the errors every point has one, in turn.
    at = positions(calls[point])[-(number % 2)]
    error = PanicException("panicked") if number // 2 % 2 else RuntimeError("broken")
    defect = Defect(point, at, error)
    with broken(engine, native_for(engine), defect), caplog.at_level(logging.ERROR, logger="vllm.meridian"):
        assert serve(engine) == stock
        assert defect.is_raised, f"call {at} did not come"
        assert left_behind(engine) == []
        assert "this engine goes on as stock vLLM" in caplog.text
