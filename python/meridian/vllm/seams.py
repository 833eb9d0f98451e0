"""What Meridian needs of vLLM's scheduler: one interface, and its implementation by lists and methods.

compat.py lists the places of vLLM behind it and chooses the implementation of a scheduler; plugin_seams.py has the
other one. Reading stays direct: a seam is for what changes vLLM's objects, or differs between its versions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from vllm.v1.core.sched.request_queue import PriorityRequestQueue, SchedulingPolicy

from meridian.vllm.queue import PlannedPriorityQueue

if TYPE_CHECKING:
    from collections import deque

    from vllm.v1.core.sched.request_queue import RequestQueue
    from vllm.v1.request import Request


class Seams(ABC):
    """What Meridian changes in one of vLLM's schedulers.

    The thread that schedules makes all calls: `take` and `give_back` between two steps, the others within a step. None
    blocks. One that raises is a defect of Meridian, which its caller handles (state.py).
    """

    # How Meridian reaches the scheduler, for the log.
    name: str
    # Names of two attributes of the scheduler: the most requests that run; and the queue from which vLLM admits before
    # `waiting` and in its own order.
    seats: str
    admitted_first: str
    # Whether this step has changed something that `step_ends` undoes.
    is_changed: bool

    @abstractmethod
    def take(self) -> None:
        """Take over the order of waiting and the choice of victims, from the next step on."""

    @abstractmethod
    def give_back(self) -> None:
        """Undo `take`. A second call does nothing."""

    @abstractmethod
    def step_ends(self) -> None:
        """Undo what was changed for one step."""

    @abstractmethod
    def order_running(self, order: list[Request]) -> None:
        """Make vLLM serve the running requests in this order. A plan without probes sorts vLLM's list itself."""

    @abstractmethod
    def put_waiting_first(self, order: list[Request]) -> None:
        """Admit from the front of the queue, which holds exactly these requests, in this order."""

    @abstractmethod
    def gather(self, most: int) -> None:
        """Put the newest waiting requests behind the oldest, so that both are in a window of `most`; `spread` follows.

        Where the late go last, those who can be in time are the newest. Only for a queue that is a deque.
        """

    @abstractmethod
    def spread(self, window: list[Request], newest: set[int], free_seats: int) -> None:
        """Put the window into its order: who may be admitted, then the oldest; the newest go behind all again."""

    @abstractmethod
    def lower_budget(self, tokens: int) -> None:
        """Give this step so many tokens at most."""

    @abstractmethod
    def cap(self, capped: Callable[[Request, int, int], int]) -> None:
        """Have `capped` asked in this step how many tokens a request may take, in the place of vLLM's own method."""

    @abstractmethod
    def give_way(self, request: Request, timestamp: float) -> None:
        """Preempt a running request before vLLM schedules. It waits again after the step."""

    @abstractmethod
    def candidates(self, request: Request, step_serves: bool) -> list[Request]:
        """Who may give up KV blocks for this running request. vLLM itself would preempt the last of them."""

    @abstractmethod
    def preempt_next(self, victim: Request) -> None:
        """Make vLLM preempt this one of the `candidates` next."""

    @abstractmethod
    def leave_free(self, blocks: int) -> int:
        """Make admission leave so many KV blocks free, from now on; returns how many it left before."""

    @abstractmethod
    def wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method of one of vLLM's objects, and return what it was: vLLM's own, or the wrapper of other code."""

    @abstractmethod
    def unwrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> bool:
        """Put back what a wrapper has replaced. Returns False if other code has wrapped it in turn: then it stays, and
        has to pass on."""

    @abstractmethod
    def withdraw(self, probe: Request) -> None:
        """Take a probe back that a step did not admit."""


# vLLM asks this method of the scheduler how many tokens a request may take.
_CAP = "_reserve_prefill_lookahead"


class ListSeams(Seams):
    """The seams by lists and methods, which every supported vLLM has."""

    name = "lists and methods"

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.seats = "max_num_active_reqs" if hasattr(scheduler, "max_num_active_reqs") else "max_num_running_reqs"
        self.admitted_first = admitted_first_name(scheduler)
        self.is_changed = False
        # The scheduler's own budget, and the one that stands in its place.
        self._budgets: tuple[int, int] | None = None
        self._caps: Callable[..., int] | None = None
        self._gave_way: tuple[Request, ...] = ()
        self._own_queue: RequestQueue = PriorityRequestQueue()
        # What wrappers have replaced in the objects themselves; everything else is a method of a class.
        self._replaced: dict[tuple[int, str, Callable[..., Any]], Callable[..., Any]] = {}

    def take(self) -> None:
        if self.scheduler.policy is SchedulingPolicy.PRIORITY:
            self._own_queue = self._refill(PlannedPriorityQueue())

    def give_back(self) -> None:
        if isinstance(self.scheduler.waiting, PlannedPriorityQueue):
            self._refill(self._own_queue)

    def _refill(self, queue: RequestQueue) -> RequestQueue:
        """Put a queue in the place of the waiting one, which is returned empty."""
        before = self.scheduler.waiting
        waiting = list(before)
        before.remove_requests(waiting)
        for request in waiting:
            queue.add_request(request)
        self.scheduler.waiting = queue
        return before

    def step_ends(self) -> None:
        self.is_changed = False
        scheduler = self.scheduler
        if self._budgets is not None:
            own, lowered = self._budgets
            if scheduler.max_num_scheduled_tokens == lowered:
                scheduler.max_num_scheduled_tokens = own
            self._budgets = None
        if self._caps is not None:
            caps, self._caps = self._caps, None
            self.unwrap(scheduler, _CAP, caps)
        queue = scheduler.waiting
        gave_way, self._gave_way = self._gave_way, ()
        for request in gave_way:
            queue.add_request(request)
        if isinstance(queue, PlannedPriorityQueue):
            queue.plan_ends()

    def order_running(self, order: list[Request]) -> None:
        self.scheduler.running[:] = order

    def put_waiting_first(self, order: list[Request]) -> None:
        queue = self.scheduler.waiting
        if isinstance(queue, PlannedPriorityQueue):
            self.is_changed = True
            queue.plan(order)
            return
        waiting = cast("deque[Request]", queue)
        for _ in order:
            waiting.popleft()
        waiting.extendleft(reversed(order))

    def gather(self, most: int) -> None:
        waiting = cast("deque[Request]", self.scheduler.waiting)
        newest = [waiting.pop() for _ in range(most // 2)]
        oldest = [waiting.popleft() for _ in range(most // 2)]
        waiting.extendleft(newest)
        waiting.extendleft(reversed(oldest))

    def spread(self, window: list[Request], newest: set[int], free_seats: int) -> None:
        waiting = cast("deque[Request]", self.scheduler.waiting)
        for _ in window:
            waiting.popleft()
        rest = window[free_seats:]
        waiting.extend([request for request in rest if id(request) in newest])
        waiting.extendleft(request for request in reversed(rest) if id(request) not in newest)
        waiting.extendleft(reversed(window[:free_seats]))

    def lower_budget(self, tokens: int) -> None:
        self.is_changed = True
        self._budgets = (self.scheduler.max_num_scheduled_tokens, tokens)
        self.scheduler.max_num_scheduled_tokens = tokens

    def cap(self, capped: Callable[[Request, int, int], int]) -> None:
        def reserve(*args: Any) -> int:
            # After its step it may stand inside the wrapper of other code.
            return (capped if self._caps is reserve else own)(*args)

        self.is_changed = True
        own = self.wrap(self.scheduler, _CAP, reserve)
        self._caps = reserve

    def give_way(self, request: Request, timestamp: float) -> None:
        scheduler = self.scheduler
        self.is_changed = True
        scheduler.running.remove(request)
        scheduler._preempt_request(request, timestamp, drop_stale_output=scheduler.requires_kv_delivery)
        scheduler.waiting.remove_request(request)
        self._gave_way = (*self._gave_way, request)

    def candidates(self, request: Request, step_serves: bool) -> list[Request]:
        # Requests before it have tokens in this step and must stay.
        running = self.scheduler.running
        first = running.index(request)
        if not step_serves and first + 1 < len(running):
            # If the request goes itself, vLLM ends the step, which would be empty.
            first += 1
        return running[first:]

    def preempt_next(self, victim: Request) -> None:
        # vLLM preempts the last (scheduler.py: `self.running[-1]`).
        running = self.scheduler.running
        if running[-1] is not victim:
            running.append(running.pop(running.index(victim)))

    def leave_free(self, blocks: int) -> int:
        manager = self.scheduler.kv_cache_manager
        before, manager.watermark_blocks = manager.watermark_blocks, blocks
        return before

    def wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> Callable[..., Any]:
        own = getattr(owner, name)
        # Reading an object's `__dict__` makes CPython 3.11 call all of its methods more slowly from then on.
        try:
            delattr(owner, name)
        except AttributeError:
            pass
        else:
            self._replaced[id(owner), name, wrapper] = own
        setattr(owner, name, wrapper)
        return own

    def unwrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> bool:
        if getattr(owner, name) != wrapper:
            return False
        own = self._replaced.pop((id(owner), name, wrapper), None)
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
        return True

    def withdraw(self, probe: Request) -> None:
        scheduler = self.scheduler
        for queue in (scheduler.waiting, getattr(scheduler, self.admitted_first)):
            if probe in queue:
                queue.remove_request(probe)
        getattr(scheduler, "deferred_waiting", set()).discard(probe)
        scheduler.requests.pop(probe.request_id, None)


def admitted_first_name(scheduler: Any) -> str:
    """The name of vLLM's second queue, from which it admits before `waiting` and in its own order: requests that hold
    KV blocks, or before vLLM 0.31 those that could not be admitted in an earlier step."""
    return "kv_holding_waiting" if hasattr(scheduler, "kv_holding_waiting") else "skipped_waiting"
