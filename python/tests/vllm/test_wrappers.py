"""Wrappers of another plug-in around the methods of vLLM that Meridian wraps: they stay, whoever came first."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from meridian.vllm.bench.model import model_dir
from meridian.vllm.channel import ToSamplers
from meridian.vllm.probing import HiddenFromConnector
from meridian.vllm.queue import PlannedPriorityQueue
from meridian.vllm.seams import ListSeams
from random_drive import Drive
from random_engine import Feature, Limits, make_scheduler
from random_sequences import FCFS, Policy, decided_by
from test_random_sequences import quiet  # noqa: F401
from vllm.v1.core.sched.request_queue import PriorityRequestQueue

STEPS = 1000
LIMITS = Limits(seqs=6, tokens=64, blocks=25, adapters=1, encoder=0, long_prefill=0)
OUTPUT_FIRST = Policy("output-first", "native:output-first")
CAPS = Policy("caps-of-nothing", "caps-of-nothing.wasm")
MANAGER = ("allocate_slots", "record_prefix_cache_stats")
POOL = ("free_blocks", "get_new_blocks", "touch", "evict_blocks", "reset_prefix_cache", "unpin_blocks")
SCHEDULER = (
    "schedule",
    "update_from_output",
    "add_request",
    "make_stats",
    "_free_request",
    "_preempt_request",
    "_handle_blocked_waiting_request",
    "_reserve_prefill_lookahead",
    "_update_request_as_session",
)


class Plugin:
    """Another plug-in, which counts calls."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.put: list[tuple[Any, str, Callable[..., Any]]] = []

    def around(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        """A wrapper of a method."""

        def outer(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return inner(*args, **kwargs)

        return outer

    def wraps(self, scheduler: Any, methods: tuple[str, ...] = SCHEDULER) -> None:
        """Wrap the methods of a scheduler and of its KV cache, in the objects themselves."""
        manager = scheduler.kv_cache_manager
        for owner, names in ((manager, MANAGER), (manager.block_pool, POOL), (scheduler, methods)):
            for name in names:
                if hasattr(owner, name):
                    outer = self.around(name, getattr(owner, name))
                    setattr(owner, name, outer)
                    self.put.append((owner, name, outer))

    def misses(self) -> list[str]:
        """Wrappers that are no longer in their places."""
        return [name for owner, name, outer in self.put if getattr(owner, name) is not outer]


def steps(scheduler: Any, seed: int, feature: Feature, each: Callable[[Drive], None] = lambda _: None) -> Drive:
    """A drive to the end of its requests; `each` is called before each step."""
    drive = Drive(scheduler, feature, LIMITS, seed)
    while (drive.left or scheduler.requests) and not drive.violations:
        each(drive)
        drive.step()
    return drive.run()


def traces(policies: list[Policy], hostile: Path, plugins: Callable[[Any, str], None], feature: Feature) -> list[Any]:
    """What happens in drives of one scheduler, each with Meridian, which is swapped out and in, and then without."""
    scheduler = make_scheduler(feature, LIMITS, str(model_dir()))
    seen, count = [], 0
    while count < STEPS:
        number = len(seen)
        plugins(scheduler, "out")
        ours = Drive(scheduler, feature, LIMITS, number)
        with decided_by(policies[number % len(policies)], ours, hostile) as native:
            plugins(scheduler, "in")
            while ours.left or scheduler.requests:
                if ours.steps % 5 == 3 and not native.is_stock:
                    scheduler._stand_aside()
                    scheduler._step_in(native)
                ours.step()
            ours.run()
        stock = steps(scheduler, number, feature)
        assert (ours.violations, stock.violations) == ([], [])
        assert scheduler.reset_prefix_cache()
        seen.append((ours.trace, stock.trace))
        count += ours.steps
    return seen


@pytest.mark.parametrize("priority", [False, True])
def test_wrappers_from_before_and_after_stay(hostile: Path, priority: bool) -> None:
    feature = Feature("plain", priority=priority)
    before, after = Plugin(), Plugin()

    def plugins(scheduler: Any, when: str) -> None:
        plugin = before if when == "out" else after
        if not plugin.put:
            plugin.wraps(scheduler)
        if when == "out":
            assert after.misses() == []

    policies = [OUTPUT_FIRST, CAPS, FCFS]
    alone = traces(policies, hostile, lambda *_: None, feature)
    assert traces(policies, hostile, plugins, feature) == alone, "and nothing else is changed"
    assert after.misses() == []
    called = {*SCHEDULER, *MANAGER, *POOL} - {
        "unpin_blocks",
        "make_stats",
        "record_prefix_cache_stats",
        "_update_request_as_session",
        "_handle_blocked_waiting_request",
        "evict_blocks",
    }
    for plugin in (before, after):
        assert called <= plugin.calls.keys()
    assert before.calls["schedule"] >= after.calls["schedule"] > STEPS


def test_wrappers_from_before_alone_are_in_the_objects_again(hostile: Path) -> None:
    feature, plugin, classes = Feature("plain"), Plugin(), []

    def plugins(scheduler: Any, when: str) -> None:
        if when == "out":
            if not plugin.put:
                plugin.wraps(scheduler)
            classes.append(type(scheduler))
            assert plugin.misses() == []

    traces([OUTPUT_FIRST, CAPS], hostile, plugins, feature)
    assert plugin.misses() == []
    assert set(classes) == {classes[0]}
    assert plugin.calls["schedule"] > STEPS


def test_wrappers_of_the_classes_are_called(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.block_pool import BlockPool

    feature, plugin = Feature("plain"), Plugin()

    def plugins(_: Any, when: str) -> None:
        if when == "in" and not plugin.calls:
            for name in ("free_blocks", "get_new_blocks", "touch"):
                monkeypatch.setattr(BlockPool, name, _method(plugin.around(name, getattr(BlockPool, name))))

    scheduler = make_scheduler(feature, LIMITS, str(model_dir()))
    with decided_by(OUTPUT_FIRST, Drive(scheduler, feature, LIMITS, 0), hostile):
        plugins(scheduler, "in")
        steps(scheduler, 0, feature)
    assert min(plugin.calls[name] for name in ("free_blocks", "get_new_blocks")) > 5


def _method(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: call(self, *args, **kwargs)


def test_the_waiting_queue_of_another_plug_in_comes_back(hostile: Path) -> None:
    class Operators(PriorityRequestQueue):
        """Keeps a note."""

    feature = Feature("priority", priority=True)
    scheduler = make_scheduler(feature, LIMITS, str(model_dir()))
    own = scheduler.waiting = Operators()
    for seed in range(3):
        drive = Drive(scheduler, feature, LIMITS, seed)
        with decided_by(OUTPUT_FIRST, drive, hostile):
            for _ in range(12):
                drive.step()
            assert isinstance(scheduler.waiting, PlannedPriorityQueue)
        assert scheduler.waiting is own
        drive.is_stock = True
        assert drive.run().violations == []


def test_a_cap_inside_anothers_wrapper_ends_with_its_step() -> None:
    class Scheduler:
        def __init__(self) -> None:
            self.waiting: Any = deque()

        def _reserve_prefill_lookahead(self, request: Any, computed: int, new: int) -> int:
            return new

    scheduler, plugin = Scheduler(), Plugin()
    seams = ListSeams(scheduler)

    def given() -> int:
        return scheduler._reserve_prefill_lookahead(None, 0, 5)

    for _ in range(3):
        own = vars(scheduler).get("_reserve_prefill_lookahead")
        seams.cap(lambda request, computed, new: 2)
        assert given() == 2
        seams.step_ends()
        assert vars(scheduler).get("_reserve_prefill_lookahead") is own
    seams.cap(lambda request, computed, new: 2)
    outer = plugin.around("cap", scheduler._reserve_prefill_lookahead)
    scheduler._reserve_prefill_lookahead = outer  # type: ignore[method-assign]
    seams.step_ends()
    for cap in (5, 3):
        assert (given(), scheduler._reserve_prefill_lookahead) == (5, outer)
        seams.cap(lambda request, computed, new, cap=cap: cap)
        assert given() == cap
        seams.step_ends()


def test_a_budget_that_another_changes_within_a_step_stays() -> None:
    scheduler: Any = SimpleNamespace(max_num_scheduled_tokens=64, waiting=deque())
    seams = ListSeams(scheduler)
    seams.lower_budget(16)
    seams.step_ends()
    assert scheduler.max_num_scheduled_tokens == 64
    seams.lower_budget(16)
    scheduler.max_num_scheduled_tokens = 32
    seams.step_ends()
    assert scheduler.max_num_scheduled_tokens == 32


def test_a_connector_keeps_the_wrappers_of_another_plug_in() -> None:
    class Connector:
        def build_connector_meta(self, output: Any) -> set[str]:
            return set(output.num_scheduled_tokens)

        def request_finished(self, request: Any, blocks: list[int]) -> tuple[bool, Any]:
            return True, None

    connector, before, after = Connector(), Plugin(), Plugin()
    output = SimpleNamespace(num_scheduled_tokens={"a": 1, "probe": 2}, finished_req_ids=set(), scheduled_new_reqs=[])
    probe = SimpleNamespace(request_id="probe")
    names = ("build_connector_meta", "request_finished")
    own = {name: before.around(name, getattr(connector, name)) for name in names}
    vars(connector).update(own)
    hidden = HiddenFromConnector(connector, ListSeams(SimpleNamespace()), lambda name: name == "probe")
    assert connector.build_connector_meta(output) == {"a"}
    assert connector.request_finished(probe, []) == (False, None)
    hidden.close()
    assert vars(connector) == own
    hidden = HiddenFromConnector(connector, ListSeams(SimpleNamespace()), lambda name: name == "probe")
    outer = {name: after.around(name, getattr(connector, name)) for name in names}
    vars(connector).update(outer)
    hidden.close()
    assert vars(connector) == outer
    assert connector.request_finished(SimpleNamespace(request_id="a"), []) == (True, None)
    assert before.calls.keys() == after.calls.keys() | {"build_connector_meta"}


def test_what_samplers_are_told_last_leaves_anothers_wrapper() -> None:
    class Scheduler:
        def schedule(self) -> Any:
            return SimpleNamespace()

    scheduler, plugin, samplers = Scheduler(), Plugin(), ToSamplers()
    wrapper = scheduler.schedule = plugin.around("schedule", scheduler.schedule)  # type: ignore[method-assign]
    samplers.tell(b"orders")
    samplers.leave_later(scheduler)  # type: ignore[arg-type]
    assert [vars(scheduler.schedule()) for _ in range(2)] == [{"meridian_orders": (b"orders",)}, {}]
    assert scheduler.schedule is wrapper
