"""`MeridianScheduler`: vLLM's own scheduler with the order, token budget and caps of a policy.

The parts: step.py applies a plan around vLLM's `schedule()`, following.py reports the requests to the native engine,
kv.py handles KV memory and preemption, thinking.py ends thinking, and state.py is where a defect of Meridian ends.

While the dispatch policy is `native:fcfs`, a step is vLLM's own, and Meridian only follows it. A swap between two steps
takes over the order or gives it back.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, cast

import vllm
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from meridian.config import MeridianConfig, load_config
from meridian.engine import Generated, Scheduled
from meridian.vllm.channel import ToSamplers
from meridian.vllm.compat import check_seams, check_version, choose_seams
from meridian.vllm.following import Arrivals, Following
from meridian.vllm.kv import KvHook, OwnTime
from meridian.vllm.parts import make_engine, make_think_hook
from meridian.vllm.state import logger
from meridian.vllm.step import Step

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.request_queue import RequestQueue
    from vllm.v1.request import Request

    from meridian import _native

# Latest steps whose own time is kept, for percentiles.
TIMED_STEPS = 8192


class _Meridian(Step, Following):
    """Mixin over one of vLLM's schedulers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._meridian_start(load_config())

    def _meridian_start(self, config: MeridianConfig) -> None:
        check_version(vllm.__version__)
        check_seams(self, vllm.__version__)
        self._meridian_seams = choose_seams(self)
        self._meridian_arrivals = Arrivals()
        engine = make_engine(config, self, serves=True)
        self._meridian_engine = engine
        self._meridian_decode_tokens = max(self.num_sampled_tokens_per_step + self.num_spec_tokens, 1)
        self._meridian_diffuses = getattr(self.vllm_config, "diffusion_config", None) is not None
        self._meridian_fatal_splits = current_platform.is_cpu() and not self.need_mamba_block_aligned_split
        self._meridian_block_pool = self.kv_cache_manager.block_pool
        self._meridian_own_ns = deque(maxlen=TIMED_STEPS)
        self._meridian_hooks_time = OwnTime()
        self._meridian_use(engine)
        logger.info("meridian: outputs: %s", engine.outputs)
        logger.info("meridian: changes vLLM's scheduler by %s", self._meridian_seams.name)
        slots = (config.policy.dispatch, config.policy.eviction, config.policy.budget)
        dispatch, eviction, budget = (slot.source + " in shadow" * (slot.mode == "shadow") for slot in slots)
        logger.info(
            "meridian: dispatch policy %s, eviction policy %s, budget policy %s%s",
            dispatch,
            eviction,
            budget if self._meridian_think_kept is not None else "none",
            "; steps, KV memory and thinking are vLLM's own until the dispatch policy is swapped or promoted"
            if self._meridian_stands_aside
            else "",
        )

    def _meridian_use(self, engine: _native.Engine | None) -> None:
        """Make `engine` follow and decide from now on; None makes this stock vLLM."""
        self._stand_aside()
        if self._meridian_think_kept is not None:
            self._meridian_think_kept.close()
        self._meridian_kv_kept = self._meridian_think_kept = None
        self._meridian_stands_aside = False
        self._meridian = engine
        if engine is None:
            return
        self._meridian_preempts_for_waiting = engine.preempts_for_waiting
        self._meridian_promises = engine.promises
        samplers = self._meridian_samplers = self._meridian_samplers or ToSamplers()
        self._meridian_think_kept = (
            None if self._meridian_diffuses else make_think_hook(self, self._meridian_seams, engine, samplers)
        )
        self._meridian_stands_aside = engine.is_stock
        if not self._meridian_stands_aside:
            self._step_in(engine)

    def _step_in(self, engine: _native.Engine) -> None:
        """Activate Meridian in KV memory, thinking and the waiting queue."""
        think = self._meridian_think = self._meridian_think_kept
        if engine.manages_kv:
            kv = self._meridian_kv_kept
            if kv is None or not kv.is_detached:
                kv = KvHook(self, self._meridian_seams, engine, self._give_up, self._meridian_hooks_time)
                self._meridian_kv_kept = kv
            kv.probes = think
            self._meridian_kv = kv
            kv.attach()
        self._meridian_seams.take()

    def _stand_aside(self) -> None:
        """Leave KV memory, thinking and the waiting queue to vLLM. Live requests keep the limits of their thinking."""
        kv, self._meridian_kv = self._meridian_kv, None
        if kv is not None:
            kv.detach()
        think, self._meridian_think = self._meridian_think, None
        if think is not None:
            think.drop_all()
        if self._meridian_engine is not None:
            self._meridian_seams.give_back()

    def _switch(self, engine: _native.Engine) -> None:
        self._meridian_stands_aside = engine.is_stock is True
        if self._meridian_stands_aside:
            self._stand_aside()
        else:
            self._step_in(engine)

    def _take_over(self) -> None:
        """Report the live requests to the engine."""
        engine = self._meridian
        if engine is None:
            return
        now_ms = time.monotonic() * 1e3
        for request in self.requests.values():
            self._add(engine, request, now_ms)
        told = [Generated(r.request_id, list(r.output_token_ids)) for r in self.requests.values()]
        engine.tokens([told], now_ms)
        computed = {request.request_id: request.num_computed_tokens for request in self.running}
        engine.end(Scheduled(computed), now_ms, False)
        for request in self.requests.values():
            if request.status == RequestStatus.PREEMPTED:
                engine.lost_blocks(request.request_id)
        # This report is no step, so the step-time model must not learn from it.
        engine.idle()

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        engine = self._meridian
        if engine is None:
            output = super().schedule(*args, **kwargs)
            if self._meridian_samplers is not None:
                # What was told before Meridian failed.
                self._meridian_samplers.leave_with(output)
            return output
        began_ns = time.perf_counter_ns()
        now_ms = time.monotonic() * 1e3
        self._guard("planning a step", self._begin_step, engine, now_ms)
        hooks = self._meridian_hooks_time
        hooks.ns = 0
        self._meridian_schedules = True
        planned_ns = time.perf_counter_ns()
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            scheduled_ns = time.perf_counter_ns()
            self._meridian_schedules = False
            self._end_step()
        self._meridian_left_tokens = bool(self._guard("following a step", self._leaves_tokens, output))
        if self._meridian is engine:
            self._guard("following a step", self._observe, engine, output, now_ms)
        if self._meridian_samplers is not None:
            self._meridian_samplers.leave_with(output)
        self._meridian_own_ns.append(time.perf_counter_ns() - scheduled_ns + planned_ns - began_ns + hooks.ns)
        return output

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Whether a waiting request may be admitted."""
        if self._meridian_kv is not None and self._meridian_schedules:
            self._meridian_kv.admission_begins()
        ready = super()._handle_blocked_waiting_request(request)
        is_planned = self._meridian_schedules and self._meridian is not None and not self._meridian_stands_aside
        if not ready or self.lora_config is None or not is_planned:
            return ready
        may_enter = self._guard("counting adapters", self._may_enter, request)
        return ready if may_enter is None else may_enter

    def _may_enter(self, request: Request) -> bool:
        return self._has_room_for(request) and not self._stands_in_the_way(request)

    def _select_waiting_queue_for_scheduling(self) -> RequestQueue | None:
        """vLLM 0.30 asks here before it looks at a waiting request."""
        if self._meridian_kv is not None and self._meridian_schedules:
            self._meridian_kv.admission_begins()
        return super()._select_waiting_queue_for_scheduling()  # pyright: ignore[reportAttributeAccessIssue]

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)
        think = self._meridian_think
        if think is None or stats is None:
            return stats
        without_probes = self._guard("taking probes out of the statistics", think.stats, stats)
        return stats if without_probes is None else without_probes

    def meridian_stats(self) -> dict[str, Any]:
        """`meridian.Stats` of this engine, how Meridian changes its scheduler (`seams`), and `own_ns`: the nanoseconds
        that it added to `schedule()` in each of the latest steps. Empty for a scheduler that was never started."""
        engine = self._meridian_engine
        if engine is None:
            return {}
        return {**engine.stats(), "own_ns": list(self._meridian_own_ns), "seams": self._meridian_seams.name}

    def meridian_limit_thinking(self, request_id: str, max_think_tokens: int) -> bool:
        """Change the limit of think tokens of a live request. Returns False when the request is unknown."""
        think = self._meridian_think
        return think is not None and think.native.limit(request_id, max_think_tokens)

    def meridian_record_signals(self, keep: bool) -> None:
        """Keep the signals of probes and boundaries for `meridian_take_signals`, and measure every request possible."""
        if self._meridian_think is not None:
            self._meridian_think.native.record_signals(keep)

    def meridian_take_signals(self) -> list[tuple[str, int, float | None, int | None, float | None, float | None]]:
        """Signals since the last call: request, think tokens, entropy after a forced end (bits) and the likeliest token
        there, and the path deviation index. Values that a signal does not have are None."""
        return [] if self._meridian_think is None else self._meridian_think.native.take_signals()

    def shutdown(self) -> None:
        self._guard("ending", self._close)
        super().shutdown()

    def _close(self) -> None:
        if self._meridian_think_kept is not None:
            self._meridian_think_kept.close()
        if self._meridian_engine is not None:
            self._meridian_engine.policies.close()
        self._pass_on_log()


def _mixed_into(own: type) -> type:
    return type(f"Meridian{own.__name__}", (_Meridian, own), {})


# The methods of vLLM's schedulers that Meridian overrides.
_OVERRIDDEN = {name for kind in (_Meridian, Step, Following) for name in vars(kind) if hasattr(Scheduler, name)}


def attach_to(scheduler: Any, config: MeridianConfig) -> type:
    """Put Meridian into a scheduler between two steps, and return the class that it had."""
    if not isinstance(scheduler, _Meridian):
        own = type(scheduler)
        # Wrappers that other code has put on the object itself would pass by Meridian's methods.
        inside = {name: scheduler.__dict__.pop(name) for name in _OVERRIDDEN & scheduler.__dict__.keys()}
        methods = {name: staticmethod(wrapper) for name, wrapper in inside.items()}
        scheduler.__class__ = _mixed_into(type(own.__name__, (own,), methods) if inside else own)
        scheduler._meridian_before = own, inside
    elif scheduler._meridian_engine is None and "_meridian_before" in scheduler.__dict__:
        own = scheduler.__dict__["_meridian_before"][0]
    else:
        raise RuntimeError("Meridian is in this scheduler already")
    try:
        scheduler._meridian_start(config)
        scheduler._take_over()
    except BaseException:
        _leave(scheduler, own)
        raise
    return own


def detach_from(scheduler: Any, own: type) -> None:
    """Take Meridian out of a scheduler between two steps; its class becomes `own`.

    Raises:
        RuntimeError: a step with refused requests is in flight; their clients have no answer yet.
    """
    if scheduler._meridian_refused:
        raise RuntimeError("Meridian cannot leave before the refused requests are answered: run another step")
    _leave(scheduler, own)


def _leave(scheduler: Any, own: type) -> None:
    """Give the scheduler the class `own` again, and the wrappers that it had.

    If other code has meanwhile wrapped methods of Meridian, or put a class over its own, they stay and do as vLLM does.
    """
    scheduler._meridian_use(None)
    if scheduler._meridian_engine is not None:
        scheduler._meridian_engine.policies.close()
        scheduler._pass_on_log()
    samplers: ToSamplers | None = getattr(scheduler, "_meridian_samplers", None)
    before = scheduler._meridian_before
    for name in [name for name in scheduler.__dict__ if name.startswith("_meridian")]:
        del scheduler.__dict__[name]
    if type(scheduler).__bases__[0] is _Meridian and not _OVERRIDDEN & scheduler.__dict__.keys():
        scheduler.__class__ = own
        scheduler.__dict__.update(before[1])
    else:
        scheduler._meridian_before = before
    if samplers is not None:
        samplers.configure(None)
        samplers.leave_later(scheduler)


class SyncMeridianScheduler(_Meridian, Scheduler):
    """Meridian for synchronous scheduling."""


class AsyncMeridianScheduler(_Meridian, AsyncScheduler):
    """Meridian for asynchronous scheduling."""


def _over_vllms_own(vllm_config: VllmConfig) -> type[Scheduler]:
    """Meridian over the class that vLLM itself would choose (vllm/config/vllm.py: `diffusion_config`)."""
    is_async = vllm_config.scheduler_config.async_scheduling
    if getattr(vllm_config, "diffusion_config", None) is None:
        return AsyncMeridianScheduler if is_async else SyncMeridianScheduler
    from vllm.v1.core.sched import diffusion_scheduler

    if is_async:
        return cast("type[Scheduler]", _mixed_into(diffusion_scheduler.DiffusionAsyncScheduler))
    # vLLM 0.31 has one for asynchronous scheduling only.
    own = getattr(diffusion_scheduler, "DiffusionScheduler", None)
    return SyncMeridianScheduler if own is None else cast("type[Scheduler]", _mixed_into(own))


class MeridianScheduler:
    """`--scheduler-cls meridian.vllm.MeridianScheduler`: Meridian over the class that vLLM itself would choose, for
    synchronous or asynchronous scheduling, and for a model that generates token by token or by diffusion.

    Raises:
        RuntimeError: this vLLM is not supported.
        ConfigError: `meridian.toml` or the combination of options is not valid.
        PolicyError: the policy was refused.
    """

    def __new__(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Scheduler:  # type: ignore[misc]
        check_version(vllm.__version__)
        return _over_vllms_own(vllm_config)(vllm_config, *args, **kwargs)
