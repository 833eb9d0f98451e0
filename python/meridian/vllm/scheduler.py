"""`MeridianScheduler`: vLLM's own scheduler with the order, token budget and caps of a policy.

No code of `schedule()` is copied. Around `super().schedule()`, the mixin puts the running list and the waiting queue
into the policy's order and sets the step's token budget. `schedule()` reads both on every call
(vllm/v1/core/sched/scheduler.py: `self.running`, `self.waiting`, `self.max_num_scheduled_tokens`). It asks
`_reserve_prefill_lookahead` how many tokens a request may take; the mixin applies token caps there. kv.py handles KV
memory and preemption, and thinking.py ends thinking.

While the dispatch policy is `native:fcfs`, a step is vLLM's own, and Meridian only follows it. A swap between two steps
takes over the order or gives it back.

The file is long because it is one mixin whose methods replace vLLM's.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import vllm
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from meridian import _native
from meridian.config import MeridianConfig, load_config
from meridian.engine import MAX_NAME_CHARACTERS
from meridian.vllm.answers import report
from meridian.vllm.compat import admitted_first, check_seams, check_version
from meridian.vllm.kv import DEFECTS, KvHook
from meridian.vllm.parts import hand_over, make_engine, make_think_hook
from meridian.vllm.queue import PlannedPriorityQueue
from meridian.vllm.thinking import PROBE, ThinkHook

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.request_queue import RequestQueue
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

# Below vLLM's own logger, whose handlers and level it shares.
logger = logging.getLogger("vllm.meridian")

# Most waiting requests that a policy sees in a step; the rest keep their place behind them.
WAITING_WINDOW = 4096
# Latest steps whose own time is kept, for percentiles.
TIMED_STEPS = 8192
# Steps between two searches for requests that vLLM has dropped without a notice.
REAP_STEPS = 4096


@dataclass(frozen=True)
class _Generated:
    """The fields of vLLM's `EngineCoreOutput` that the engine reads."""

    request_id: str
    new_token_ids: list[int]


