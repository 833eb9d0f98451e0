"""The waiting queue of `--scheduling-policy priority`. A plan may reorder its front for one step.

vLLM's own queue is a heap (vllm/v1/core/sched/request_queue.py: `PriorityRequestQueue`), which has no front to reorder.
This queue keeps the heap's order, by priority, arrival and id. A step without a plan therefore pops the same request as
the heap.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from vllm.v1.core.sched.request_queue import PriorityRequestQueue

if TYPE_CHECKING:
    from vllm.v1.request import Request

# The values that vLLM's `Request.__lt__` compares, and the request.
_Entry = tuple[int, float, str, int, "Request"]


class PlannedPriorityQueue(PriorityRequestQueue):
    """vLLM's priority queue, sorted. Between `plan` and `plan_ends` the requests of a plan come first, in its order."""

    def __init__(self) -> None:
        super().__init__()
        self._entry_of: dict[Request, _Entry] = {}
        self._entries: list[_Entry] = []
        self._planned: deque[Request] = deque()

    def plan(self, order: Iterable[Request]) -> None:
        """Put these waiting requests first, in this order, until `plan_ends`."""
        self._planned = deque(order)

    def plan_ends(self) -> None:
        """Return to the order of the queue."""
        self._planned.clear()

    def add_request(self, request: Request) -> None:
        """Insert a request in its place."""
        # Its arrival may have changed since it was last in the queue.
        self._take(request)
        entry = self._entry_of[request] = _entry(request)
        insort(self._entries, entry)

    def pop_request(self) -> Request:
        """Remove and return the front.

        Raises:
            IndexError: the queue is empty.
        """
        if self._planned:
            request = self._planned.popleft()
            self._take(request)
            return request
        request = self._entries.pop(0)[-1]
        del self._entry_of[request]
        return request

    def peek_request(self) -> Request:
        """The front.

        Raises:
            IndexError: the queue is empty.
        """
        return self._planned[0] if self._planned else self._entries[0][-1]

    def remove_request(self, request: Request) -> None:
        """Remove a request.

        Raises:
            ValueError: the request is not in the queue.
        """
        if request not in self._entry_of:
            raise ValueError("request is not in the queue")
        self.remove_requests((request,))

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove those of the requests that are in the queue."""
        for request in requests:
            self._take(request)
            if request in self._planned:
                self._planned.remove(request)

    def _take(self, request: Request) -> None:
        entry = self._entry_of.pop(request, None)
        if entry is not None:
            del self._entries[bisect_left(self._entries, entry)]

    def __contains__(self, request: object) -> bool:
        return request in self._entry_of

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        """Iterate in the order of the queue, regardless of a plan."""
        return iter([entry[-1] for entry in self._entries])


def _entry(request: Request) -> _Entry:
    # No two requests share the fourth value, so the last is never compared.
    return (request.priority, request.arrival_time, request.request_id, id(request), request)
