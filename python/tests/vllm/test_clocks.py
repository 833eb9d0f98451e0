"""Front ends whose clocks are not the engine's: requests are as old as with right clocks."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from meridian.vllm import following
from meridian.vllm.bench.model import model_dir
from meridian.vllm.following import Arrivals
from random_drive import Drive
from random_engine import Feature, Limits, make_scheduler
from random_sequences import Policy, decided_by
from test_random_sequences import quiet  # noqa: F401

SKEWS = (-3600.0, -8.0, -0.4, 0.4, 10.0, 3600.0)
FEATURE = Feature("skewed")
LIMITS = Limits(seqs=2, tokens=32, blocks=40, adapters=1, encoder=0, long_prefill=0)


class Refusing(Policy):
    """Late requests are refused."""

    def config(self, hostile: Path) -> Any:
        """With one level for all."""
        level = {"ttfo_ms": 400.0, "think_ms_per_token": 0.0, "late": "refuse", "default": True}
        return replace(super().config(hostile), service_levels={"all": level})


class Skewed(Drive):
    """Requests of two front ends, each with a clock that is wrong by so many seconds."""

    skews = (0.0, 0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.left = 60

    def _request(self, name: str, *args: Any, **more: Any) -> Any:
        request = super()._request(name, *args, client_index=int(name) % 2, **more)
        # Each held the request for a while.
        request.arrival_time += self.skews[int(name) % 2] - random.Random(name).random() * 0.05
        return request

    def _check_end(self) -> None:
        """Refused requests have generated nothing."""


def outcome(skews: tuple[float, float]) -> tuple[Any, Any]:
    """What happened in each step, and when requests arrived, by which all of their times are measured."""
    drive = Skewed(make_scheduler(FEATURE, LIMITS, str(model_dir())), FEATURE, LIMITS, 3)
    drive.skews = skews
    arrived = []

    def add(engine: Any, request: Any, arrival_ms: float, *args: Any) -> None:
        arrived.append(round(arrival_ms, 3))
        own(engine, request, arrival_ms, *args)

    own = following.add
    with mock.patch.object(following, "add", add), decided_by(Refusing("", "native:balanced"), drive, Path()):
        drive.run()
    assert drive.violations == []
    return drive.trace, arrived


@pytest.fixture(scope="module")
def right() -> tuple[Any, Any]:
    """With right clocks."""
    return outcome((0.0, 0.0))


@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.usefixtures("quiet")
def test_a_skew_changes_no_refusal_and_no_time(right: tuple[Any, Any], skew: float) -> None:
    refused = [said for step in right[0] if isinstance(step, dict) for said in step.values() if said == ([], "abort")]
    assert 3 < len(refused) < 50
    assert outcome((skew, skew)) == right
    assert outcome((skew, 0.0)) == right


class Clocks:
    """Stands in for the module `time`: the monotonic clock, and the wall clock of the engine's machine."""

    def __init__(self) -> None:
        self.now = 100.0
        self.wall = 1.8e9

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now + self.wall


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    found = Clocks()
    monkeypatch.setattr(following, "time", found)
    return found


def age_ms(arrivals: Arrivals, clocks: Clocks, *, held_s: float, front_end: int = 0, after_s: float = 0.1) -> float:
    """How old a request counts that the engine receives after its front end has held it."""
    clocks.now += after_s
    request: Any = SimpleNamespace(request_id="r", arrival_time=clocks.time() - held_s, client_index=front_end)
    return round(clocks.now * 1e3 - arrivals.ms(request), 1)


@pytest.mark.parametrize("skew", [0.0, *SKEWS])
def test_what_a_front_end_held_counts_whatever_its_clock_says(clocks: Clocks, skew: float) -> None:
    arrivals = Arrivals()
    ages = [age_ms(arrivals, clocks, held_s=held + skew) for held in (0.002, 0.102, 0.002, 0.252, 5.0, 0.002)]
    assert ages == [0.0, 99.0, 0.0, 249.0, 0.0, 0.0], "5 s may be a clock that was set"


def test_each_front_end_has_a_clock_of_its_own(clocks: Clocks) -> None:
    arrivals = Arrivals()
    for _ in range(5):
        assert age_ms(arrivals, clocks, held_s=9.0) == 0.0
        assert age_ms(arrivals, clocks, held_s=8.6, front_end=1) == 0.0


@pytest.mark.parametrize("jump", [-3600.0, -2.0, -0.2, 0.2, 2.0, 3600.0])
def test_a_clock_that_is_set_counts_for_seconds_at_most(clocks: Clocks, jump: float) -> None:
    arrivals = Arrivals()
    assert age_ms(arrivals, clocks, held_s=0.0) == 0.0
    ages = [age_ms(arrivals, clocks, held_s=jump, after_s=10.0) for _ in range(7)]
    assert max(ages) == (100.0 if jump == 0.2 else 0.0)
    assert ages[-1] == 0.0
    # The engine's own clock is set back.
    clocks.wall -= jump
    assert age_ms(arrivals, clocks, held_s=jump, after_s=100.0) == 0.0


def test_clocks_that_drift_are_followed(clocks: Clocks) -> None:
    """By 500 millionths, the most by which Linux slews a clock."""
    arrivals = Arrivals()
    assert max(age_ms(arrivals, clocks, held_s=5e-5 * i, after_s=0.1) for i in range(10_000)) == 0.0


def test_a_wrong_clock_is_said_once(clocks: Clocks, caplog: pytest.LogCaptureFixture) -> None:
    arrivals = Arrivals()
    with caplog.at_level(logging.WARNING, logger="vllm.meridian"):
        age_ms(arrivals, clocks, held_s=0.9)
        assert caplog.messages == []
        for held in (8.0, 8.1, -3600.0, float("nan"), float("inf"), 0.0):
            assert age_ms(arrivals, clocks, held_s=held) in (0.0, 99.0)
    assert len(caplog.messages) == 1
    assert "request r arrived with a time 8.0 s before that of this engine" in caplog.text
