"""State that the parts of `MeridianScheduler` share, and the one place where a defect of Meridian ends."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from meridian.vllm.kv import DEFECTS, KvHook, OwnTime

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.scheduler import Scheduler as _Base
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.request import Request

    from meridian import _native
    from meridian.vllm.channel import ToSamplers
    from meridian.vllm.seams import Seams
    from meridian.vllm.thinking import ThinkHook

else:
    from vllm.v1.core.sched.interface import SchedulerInterface as _Base

# Below vLLM's own logger, whose handlers and level it shares.
logger = logging.getLogger("vllm.meridian")

_T = TypeVar("_T")


class State(_Base):
    """Without a start, and after `_give_up`, the scheduler is stock vLLM.

    It is mixed into one of vLLM's schedulers, and has their base class, so that a scheduler can switch to a class with
    this one and back.
    """

    # The native engine that follows, and that decides unless it stands aside; None: this is stock vLLM.
    _meridian: _native.Engine | None = None
    _meridian_engine: _native.Engine | None = None
    # What Meridian changes in this scheduler goes through here.
    _meridian_seams: Seams
    # The steps are vLLM's own: the dispatch policy is `native:fcfs`, and no other setting needs Meridian.
    _meridian_stands_aside = False
    # Meridian's hooks in KV memory and thinking, while they are active.
    _meridian_kv: KvHook | None = None
    _meridian_think: ThinkHook | None = None
    # The same hooks, kept while Meridian stands aside.
    _meridian_kv_kept: KvHook | None = None
    _meridian_think_kept: ThinkHook | None = None
    # While `update_from_output` runs: the requests that it ended, whose last tokens the engine has not received yet.
    _meridian_ended: list[Request] | None = None
    # The same for requests of streaming sessions that go on with new input.
    _meridian_continued: list[Request]
    # True while `schedule()` runs: no policy chooses a preemption outside of it.
    _meridian_schedules = False
    # Whether waiting requests may preempt running ones.
    _meridian_preempts_for_waiting = False
    # Whether any service level is configured.
    _meridian_promises = False
    # The outputs of refused requests, each with the number of its client, until the next `update_from_output`.
    _meridian_refused: tuple[tuple[int, EngineCoreOutput], ...] = ()
    _meridian_decode_tokens = 1
    _meridian_diffuses = False
    # The tokens that a lowered budget gave this step, where some prompts are computed in units of more than a token;
    # and whether the last such step left a part of them, too little for a unit perhaps.
    _meridian_lowered_to = 0
    _meridian_left_tokens = False
    # vLLM's model runner fails at a part of a prompt whose request has a seed.
    _meridian_fatal_splits = False
    # An overdue request whose adapter finds no place; requests behind it with other adapters are not admitted.
    _meridian_makes_room_for: Request | None = None
    _meridian_steps_seen = 0
    _meridian_output_preemptions_logged = 0
    _meridian_block_pool: BlockPool
    # Of a scheduler that was started.
    _meridian_samplers: ToSamplers | None = None
    # Nanoseconds that Meridian added to `schedule()` in each of the latest steps; and the hooks' part in this one.
    _meridian_own_ns: deque[int]
    _meridian_hooks_time: OwnTime

    def _guard(self, doing: str, call: Callable[..., _T], *args: Any) -> _T | None:
        """Make a call that only Meridian needs. A defect in it must not end the engine: it goes on as stock vLLM."""
        try:
            return call(*args)
        except DEFECTS:
            self._give_up(doing)
            return None

    def _give_up(self, doing: str) -> None:
        """Return to stock vLLM after a defect of Meridian itself; called where the exception is handled."""
        logger.exception("meridian: failed while %s; this engine goes on as stock vLLM", doing)
        self._meridian = None
        kv, self._meridian_kv = self._meridian_kv, None
        # Running probes end by themselves; their results are ignored.
        think, self._meridian_think = self._meridian_think, None
        for hook, undo in ((kv, "detach"), (think, "show_lookups")):
            try:
                if hook is not None:
                    getattr(hook, undo)()
            except DEFECTS:
                logger.exception("meridian: failed while giving up")
        if not self._meridian_schedules:
            self._end_step()

    @abstractmethod
    def _end_step(self) -> None:
        """Undo the changes of a step in vLLM's objects."""
