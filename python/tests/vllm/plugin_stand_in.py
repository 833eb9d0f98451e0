"""A stand-in for vLLM's scheduler plug-ins (vLLM #51601, a draft), for tests on a vLLM that has none.

The callers are the installed vLLM's own methods, changed in memory where the draft changes them: who is preempted in
`schedule()`, who makes the queues, and which goes first where the version asks a method. With vLLM's own order, the
scheduler does what it does without plug-ins.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from types import ModuleType
from typing import Any
from unittest import mock

from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler

PACKAGE = "vllm.v1.core.sched.plugins"
SELECTS_QUEUE = hasattr(Scheduler, "_select_waiting_queue_for_scheduling")


class WaitingQueue(Enum):
    """The two queues of waiting requests."""

    WAITING = "waiting"
    SKIPPED = "skipped"


class QueueSortPlugin(ABC):
    """Makes the queues, and says which goes first."""

    name: str

    @abstractmethod
    def create_request_queue(self) -> Any:
        """An empty queue."""

    @abstractmethod
    def select_queue(self, waiting_head: Any, skipped_head: Any) -> WaitingQueue | None:
        """The queue to admit from, by the first request of each."""


class PreemptionPlugin(ABC):
    """Says who is preempted."""

    name: str

    @abstractmethod
    def preemption_key(self, request: Any, running_position: int) -> tuple[int | float, ...]:
        """The running request with the largest key goes first."""


class VllmsOwn(QueueSortPlugin, PreemptionPlugin):
    """What vLLM does without plug-ins."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.name, self.policy = policy.value, policy

    def create_request_queue(self) -> Any:
        return create_request_queue(self.policy)

    def select_queue(self, waiting_head: Any, skipped_head: Any) -> WaitingQueue | None:
        if waiting_head is None and skipped_head is None:
            return None
        if waiting_head is None or skipped_head is None:
            return WaitingQueue.SKIPPED if waiting_head is None else WaitingQueue.WAITING
        by_priority = self.policy is SchedulingPolicy.PRIORITY
        return WaitingQueue.WAITING if by_priority and waiting_head < skipped_head else WaitingQueue.SKIPPED

    def preemption_key(self, request: Any, running_position: int) -> tuple[int | float, ...]:
        by_priority = self.policy is SchedulingPolicy.PRIORITY
        return (request.priority, request.arrival_time) if by_priority else (running_position,)


class SchedulerPluginManager:
    """The plug-ins of one scheduler."""

    def __init__(self, policy: str) -> None:
        self.policy = SchedulingPolicy(policy)
        self.queue_sort_plugin: Any = VllmsOwn(self.policy)
        self.preemption_plugin: Any = self.queue_sort_plugin
        self.plugins = (self.queue_sort_plugin,)

    def create_request_queue(self) -> Any:
        """An empty queue."""
        return self.queue_sort_plugin.create_request_queue()

    def select_queue(self, waiting: Any, skipped: Any) -> Any:
        """The queue to admit from; None if both are empty."""
        heads = (queue.peek_request() if queue else None for queue in (waiting, skipped))
        of = {None: None, WaitingQueue.WAITING: waiting, WaitingQueue.SKIPPED: skipped}
        return of[self.queue_sort_plugin.select_queue(*heads)]

    def select_preemption_victim(self, running: list[Any]) -> Any:
        """The running request that goes next."""
        keys = [self.preemption_plugin.preemption_key(request, at) for at, request in enumerate(running)]
        return running[keys.index(max(keys))]


PLUGINS: Any = ModuleType(PACKAGE)
for kind in (WaitingQueue, QueueSortPlugin, PreemptionPlugin, SchedulerPluginManager):
    setattr(PLUGINS, kind.__name__, kind)


class _AsksTheManager(ast.NodeTransformer):
    """Has the manager asked for new queues and for the victim, and removes the victim by its place in the running list:
    vLLM has that code, for priorities."""

    asked = removed = 0

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        is_queue = ast.unparse(node) == "create_request_queue(self.policy)"
        return ast.parse("self.scheduler_plugin_manager.create_request_queue()", mode="eval").body if is_queue else node

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        if ast.unparse(node.test) != "self.policy == SchedulingPolicy.PRIORITY":
            return node
        match [ast.unparse(line) for line in node.orelse]:
            case ["preempted_req = self.running[-1]"]:
                self.asked += 1
                ask = "preempted_req = self.scheduler_plugin_manager.select_preemption_victim(self.running)"
                return ast.parse(ask).body
            case ["preempted_req = self.running.pop()"]:
                self.removed += 1
                return node.body
        return node


@functools.cache
def _schedule() -> Callable[..., Any]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(Scheduler.schedule)))
    change = _AsksTheManager()
    tree = ast.fix_missing_locations(change.visit(tree))
    assert (change.asked, change.removed) == (1, 1), "schedule() chooses victims in another way than this knows"
    made: dict[str, Any] = {}
    code = compile(tree, inspect.getfile(Scheduler), "exec", dont_inherit=True)
    exec(code, vars(sys.modules[Scheduler.__module__]), made)
    return made["schedule"]


def _init(own: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        manager = self.scheduler_plugin_manager = SchedulerPluginManager(self.scheduler_config.policy)
        self.policy = manager.policy
        for name in ("waiting", "skipped_waiting", "kv_holding_waiting"):
            if hasattr(self, name):
                setattr(self, name, manager.create_request_queue())

    return __init__


def _select_queue(self: Any) -> Any:
    return self.scheduler_plugin_manager.select_queue(self.waiting, self.skipped_waiting)


@contextmanager
def installed() -> Iterator[None]:
    """Give vLLM's schedulers plug-ins. One that is made within must be used within."""
    if PACKAGE in sys.modules:
        yield
        return
    changed: dict[str, Any] = {"schedule": _schedule(), "__init__": _init(Scheduler.__init__)}
    if SELECTS_QUEUE:
        changed["_select_waiting_queue_for_scheduling"] = _select_queue
    sys.modules[PACKAGE] = PLUGINS
    try:
        with mock.patch.multiple(Scheduler, **changed):
            yield
    finally:
        del sys.modules[PACKAGE]