class _Meridian(SchedulerInterface):
    """Mixin over one of vLLM's schedulers. It shares their base, so a scheduler can switch to this class and back."""

    # Without a start, and after `_give_up`, this is stock vLLM.
    #
    # The native engine that follows, and that decides unless it stands aside; None: this is stock vLLM.
    _meridian: _native.Engine | None = None
    _meridian_engine: _native.Engine | None = None
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
    # Whether waiting requests may preempt running ones; and the requests that gave way in this step.
    _meridian_preempts_for_waiting = False
    _meridian_gave_way: tuple[Request, ...] = ()
    # vLLM's own token budget, while a plan has replaced it.
    _meridian_own_budget: int | None = None
    _meridian_decode_tokens = 1
    _meridian_diffuses = False
    _meridian_steps_seen = 0
    _meridian_faults_logged = 0
    _meridian_output_preemptions_logged = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        cast("Any", super()).__init__(*args, **kwargs)
        self._meridian_start(load_config())

    def _meridian_start(self, config: MeridianConfig) -> None:
        check_version(vllm.__version__)
        scheduler = self._scheduler()
        check_seams(scheduler, vllm.__version__)
        engine = make_engine(config, scheduler, serves=True)
        self._meridian_engine = engine
        sampled = getattr(scheduler, "num_sampled_tokens_per_step", 1)
        self._meridian_decode_tokens = max(sampled + scheduler.num_spec_tokens, 1)
        self._meridian_diffuses = getattr(scheduler.vllm_config, "diffusion_config", None) is not None
        self._meridian_block_pool = scheduler.kv_cache_manager.block_pool
        self._meridian_own_ns: deque[int] = deque(maxlen=TIMED_STEPS)
        self._meridian_use(engine)
        logger.info("meridian: outputs: %s", engine.outputs)
        logger.info(
            "meridian: dispatch policy %s, eviction policy %s, budget policy %s%s",
            config.policy.dispatch.source,
            config.policy.eviction.source,
            config.policy.budget.source if self._meridian_think_kept is not None else "none",
            "; steps, KV memory and thinking are vLLM's own until the dispatch policy is swapped"
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
        self._meridian_think_kept = None if self._meridian_diffuses else make_think_hook(self._scheduler(), engine)
        self._meridian_stands_aside = engine.is_stock
        if not self._meridian_stands_aside:
            self._step_in(engine)

    def _step_in(self, engine: _native.Engine) -> None:
        """Activate Meridian in KV memory, thinking and the waiting queue."""
        scheduler = self._scheduler()
        think = self._meridian_think = self._meridian_think_kept
        if engine.manages_kv:
            kv = self._meridian_kv_kept
            if kv is None or not kv.is_detached:
                kv = self._meridian_kv_kept = KvHook(scheduler, engine, self._give_up)
            kv.probes = think
            self._meridian_kv = kv
            kv.attach()
        if scheduler.policy is SchedulingPolicy.PRIORITY:
            scheduler.waiting = PlannedPriorityQueue(scheduler.waiting)

    def _stand_aside(self) -> None:
        """Leave KV memory, thinking and the waiting queue to vLLM. Live requests keep the limits of their thinking."""
        kv, self._meridian_kv = self._meridian_kv, None
        if kv is not None:
            kv.detach()
        think, self._meridian_think = self._meridian_think, None
        if think is not None:
            think.drop_all()
        self._give_queue_back()

    def _give_queue_back(self) -> None:
        queue = self._scheduler().waiting
        if isinstance(queue, PlannedPriorityQueue):
            self._scheduler().waiting = queue.in_vllms_own()

    def _take_over(self) -> None:
        """Report the live requests to the engine."""
        engine, scheduler = self._meridian, self._scheduler()
        if engine is None:
            return
        for request in scheduler.requests.values():
            _add(engine, request, self._keeps_whole(request))
            if request.output_token_ids:
                engine.generated([_Generated(request.request_id, list(request.output_token_ids))])
        computed = {request.request_id: request.num_computed_tokens for request in scheduler.running}
        engine.scheduled(time.monotonic() * 1e3, computed)
        for request in scheduler.requests.values():
            if request.status == RequestStatus.PREEMPTED:
                engine.lost_blocks(request.request_id)
        # This report is no step, so the step-time model must not learn from it.
        engine.idle()

    def _scheduler(self) -> Scheduler:
        """This object, as the class it is mixed into."""
        return cast("Scheduler", self)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        engine = self._meridian
        parent = cast("Scheduler", super())
        if engine is None:
            return parent.schedule(*args, **kwargs)
        started_ns = time.perf_counter_ns()
        now_ms = time.monotonic() * 1e3
        try:
            self._begin_step(engine, self._scheduler(), now_ms)
        except DEFECTS:
            self._give_up("planning a step")
        planned_ns = time.perf_counter_ns()
        self._meridian_schedules = True
        try:
            output = parent.schedule(*args, **kwargs)
        finally:
            self._meridian_schedules = False
            scheduled_ns = time.perf_counter_ns()
            self._end_step()
        if self._meridian is engine:
            try:
                think = self._meridian_think
                if think is not None:
                    think.settle(output)
                self._observe(engine, output, now_ms)
            except DEFECTS:
                self._give_up("following a step")
        self._meridian_own_ns.append(time.perf_counter_ns() - scheduled_ns + planned_ns - started_ns)
        return output

    def _begin_step(self, engine: _native.Engine, scheduler: Scheduler, now_ms: float) -> None:
        """Plan a step and apply the plan; `_end_step` undoes it, even after a partial application."""
        is_stock = engine.is_stock is True
        if is_stock != self._meridian_stands_aside:
            self._meridian_stands_aside = is_stock
            if is_stock:
                self._stand_aside()
            else:
                self._step_in(engine)
        own_budget = scheduler.max_num_scheduled_tokens
        if is_stock and not engine.is_watched:
            pool = self._meridian_block_pool
            waiting = len(scheduler.waiting) + len(admitted_first(scheduler))
            free_blocks = pool.get_num_free_blocks()
            # Only those that wait ask for a seat.
            seats = max(self._free_seats(scheduler), 0) if waiting else 0
            decode = self._meridian_decode_tokens
            engine.keep(now_ms, own_budget, free_blocks, pool.num_gpu_blocks, waiting, decode, seats)
            return
        budget, caps = self._plan(engine, scheduler, now_ms, own_budget)
        if not self._meridian_diffuses:
            self._meridian_own_budget = own_budget
            scheduler.max_num_scheduled_tokens = budget
        probes = self._offer_probes(scheduler, budget)
        if caps is not None or probes:
            self._apply_caps(scheduler, caps or {}, probes)
        if self._meridian_kv is not None:
            self._meridian_kv.step_begins()

    def _end_step(self) -> None:
        """Undo the changes of a step in vLLM's objects. A second call does nothing."""
        scheduler = self._scheduler()
        own_budget, self._meridian_own_budget = self._meridian_own_budget, None
        if own_budget is not None:
            scheduler.max_num_scheduled_tokens = own_budget
        vars(self).pop("_reserve_prefill_lookahead", None)
        queue = scheduler.waiting
        gave_way, self._meridian_gave_way = self._meridian_gave_way, ()
        for request in gave_way:
            queue.add_request(request)
        if isinstance(queue, PlannedPriorityQueue):
            queue.plan_ends()
        if self._meridian is None:
            # Meridian failed while vLLM was taking requests from its queue.
            self._give_queue_back()
            return
        try:
            if self._meridian_kv is not None:
                self._meridian_kv.step_ends()
            if self._meridian_think is not None:
                self._meridian_think.show_lookups()
        except DEFECTS:
            self._give_up("ending a step")

    def _plan(
        self, engine: _native.Engine, scheduler: Scheduler, now_ms: float, own_budget: int
    ) -> tuple[int, dict[str, int] | None]:
        """Order `running` and `waiting` in place; returns the step's token budget and caps."""
        think = self._meridian_think
        if think is not None:
            think.decide(now_ms)
        running = cast("list[object]", scheduler.running)
        probes: list[object] = []
        if think is not None and think.running:
            probes = [request for request in scheduler.running if request.request_id.startswith(PROBE)]
            running = [request for request in running if request not in probes]
        free_seats = self._free_seats(scheduler)
        queue = scheduler.waiting
        # Waiting requests matter only if a seat is free or if they may preempt.
        sees_waiting = free_seats > 0 or self._meridian_preempts_for_waiting
        window = list(islice(queue, WAITING_WINDOW)) if queue and sees_waiting else None
        pool = self._meridian_block_pool
        budget, caps, _, waiting_changed, preempted = engine.plan(
            running,
            cast("list[object] | None", window),
            now_ms,
            own_budget,
            pool.get_num_free_blocks(),
            pool.num_gpu_blocks,
            max(free_seats, 0),
            len(queue) + len(admitted_first(scheduler)),
            self._meridian_decode_tokens,
        )
        if probes:
            # Last, so that vLLM preempts them first.
            scheduler.running[:] = cast("list[Request]", [*running, *probes])
        if waiting_changed and window is not None:
            _put_first(queue, window)
        if preempted:
            self._preempt_for_waiting(scheduler, cast("list[Request]", preempted))
        whole_prompts = not scheduler.scheduler_config.enable_chunked_prefill
        if budget < own_budget and whole_prompts and not any(map(_can_take_tokens, scheduler.running)):
            # The budget counted on requests whose tokens are in flight; an unsplittable prompt may need more.
            budget = own_budget
        return budget, caps

    def _preempt_for_waiting(self, scheduler: Scheduler, preempted: list[Request]) -> None:
        """Make running requests give way to waiting ones, as `reset_prefix_cache` preempts outside of `schedule()`.

        They wait again after the step: vLLM delivers the tokens in flight of a preempted request, so it must not resume
        in the same step."""
        timestamp = time.monotonic()
        drops_output = getattr(scheduler, "requires_kv_delivery", False)
        self._meridian_schedules = True
        try:
            for request in preempted:
                scheduler.running.remove(request)
                self._preempt_request(request, timestamp, drop_stale_output=drops_output)
                scheduler.waiting.remove_request(request)
                self._meridian_gave_way = (*self._meridian_gave_way, request)
        finally:
            self._meridian_schedules = False

    def _free_seats(self, scheduler: Scheduler) -> int:
        most = getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs)
        return most - len(scheduler.running) - scheduler.num_waiting_for_streaming_input

    def _offer_probes(self, scheduler: Scheduler, budget: int) -> set[str]:
        """Offer the probes that this step may carry, behind all waiting requests, and return their names."""
        think = self._meridian_think
        if think is None:
            return set()
        seats = self._free_seats(scheduler) - len(scheduler.waiting)
        return think.offer(budget, seats, cast("Scheduler", super()).add_request) if seats > 0 else set()

    def _apply_caps(self, scheduler: Scheduler, caps: dict[str, int], probes: set[str]) -> None:
        """Make `schedule()` give each capped request at most its cap, and a probe all or nothing. `_end_step` removes
        the attribute, so that steps without caps do not pay for the call.

        Requests that the plan leaves out stand behind the others, both in the running list and in the waiting queue. If
        no request before them can take a token (tokens in flight, a busy encoder), the step would be empty. Then
        running requests are served without caps, or else the first waiting request."""
        reserve = scheduler._reserve_prefill_lookahead
        # All or nothing: less than a whole decode, a chunk that would cut Mamba's state, and part of a canvas.
        least = self._meridian_decode_tokens
        whole = scheduler.need_mamba_block_aligned_split or self._meridian_diffuses
        served = overruled = False
        # vLLM 0.30 counts only the adapters that a step serves, and asks nobody before it admits another one.
        counts_adapters = hasattr(Scheduler, "_handle_blocked_waiting_request")
        serves_adapters = scheduler.lora_config is not None and not counts_adapters

        def capped(request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
            nonlocal served, overruled
            allowed = reserve(request, num_computed_tokens, num_new_tokens)
            try:
                if request.request_id in probes:
                    return allowed if num_computed_tokens + allowed >= request.num_tokens else 0
                cap = caps.get(request.request_id)
                if (
                    serves_adapters
                    and cap is not None
                    and request.lora_request
                    and request.status == RequestStatus.RUNNING
                ):
                    cap = max(cap, least)
                given = allowed
                if cap is not None and cap < least and allowed > 0:
                    if served and not (overruled and request.status == RequestStatus.RUNNING):
                        return 0
                    if not overruled:
                        overruled = True
                        self._overruled()
                elif cap is not None and cap < allowed and not whole:
                    given = cap
                served = served or given > 0
                return given
            except DEFECTS:
                self._give_up("applying a cap")
                return allowed

        vars(self)["_reserve_prefill_lookahead"] = capped
        if probes and self._meridian_think is not None:
            self._meridian_think.hide_lookups(probes)

    def _overruled(self) -> None:
        """Count a plan that left no request to run in this step."""
        if self._meridian is not None:
            try:
                self._meridian.overruled()
            except DEFECTS:
                self._give_up("counting a plan that left nothing to run")

    def _keeps_whole(self, request: Request) -> bool:
        """Whether vLLM may not split this request's prompt into chunks. On a CPU, its model runner fails at a part of a
        prompt whose request has a seed (vllm/v1/worker/gpu_model_runner.py: `generator.set_offset`)."""
        config = self._scheduler().scheduler_config
        params = request.sampling_params
        is_seeded = params is not None and params.seed is not None and current_platform.is_cpu()
        cannot_split = config.disable_chunked_mm_input and bool(request.mm_features)
        return not config.enable_chunked_prefill or cannot_split or is_seeded

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Whether a waiting request may be admitted. vLLM counts the adapters of the requests in this step. Running
        requests that a plan leaves out count too, because a later step serves them together."""
        ready = cast("Scheduler", super())._handle_blocked_waiting_request(request)
        scheduler = self._scheduler()
        is_planned = self._meridian_schedules and self._meridian is not None and not self._meridian_stands_aside
        if not ready or scheduler.lora_config is None or not is_planned:
            return ready
        try:
            return request.lora_request is None or self._has_room_for(request.lora_request.lora_int_id)
        except DEFECTS:
            self._give_up("counting adapters")
            return ready

    def _has_room_for(self, adapter: int) -> bool:
        scheduler = self._scheduler()
        running = {r.lora_request.lora_int_id for r in scheduler.running if r.lora_request is not None}
        return adapter in running or len(running) < cast("Any", scheduler.lora_config).max_loras

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = cast("Any", super()).make_stats(*args, **kwargs)
        think = self._meridian_think
        if think is None or stats is None:
            return stats
        try:
            return think.stats(stats)
        except DEFECTS:
            self._give_up("taking probes out of the statistics")
            return stats

    def _observe(self, engine: _native.Engine, output: SchedulerOutput, now_ms: float) -> None:
        """Report the result of scheduling to the mirror."""
        for new in output.scheduled_new_reqs:
            engine.admitted(new.req_id, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        if cached.resumed_req_ids:
            for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                if request_id in cached.resumed_req_ids:
                    engine.admitted(request_id, computed)
        if self._meridian_decode_tokens > 1:
            # Rejected speculative tokens lower the engine's own count.
            for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                engine.set_computed(request_id, computed)
        engine.scheduled(now_ms, output.num_scheduled_tokens)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        ended: list[Request] = []
        continued: list[Request] = []
        self._meridian_ended, self._meridian_continued = ended, continued
        try:
            outputs = cast("Scheduler", super()).update_from_output(scheduler_output, model_runner_output)
        finally:
            self._meridian_ended = None
        engine = self._meridian
        if engine is not None:
            now_ms = time.monotonic() * 1e3
            try:
                think = self._meridian_think
                if think is not None:
                    think.receive()
                    think.take_out(outputs)
                for client in outputs.values():
                    if client.outputs:
                        engine.generated(cast("list[object]", client.outputs), now_ms)
                if think is not None and ended:
                    report(think.native, ended, outputs.values())
                self._pass_on_log()
                self._log_faults(engine)
            except DEFECTS:
                self._give_up("following generated tokens")
            self._remove(ended)
            self._continue(continued)
            self._reap(now_ms)
            self._drop_pointless_probes()
        return outputs

    def add_request(self, request: Request) -> None:
        cast("Scheduler", super()).add_request(request)
        engine = self._meridian
        # Later input of a streaming session arrives under a known id; the first object stays the request.
        if engine is not None and self._scheduler().requests.get(request.request_id) is request:
            try:
                _add(engine, request, self._keeps_whole(request), self._meridian_think)
                if self._meridian_kv is not None:
                    self._meridian_kv.request_arrives(request)
            except DEFECTS:
                self._give_up("taking in a request")

    def _update_request_as_session(self, session: Request, update: Any) -> None:
        """A streaming session goes on with new input (vllm/v1/core/sched/scheduler.py): a new request to the engine."""
        cast("Any", super())._update_request_as_session(session, update)
        if self._meridian_ended is None:
            self._continue([session])
        else:
            # The engine has not received the last tokens of its turn.
            self._meridian_continued.append(session)

    def _continue(self, sessions: list[Request]) -> None:
        """Add the requests of streaming sessions again, with their new prompts and parameters."""
        engine = self._meridian
        if engine is not None:
            try:
                for session in sessions:
                    engine.remove(session.request_id, "continues")
                    _add(engine, session, self._keeps_whole(session), self._meridian_think)
            except DEFECTS:
                self._give_up("following a streaming session")

    def _drop_pointless_probes(self) -> None:
        think = self._meridian_think
        if think is not None and think.running:
            try:
                think.drop_pointless()
            except DEFECTS:
                self._give_up("giving up probes")

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        engine, kv = self._meridian, self._meridian_kv
        blocks = -1
        try:
            answers = engine is not None and self._meridian_schedules and engine.phase(request.request_id) == "output"
            if answers and kv is not None:
                blocks = kv.unshared_blocks(request)
            if kv is not None:
                kv.request_pauses(request)
        except DEFECTS:
            self._give_up("counting the blocks of a preempted request")
        cast("Scheduler", super())._preempt_request(request, *args, **kwargs)
        engine = self._meridian
        if engine is not None:
            try:
                if not self._meridian_schedules:
                    engine.lost_blocks(request.request_id)
                    return
                avoidable = engine.preempted(request.request_id, max(blocks, 0))
                if blocks >= 0:
                    self._log_output_preemption(engine, request, blocks, avoidable)
            except DEFECTS:
                self._give_up("following preempted")

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        kv = self._meridian_kv
        if kv is not None:
            try:
                kv.request_ends(request)
            except DEFECTS:
                self._give_up("following the end of a request")
        freed = cast("Scheduler", super())._free_request(request, *args, **kwargs)
        if self._meridian_ended is None:
            self._remove([request])
        else:
            self._meridian_ended.append(request)
        return freed

    def _remove(self, requests: list[Request]) -> None:
        engine = self._meridian
        if engine is not None:
            try:
                for request in requests:
                    reason = request.get_finished_reason()
                    engine.remove(request.request_id, "" if reason is None else str(reason))
            except DEFECTS:
                self._give_up("following remove")

    def _reap(self, now_ms: float) -> None:
        """Every `REAP_STEPS` steps, forget requests that vLLM has dropped without a notice."""
        self._meridian_steps_seen += 1
        engine = self._meridian
        if engine is not None and self._meridian_steps_seen % REAP_STEPS == 0:
            try:
                engine.reap(now_ms, cast("dict[str, object]", self._scheduler().requests))
            except DEFECTS:
                self._give_up("looking for requests that were dropped")

    def meridian_stats(self) -> dict[str, Any]:
        """`meridian.Stats` of this engine, and `own_ns`: the nanoseconds that Meridian added to `schedule()` in each of
        the latest steps. Empty for a scheduler that was never started."""
        engine, think = self._meridian_engine, self._meridian_think_kept
        refused = 0 if think is None else think.refused_datagrams
        own = {"own_ns": list(self._meridian_own_ns), "refused_datagrams": refused} if engine is not None else {}
        return {} if engine is None else {**engine.stats(), **own}

    def _give_up(self, doing: str) -> None:
        """Return to stock vLLM after a defect of Meridian itself, which must not end the engine."""
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

    def _pass_on_log(self) -> None:
        """Pass the host's log lines, from any thread, to Python's logger."""
        for level, line in _native.take_log():
            logger.log(level, "meridian: %s", line)

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
        try:
            if self._meridian_think_kept is not None:
                self._meridian_think_kept.close()
            if self._meridian_engine is not None:
                self._meridian_engine.policies.close()
            self._pass_on_log()
        except DEFECTS:
            self._give_up("ending")
        cast("Scheduler", super()).shutdown()

    def _log_output_preemption(self, engine: _native.Engine, request: Request, blocks: int, avoidable: bool) -> None:
        """Log output preemptions at each doubling of their count: an engine that is too small preempts constantly."""
        count = engine.output_preemptions
        if count >= 2 * self._meridian_output_preemptions_logged:
            self._meridian_output_preemptions_logged = count
            logger.warning(
                "meridian: request %s lost %d KV blocks while it answered%s; %d such preemptions so far",
                request.request_id,
                blocks,
                ", although one that thinks could have gone" if avoidable else ", for want of KV memory",
                count,
            )

    def _log_faults(self, engine: _native.Engine) -> None:
        faults = engine.fault_count
        # Log the first fault, then each doubling: a policy that faults every step must not fill the log.
        if faults > self._meridian_faults_logged and faults >= 2 * self._meridian_faults_logged:
            self._meridian_faults_logged = faults
            stats = engine.stats()
            logger.warning(
                "meridian: policy %s faulted %d times, the native default decided those steps; last: %s",
                stats["policy"],
                faults,
                stats["last_fault"],
            )


def _put_first(queue: RequestQueue, order: list[Request]) -> None:
    """Put the front of the queue, which holds exactly these requests, into this order."""
    if isinstance(queue, PlannedPriorityQueue):
        queue.plan(order)
        return
    waiting = cast("deque[Request]", queue)
    for _ in order:
        waiting.popleft()
    waiting.extendleft(reversed(order))


def _add(engine: _native.Engine, request: Request, whole_prompt: bool, think: ThinkHook | None = None) -> None:
    """Add a request to the engine; with `think`, follow its thinking."""
    arrival_ms = (time.monotonic() - max(time.time() - request.arrival_time, 0.0)) * 1e3
    tenant, session, deadline_ms = _client_facts(request)
    traceparent = _traceparent(request)
    asked = None if think is None else think.asked(request)
    added = engine.add(
        request,
        request.request_id,
        prompt=request.prompt_token_ids or [],
        prompt_tokens=request.num_prompt_tokens,
        max_tokens=request.max_tokens if think is None else think.most_tokens(request),
        arrival_ms=arrival_ms,
        deadline_ms=arrival_ms + deadline_ms,
        priority=request.priority,
        tenant=tenant,
        session=session,
        whole_prompt=whole_prompt,
        client=None if asked is None else asked.client,
        interrupts=[] if asked is None else asked.interrupts,
        traceparent=traceparent,
        ignores_eos=request.sampling_params is not None and request.sampling_params.ignore_eos,
        has_mask=asked is not None and asked.has_mask,
        plain=asked is not None and asked.plain,
    )
    if think is not None and asked is not None and not isinstance(added, bool):
        think.follow(request, asked, *added)


def _can_take_tokens(request: Request) -> bool:
    """Whether the request has tokens that are neither computed nor in flight."""
    return request.num_tokens_with_spec + request.num_output_placeholders > request.num_computed_tokens


def _client_facts(request: Request) -> tuple[str, str, float]:
    """Tenant, session and deadline (milliseconds after arrival) from the client's `vllm_xargs`, or the session that
    vLLM itself knows. Invalid values are ignored, because they must not fail the request of a client that does not use
    Meridian."""
    params = request.sampling_params
    given = (params.extra_args if params is not None else None) or {}
    tenant, session = (_name(given.get(key)) for key in ("meridian_tenant", "meridian_session"))
    session = session or _name(getattr(request, "session_id", None)) or _hinted_session(request)
    deadline = given.get("meridian_deadline_ms", math.inf)
    if isinstance(deadline, bool) or not isinstance(deadline, int | float) or not deadline > 0:
        deadline = math.inf
    return tenant, session, float(deadline)


def _hinted_session(request: Request) -> str:
    """The session that an orchestrator names in a hint about KV (vllm/v1/kv_hints): the first action's `session_id`."""
    actions = getattr(getattr(request, "kv_hints", None), "actions", ())
    return next(filter(None, (_name(action.payload.get("session_id")) for action in actions)), "")


def _traceparent(request: Request) -> str | None:
    """The W3C header of the caller. vLLM passes its headers on if it sends traces itself; other clients give the header
    as `meridian_traceparent` in `vllm_xargs`."""
    headers = getattr(request, "trace_headers", None)
    if headers is not None and isinstance(header := headers.get("traceparent"), str):
        return header[:MAX_NAME_CHARACTERS]
    params = request.sampling_params
    given = (params.extra_args if params is not None else None) or {}
    header = given.get("meridian_traceparent")
    return header if isinstance(header, str) and len(header) <= MAX_NAME_CHARACTERS else None


def _name(given: object) -> str:
    return given if isinstance(given, str) and len(given) <= MAX_NAME_CHARACTERS else ""


def _mixed_into(own: type) -> type:
    return type(f"Meridian{own.__name__}", (_Meridian, own), {})


def attach_to(scheduler: Any, config: MeridianConfig) -> type:
    """Put Meridian into a scheduler between two steps, and return the class that it had."""
    own = type(scheduler)
    if issubclass(own, _Meridian):
        raise RuntimeError("Meridian is in this scheduler already")
    before = set(scheduler.__dict__)
    scheduler.__class__ = _mixed_into(own)
    try:
        scheduler._meridian_start(config)
        scheduler._take_over()
    except BaseException:
        _leave(scheduler, own, before)
        raise
    return own


def detach_from(scheduler: Any, own: type) -> None:
    """Take Meridian out of a scheduler between two steps; its class becomes `own`."""
    _leave(scheduler, own, {name for name in scheduler.__dict__ if "_meridian" not in name})


def _leave(scheduler: Any, own: type, attributes: set[str]) -> None:
    """Give the scheduler the class `own` again, with only these attributes."""
    scheduler._meridian_use(None)
    if scheduler._meridian_engine is not None:
        scheduler._meridian_engine.policies.close()
        scheduler._pass_on_log()
    hand_over(scheduler.vllm_config, None)
    scheduler.__class__ = own
    for name in set(scheduler.__dict__) - attributes:
        del scheduler.__dict__[name]


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
