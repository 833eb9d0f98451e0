"""The seams by lists and by plug-ins: what each does to a scheduler, and that both choose and do the same.

`--seams plug-ins` runs the other tests of this folder on the second one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import plugin_stand_in
import pytest
from meridian.vllm import compat
from meridian.vllm.bench.model import model_dir
from meridian.vllm.kv import KvHook
from meridian.vllm.queue import PlannedPriorityQueue
from meridian.vllm.seams import ListSeams, Seams
from random_drive import Arrival, Drive
from random_engine import FEATURES, Feature, Limits, make_scheduler
from random_sequences import FCFS, POLICIES, Policy, decided, decided_by, first_difference, scripted, stock
from test_random_sequences import broken, quiet  # noqa: F401
from vllm.v1.core.sched.request_queue import PriorityRequestQueue

SEAMS = {"lists": nullcontext, "plug-ins": plugin_stand_in.installed}
# Of each feature.
PAIRS = 3
PLAIN, PRIORITY = Feature("plain"), Feature("priority", priority=True)
LIMITS = Limits(seqs=4, tokens=64, blocks=40, adapters=1, encoder=0, long_prefill=0)
# More answers than there is memory for; everything is admitted that fits.
SHORT = Limits(seqs=8, tokens=64, blocks=25, adapters=1, encoder=0, long_prefill=0)
ANSWERS = tuple(Arrival(1 + i // 2, 8 + 5 * i % 30, 20 + 13 * i % 50) for i in range(16))
PREEMPTS = Policy("output-first", "native:output-first", growth_blocks=0.0)


@pytest.fixture(scope="module", autouse=True)
def without_option(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("seams") != "lists":
        pytest.skip("these tests choose the seams themselves")


@pytest.fixture(scope="module")
def model() -> str:
    return str(model_dir())


def plugin_seams() -> Any:
    """The class of the seams by plug-ins."""
    from meridian.vllm.plugin_seams import PluginSeams

    return PluginSeams


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_the_stand_in_and_fcfs_on_it_do_what_stock_does(feature: Feature, model: str, hostile: Path) -> None:
    for seed in range(PAIRS):
        reference = stock(feature, seed, model)
        with plugin_stand_in.installed():
            unattached = stock(feature, seed, model)
            ours = decided(FCFS, feature, seed, model, hostile)
        assert first_difference(unattached, reference) is None
        assert broken(ours.violations, feature) == []
        assert first_difference(ours, reference) is None


@pytest.mark.parametrize("number", range(len(FEATURES)), ids=[feature.name for feature in FEATURES])
def test_by_lists_and_by_plug_ins_every_policy_does_the_same(number: int, model: str, hostile: Path) -> None:
    for policy in (*POLICIES[number % 4 :: 4], PREEMPTS):
        by_lists = decided(policy, FEATURES[number], number, model, hostile)
        with plugin_stand_in.installed():
            by_plug_ins = decided(policy, FEATURES[number], number, model, hostile)
        assert broken(by_plug_ins.violations, FEATURES[number]) == []
        assert first_difference(by_plug_ins, by_lists) is None


@contextmanager
def watched_choices(counts: Counter[str]) -> Iterator[None]:
    """Compares each choice of the engine with whom vLLM preempts next."""
    from vllm.v1.core.sched.scheduler import Scheduler

    choose, preempt, chosen = KvHook._choose_victim, Scheduler._preempt_request, []

    def choosing(self: KvHook, request: Any) -> None:
        chosen.clear()
        running = list(self._scheduler.running)
        own = self.engine.victim

        class Native:
            def __getattr__(self, name: str) -> Any:
                return getattr(engine, name)

            def victim(self, candidates: list[Any], *args: Any) -> int | None:
                victim = own(candidates, *args)
                if victim is not None:
                    chosen.append(candidates[victim])
                    counts["not the last"] += chosen[0] is not running[-1]
                return victim

        engine, self.engine = self.engine, Native()  # type: ignore[assignment]
        try:
            choose(self, request)
        finally:
            self.engine = engine

    def preempting(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        if chosen:
            counts["as chosen" if chosen.pop() is request else "another"] += 1
        preempt(self, request, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(KvHook, "_choose_victim", choosing)
        patched.setattr(Scheduler, "_preempt_request", preempting)
        yield


def choices(seams: str, model: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    with SEAMS[seams](), watched_choices(counts):
        drive, _ = scripted(SHORT, ANSWERS, model, PREEMPTS)
        assert drive.violations == []
    return counts


@pytest.mark.parametrize("seams", SEAMS)
def test_whom_the_policy_chooses_is_preempted(seams: str, model: str) -> None:
    counts = choices(seams, model)
    assert counts["as chosen"] > 10
    assert counts["another"] == 0
    assert counts["not the last"] > 0, "vLLM's own rule would have done"


@pytest.mark.parametrize("seams", SEAMS)
def test_a_choice_that_is_not_carried_out_is_found(seams: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with plugin_stand_in.installed():
        kind = plugin_seams() if seams == "plug-ins" else ListSeams
    monkeypatch.setattr(kind, "preempt_next", lambda self, victim: None)
    assert choices(seams, model)["another"] > 0


def test_a_choice_ends_with_its_step(model: str) -> None:
    """vLLM may keep the victim: where blocks that it frees would not be free at once."""
    with plugin_stand_in.installed():
        drive = Drive(make_scheduler(PLAIN, LIMITS, model), PLAIN, LIMITS, 0)
        with decided_by(PREEMPTS, drive, Path()):
            while len(drive.scheduler.running) < 3:
                drive.step()
            first, *_, last = drive.scheduler.running
            manager, seams = drive.scheduler.scheduler_plugin_manager, drive.scheduler._meridian_seams
            seams.preempt_next(first)
            assert manager.select_preemption_victim(drive.scheduler.running) is first
            drive.scheduler._end_step()
            assert manager.select_preemption_victim(drive.scheduler.running) is last


@pytest.mark.parametrize("feature", [PLAIN, PRIORITY], ids=lambda feature: feature.name)
def test_the_plug_ins_that_were_there_come_back(feature: Feature, model: str) -> None:
    with plugin_stand_in.installed():
        drive = Drive(make_scheduler(feature, LIMITS, model), feature, LIMITS, 0)
        manager = drive.scheduler.scheduler_plugin_manager
        own = manager.queue_sort_plugin

        class Operators(plugin_stand_in.VllmsOwn):
            """Another plug-in, which prefers the oldest as the victim."""

            def preemption_key(self, request: Any, running_position: int) -> tuple[int | float, ...]:
                return (-running_position,)

        operators: Any = Operators(manager.policy)
        manager.preemption_plugin = operators
        for _ in range(2):
            with decided_by(PREEMPTS, drive, Path()):
                assert manager.preemption_plugin.own is operators
                assert (manager.queue_sort_plugin is own) == (feature is PLAIN)
                assert isinstance(drive.scheduler.waiting, PlannedPriorityQueue) == (feature is PRIORITY)
                for _ in range(8):
                    drive.step()
                assert manager.select_preemption_victim(drive.scheduler.running) is drive.scheduler.running[0]
            assert manager.preemption_plugin is operators
            assert manager.queue_sort_plugin is own
            assert feature is PLAIN or type(drive.scheduler.waiting) is PriorityRequestQueue
        drive.is_stock = True
        assert drive.run().violations == []


def test_a_plug_in_around_meridians_stays(model: str) -> None:
    with plugin_stand_in.installed():
        drive = Drive(make_scheduler(PRIORITY, LIMITS, model), PRIORITY, LIMITS, 0)
        manager = drive.scheduler.scheduler_plugin_manager
        with decided_by(PREEMPTS, drive, Path()):

            class Outer(plugin_stand_in.VllmsOwn):
                inner = manager.preemption_plugin

                def preemption_key(self, request: Any, running_position: int) -> tuple[int | float, ...]:
                    return self.inner.preemption_key(request, running_position)

            manager.preemption_plugin = outer = Outer(manager.policy)
        assert manager.preemption_plugin is outer
        drive.is_stock = True
        assert drive.run().violations == []


def test_a_swap_takes_the_plug_ins_and_gives_them_back(model: str) -> None:
    with plugin_stand_in.installed():
        drive = Drive(make_scheduler(PLAIN, LIMITS, model), PLAIN, LIMITS, 0)
        manager = drive.scheduler.scheduler_plugin_manager
        own = manager.preemption_plugin
        with decided_by(FCFS, drive, Path()):
            assert manager.preemption_plugin is own
            drive.scheduler._step_in(drive.scheduler._meridian)
            assert manager.preemption_plugin.own is own
            drive.scheduler._stand_aside()
            assert manager.preemption_plugin is own


@pytest.mark.parametrize("seams", SEAMS)
def test_the_start_says_how_it_changes_the_scheduler(seams: str, model: str, caplog: pytest.LogCaptureFixture) -> None:
    with SEAMS[seams](), caplog.at_level(logging.INFO, logger="vllm.meridian"):
        drive = Drive(make_scheduler(PLAIN, LIMITS, model), PLAIN, LIMITS, 0)
        with decided_by(FCFS, drive, Path()):
            said = drive.scheduler.meridian_stats()["seams"]
    assert said.startswith("plug-ins for" if seams == "plug-ins" else "lists and methods")
    assert f"meridian: changes vLLM's scheduler by {said}" in caplog.text


def test_plug_ins_of_another_kind_are_left_alone(
    model: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with plugin_stand_in.installed():
        scheduler = make_scheduler(PLAIN, LIMITS, model)
        monkeypatch.setattr(plugin_stand_in.VllmsOwn, "preemption_key", lambda self, running: (0,))
        with caplog.at_level(logging.WARNING, logger="vllm.meridian"):
            assert type(compat.choose_seams(scheduler)) is ListSeams
    assert "preemption_plugin.preemption_key(request, running_position)" in caplog.text


def test_both_implement_the_same_seams() -> None:
    with plugin_stand_in.installed():
        for kind in (ListSeams, plugin_seams()):
            assert issubclass(kind, Seams)
            assert not kind.__abstractmethods__
            public = {name for of in kind.__mro__[:-1] for name in vars(of) if not name.startswith("_")}
            assert public <= {*vars(Seams), *Seams.__annotations__}, "nothing beside the interface"


def test_every_place_says_its_versions() -> None:
    paths = {(place.seam, place.path) for place in compat.PLACES}
    assert len(paths) == len(compat.PLACES)
    for place in compat.PLACES:
        assert compat.SUPPORTED[0] <= place.since <= place.until <= compat.SUPPORTED[1]
        # What no later version has is replaced by a place that the table has as well.
        assert place.later or place.until == compat.SUPPORTED[1], place.path
        assert not place.later or place.later in {path for _, path in paths}, place.path
