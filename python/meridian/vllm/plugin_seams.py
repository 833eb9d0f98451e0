"""The order of waiting and the choice of victims by vLLM's scheduler plug-ins; the rest by lists and methods.

No release has these plug-ins yet. This is written against their draft (vLLM #51601: `vllm/v1/core/sched/plugins`), and
tested with a stand-in for their callers (python/tests/vllm/plugin_stand_in.py). compat.py imports it only where they
are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.plugins import (  # pyright: ignore[reportMissingImports]
    PreemptionPlugin,
    QueueSortPlugin,
)
from vllm.v1.core.sched.request_queue import SchedulingPolicy

from meridian.vllm.queue import PlannedPriorityQueue
from meridian.vllm.seams import ListSeams

if TYPE_CHECKING:
    from vllm.v1.core.sched.request_queue import RequestQueue
    from vllm.v1.request import Request


class PluginSeams(ListSeams):
    """The seams where vLLM has plug-ins. Meridian's wrap those that they find, which decide where it does not."""

    name = "plug-ins for the order of waiting and for victims, lists and methods for the rest"

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        self._victim = _Victim(None)
        self._waiting = _Waiting(None)

    def take(self) -> None:
        manager = self.scheduler.scheduler_plugin_manager
        self._victim = manager.preemption_plugin = _Victim(manager.preemption_plugin)
        if self.scheduler.policy is SchedulingPolicy.PRIORITY:
            manager.queue_sort_plugin = self._waiting = _Waiting(manager.queue_sort_plugin)
            self._own_queue = self._refill(manager.create_request_queue())

    def give_back(self) -> None:
        manager = self.scheduler.scheduler_plugin_manager
        if manager.preemption_plugin is self._victim:
            manager.preemption_plugin = self._victim.own
        self._waiting.is_on = False
        if manager.queue_sort_plugin is self._waiting:
            manager.queue_sort_plugin = self._waiting.own
        super().give_back()

    def step_ends(self) -> None:
        super().step_ends()
        self._victim.request = None

    def preempt_next(self, victim: Request) -> None:
        self.is_changed = True
        self._victim.request = victim


class _Victim(PreemptionPlugin):
    """The request that Meridian has chosen goes first, and without a choice the one that vLLM's own plug-in chooses."""

    name = "meridian-victim"

    def __init__(self, own: Any) -> None:
        self.own = own
        self.request: Request | None = None

    def preemption_key(self, request: Request, running_position: int) -> tuple[int | float, ...]:
        return (request is self.request, *self.own.preemption_key(request, running_position))


class _Waiting(QueueSortPlugin):
    """The queues of vLLM's own plug-in, sorted, so that a plan may reorder their front for one step."""

    name = "meridian-waiting"

    def __init__(self, own: Any) -> None:
        self.own = own
        # It may stay inside a plug-in of other code.
        self.is_on = True

    def create_request_queue(self) -> RequestQueue:
        return PlannedPriorityQueue() if self.is_on else self.own.create_request_queue()

    def select_queue(self, waiting_head: Request | None, skipped_head: Request | None) -> Any:
        return self.own.select_queue(waiting_head, skipped_head)
