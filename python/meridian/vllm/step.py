"""One step: the order, token budget and caps of a plan in vLLM's objects, from before `schedule()` until after it.

No code of `schedule()` is copied. It reads `self.running`, `self.waiting` and `self.max_num_scheduled_tokens` on every
call (vllm/v1/core/sched/scheduler.py), and asks `_reserve_prefill_lookahead` how many tokens a request may take. The
plan is applied there, through the scheduler's seams (seams.py).
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, FinishReason
from vllm.v1.request import RequestStatus

from meridian.vllm.following import fails_if_split
from meridian.vllm.kv import DEFECTS, can_take_tokens, ends_in_flight
from meridian.vllm.refusals import REFUSED
from meridian.vllm.state import State
from meridian.vllm.thinking import PROBE

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from meridian import _native

# Most waiting requests that a policy sees in a step; the rest keep their place behind them.
WAITING_WINDOW = 4096


class Step(State):
    """The part of the scheduler that applies a plan and undoes it."""

    def _begin_step(self, engine: _native.Engine, now_ms: float) -> None:
        """Plan a step and apply the plan; `_end_step` undoes it, even after a partial application."""
        self._meridian_lowered_to, self._meridian_makes_room_for = 0, None
        plan = self._plan(engine, now_ms)
        if plan is None:
            # A swap has taken over the order, or has given it back.
            self._switch(engine)
            plan = self._plan(engine, now_ms)
        if plan is None or self._meridian_stands_aside:
            return
        think, kv = self._meridian_think, self._meridian_kv
        budget = plan.token_budget
        own_budget = self.max_num_scheduled_tokens
        if budget < own_budget:
            if plan.has_units and (self._meridian_left_tokens or not any(map(can_take_tokens, self.running))):
                # vLLM alone knows what requests take whose tokens are in flight or cached, or that it passes over: the
                # budget may be too small for a prompt that is computed whole.
                budget = own_budget
            elif not self._meridian_diffuses:
                self._meridian_seams.lower_budget(budget)
                self._meridian_lowered_to = budget if plan.has_units else 0
        if plan.overdue is not None:
            self._meridian_makes_room_for = self._lacks_place(plan.overdue)
        probes: set[str] = set()
        if think is not None:
            think.tell(plan.orders, plan.follows_thinking)
            if plan.follows_thinking:
                probes = self._offer_probes(budget)
        keeps_whole = plan.has_units and self._meridian_fatal_splits
        if plan.caps is not None or probes or keeps_whole or self._meridian_makes_room_for is not None:
            self._apply_caps(plan.caps or {}, probes, own_budget)
        if kv is not None:
            kv.step_begins(plan.prompt_blocks)

    @abstractmethod
    def _switch(self, engine: _native.Engine) -> None:
        """Take over the steps from vLLM, or give them back."""

    def _plan(self, engine: _native.Engine, now_ms: float) -> _native.StepPlan | None:
        """Plan a step, with `running` and `waiting` in their new order; None where Meridian has to step in or aside."""
        think, seams = self._meridian_think, self._meridian_seams
        running = self.running
        probes: list[Request] = []
        if think is not None and think.running:
            probes = [request for request in self.running if request.request_id.startswith(PROBE)]
            running = [request for request in running if request not in probes]
        free_seats = self._free_seats()
        queue = self.waiting
        waiting = len(queue) + len(getattr(self, seams.admitted_first))
        # Waiting requests matter only if a seat is free or if they may preempt, and if anyone looks at them.
        window, gathers, newest = None, False, set[int]()
        # While vLLM pauses, it admits no request from this queue, so none may take the place of a running one.
        admits = self.pause_state == PauseState.UNPAUSED
        if queue and admits and (free_seats > 0 or self._meridian_preempts_for_waiting):
            if not self._meridian_stands_aside or engine.is_watched:
                gathers = self._meridian_promises and len(queue) > WAITING_WINDOW and isinstance(queue, deque)
                if gathers:
                    seams.gather(WAITING_WINDOW)
                window = list(islice(queue, WAITING_WINDOW))
                newest = {id(request) for request in window[WAITING_WINDOW // 2 :]} if gathers else newest
        elif self._meridian_stands_aside and not waiting:
            # Only those that wait ask for a seat.
            free_seats = 0
        pool = self._meridian_block_pool
        try:
            plan = engine.begin(
                running,
                window,
                now_ms,
                self.max_num_scheduled_tokens,
                pool.free_block_queue.num_free_blocks,
                pool.num_gpu_blocks,
                max(free_seats, 0),
                waiting,
                self._meridian_decode_tokens,
                self._meridian_stands_aside,
                think is not None,
            )
        finally:
            if gathers and window is not None:
                seams.spread(window, newest, max(free_seats, 0))
        if plan is None:
            return None
        if probes:
            # Last, so that vLLM preempts them first.
            seams.order_running([*running, *probes])
        if plan.waiting_changed and window is not None and not gathers:
            seams.put_waiting_first(window)
        if plan.preempted is not None:
            self._preempt_for_waiting(plan.preempted)
        if plan.refused is not None:
            self._refuse(plan.refused)
        return plan

    def _end_step(self) -> None:
        """Undo the changes of a step in vLLM's objects. A second call does nothing."""
        if self._meridian_seams.is_changed:
            self._meridian_seams.step_ends()
        if self._meridian is None:
            # Meridian failed while vLLM was taking requests from its queue.
            self._meridian_seams.give_back()
            return
        if self._meridian_kv is not None:
            self._guard("ending a step", self._meridian_kv.step_ends)
        if self._meridian_think is not None:
            self._guard("ending a step", self._meridian_think.show_lookups)

    def _preempt_for_waiting(self, preempted: list[Request]) -> None:
        """Make running requests give way to waiting ones, as `reset_prefix_cache` preempts outside of `schedule()`.

        They wait again after the step: vLLM delivers the tokens in flight of a preempted request, so it must not resume
        in the same step."""
        timestamp = time.monotonic()
        self._meridian_schedules = True
        try:
            for request in preempted:
                self._meridian_seams.give_way(request, timestamp)
        finally:
            self._meridian_schedules = False

    def _refuse(self, late: list[Request]) -> None:
        """End waiting requests of which vLLM has computed nothing; this step's outputs tell their clients."""
        ended: list[str] = []
        outputs: list[tuple[int, EngineCoreOutput]] = []
        for request in late:
            is_untouched = request.status == RequestStatus.WAITING and not request.num_computed_tokens
            if not is_untouched or request.num_output_tokens or request.sampling_params is None:
                continue
            # Without the time of a first step, vLLM's time in the queue would be negative (vllm/v1/metrics/stats.py).
            if self.log_stats:
                request.record_event(EngineCoreEventType.SCHEDULED)
            output = EngineCoreOutput(
                request.request_id,
                [],
                finish_reason=FinishReason.ABORT,
                stop_reason=REFUSED,
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
            ended.append(request.request_id)
            outputs.append((request.client_index, output))
        # All at once: each call goes through the whole queue.
        self.finish_requests(ended, RequestStatus.FINISHED_ABORTED)
        self._meridian_refused = (*self._meridian_refused, *outputs)

    def _free_seats(self) -> int:
        most = getattr(self, self._meridian_seams.seats)
        return most - len(self.running) - self.num_waiting_for_streaming_input

    def _offer_probes(self, budget: int) -> set[str]:
        """Offer the probes that this step may carry, behind all waiting requests, and return their names."""
        think = self._meridian_think
        seats = self._free_seats() - len(self.waiting)
        if think is None or seats <= 0:
            return set()
        # vLLM's own: a probe is no request of the engine.
        return think.offer(budget, seats, super(State, self).add_request)

    def _lacks_place(self, overdue: list[Request]) -> Request | None:
        """The first overdue request whose adapter has no place beside those of running requests."""
        if self.lora_config is None:
            return None
        return next((request for request in overdue if not self._has_room_for(request)), None)

    def _has_room_for(self, request: Request) -> bool:
        """Whether the request's adapter has a place. vLLM counts the adapters of the requests in this step. Running
        requests that a plan leaves out count too, because a later step serves them together."""
        if request.lora_request is None:
            return True
        adapter = request.lora_request.lora_int_id
        running = {r.lora_request.lora_int_id for r in self.running if r.lora_request and not ends_in_flight(r)}
        return adapter in running or len(running) < cast("Any", self.lora_config).max_loras

    def _stands_in_the_way(self, request: Request) -> bool:
        """Whether a waiting request would keep the adapter of an overdue one from getting a place."""
        first = self._meridian_makes_room_for
        if first is None or request.lora_request is None:
            return False
        is_behind = self.policy is not SchedulingPolicy.PRIORITY or request.priority >= first.priority
        return is_behind and request.lora_request.lora_int_id != cast("Any", first.lora_request).lora_int_id

    def _leaves_tokens(self, output: SchedulerOutput) -> bool:
        """Whether a lowered budget was not used up, although requests could have taken tokens."""
        if output.total_num_scheduled_tokens >= self._meridian_lowered_to:
            return False
        could_admit = bool(self.waiting) and self._free_seats() > 0
        return could_admit or len(output.num_scheduled_tokens) < len(self.running)

    def _apply_caps(self, caps: dict[str, int], probes: set[str], own_budget: int) -> None:
        """Make `schedule()` give each capped request at most its cap, a probe all or nothing, and no part of a prompt
        whose split would end the engine, if a step of `own_budget` tokens could have all of it.

        Requests that the plan leaves out stand behind the others, both in the running list and in the waiting queue. If
        no request before them can take a token (tokens in flight, a busy encoder), the step would be empty. Then
        running requests are served without caps, or else the first waiting request."""
        reserve = self._reserve_prefill_lookahead
        threshold = self.scheduler_config.long_prefill_token_threshold
        most = min(own_budget, threshold) if threshold > 0 else own_budget
        # All or nothing: less than a whole decode, and part of a canvas.
        least = self._meridian_decode_tokens
        # Parts of a prompt end with a block of Mamba's state.
        unit = self.cache_config.block_size if self.need_mamba_block_aligned_split else 1
        served = overruled = False
        # vLLM 0.30 counts only the adapters that a step serves, and asks nobody before it admits another one.
        counts_adapters = hasattr(Scheduler, "_handle_blocked_waiting_request")
        serves_adapters = self.lora_config is not None and not counts_adapters

        def capped(request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
            nonlocal served, overruled
            allowed = reserve(request, num_computed_tokens, num_new_tokens)
            try:
                is_part = allowed < request.num_tokens - num_computed_tokens <= most
                if (
                    is_part
                    and self._meridian_fatal_splits
                    and fails_if_split(request)
                    and not request.has_encoder_inputs
                ):
                    return 0
                if serves_adapters and request.status != RequestStatus.RUNNING and self._stands_in_the_way(request):
                    return 0
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
                        if self._meridian is not None:
                            # No request that the plan left could run.
                            self._meridian.overruled()
                elif cap is not None and cap < allowed and not self._meridian_diffuses:
                    end = (num_computed_tokens + cap) // unit * unit
                    given = reserve(request, num_computed_tokens, max(end - num_computed_tokens, 0))
                served = served or given > 0
                return given
            except DEFECTS:
                self._give_up("applying a cap")
                return allowed

        self._meridian_seams.cap(capped)
        if probes and self._meridian_think is not None:
            self._meridian_think.hide_lookups(probes)
