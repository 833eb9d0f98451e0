"""The life of a request: its arrival, its tokens, preemptions and its end, reported to the native engine."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from vllm.v1.engine import EngineCoreOutputs

from meridian import _native
from meridian.engine import MAX_NAME_CHARACTERS
from meridian.vllm.answers import report
from meridian.vllm.state import State, logger

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    from meridian.vllm.thinking import ThinkHook

# Steps between two searches for requests that vLLM has dropped without a notice.
REAP_STEPS = 4096
# Longest time that counts of those that a front end held a request, seconds: more may be a clock that was set.
MOST_HELD_S = 0.25
# How fast the smallest difference of the clocks is forgotten, seconds a second.
FORGOTTEN = 0.01
# Difference of a clock that is worth a line, seconds.
WRONG_S = 1.0


class Arrivals:
    """When requests arrived, by this engine's clock.

    A front end stamps a request by the clock of its machine. The smallest difference from this engine's clock is that
    of the clocks, and the way here. A request with a larger one was held by its front end for the rest.
    """

    def __init__(self) -> None:
        # By front end: the smallest difference, seconds, as of a time.
        self._least: dict[int, tuple[float, float]] = {}
        self._has_warned = False

    def ms(self, request: Request) -> float:
        """When a request arrived that the engine receives now, milliseconds."""
        now = time.monotonic()
        behind = time.time() - request.arrival_time
        least, at = self._least.get(request.client_index, (behind, now))
        held = behind - least - FORGOTTEN * (now - at)
        if not 0.0 <= held <= MOST_HELD_S:
            held = 0.0
        self._least[request.client_index] = (behind - held, now)
        if abs(behind - held) > WRONG_S and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "meridian: request %s arrived with a time %.1f s %s that of this engine: the clock of front end %d is "
                "wrong, or it held the request; waits count from the arrival at the engine",
                request.request_id,
                abs(behind),
                "before" if behind > 0 else "after",
                request.client_index,
            )
        return (now - held) * 1e3


class Following(State):
    """The part of the scheduler that follows its requests."""

    _meridian_arrivals: Arrivals

    def _observe(self, engine: _native.Engine, output: SchedulerOutput, now_ms: float) -> None:
        """Report the result of scheduling."""
        think = self._meridian_think
        if think is not None:
            think.settle(output)
        # Rejected speculative tokens lower the engine's own count.
        taken = [] if self._meridian_kv is None else self._meridian_kv.taken()
        engine.end(output, now_ms, self._meridian_decode_tokens > 1, taken)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        ended: list[Request] = []
        continued: list[Request] = []
        self._meridian_ended, self._meridian_continued = ended, continued
        try:
            outputs = super().update_from_output(scheduler_output, model_runner_output)
        finally:
            self._meridian_ended = None
        refused, self._meridian_refused = self._meridian_refused, ()
        for client, output in refused:
            outputs.setdefault(client, EngineCoreOutputs()).outputs.append(output)
        engine = self._meridian
        if engine is not None:
            now_ms = time.monotonic() * 1e3
            told = (engine, model_runner_output, outputs, ended, now_ms)
            self._guard("following generated tokens", self._take_in, *told)
            if ended:
                self._remove(ended)
            if continued:
                self._continue(continued)
            self._meridian_steps_seen += 1
            if self._meridian_steps_seen % REAP_STEPS == 0:
                self._guard("looking for requests that were dropped", self._reap, now_ms)
            think = self._meridian_think
            if think is not None and think.running:
                self._guard("giving up probes", think.drop_pointless)
        return outputs

    def _take_in(
        self,
        engine: _native.Engine,
        sampled: ModelRunnerOutput,
        outputs: dict[int, EngineCoreOutputs],
        ended: list[Request],
        now_ms: float,
    ) -> None:
        """Report the generated tokens, and pass on what the host has to say."""
        think = self._meridian_think
        if think is not None:
            think.receive(sampled)
            think.take_out(outputs)
        lines = engine.tokens([client.outputs for client in outputs.values()], now_ms)
        if think is not None and ended:
            report(think.native, ended, outputs.values())
        self._pass_on(lines)

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        # Later input of a streaming session arrives under a known id; the first object stays the request.
        if self._meridian is not None and self.requests.get(request.request_id) is request:
            self._guard("taking in a request", self._arrives, request)

    def _arrives(self, request: Request) -> None:
        if self._meridian is not None:
            self._add(self._meridian, request, self._meridian_arrivals.ms(request), self._meridian_think)
        if self._meridian_kv is not None:
            self._meridian_kv.request_arrives(request)

    def _add(self, engine: _native.Engine, request: Request, arrival_ms: float, think: ThinkHook | None = None) -> None:
        add(engine, request, arrival_ms, self._keeps_whole(request), think)

    def _keeps_whole(self, request: Request) -> bool:
        """Whether vLLM may not split this request's prompt into chunks."""
        config = self.scheduler_config
        is_fatal = self._meridian_fatal_splits and fails_if_split(request)
        cannot_split = config.disable_chunked_mm_input and bool(request.mm_features)
        return not config.enable_chunked_prefill or cannot_split or is_fatal

    def _update_request_as_session(self, session: Request, update: Any) -> None:
        """A streaming session goes on with new input (vllm/v1/core/sched/scheduler.py): a new request to the engine."""
        super()._update_request_as_session(session, update)
        if self._meridian_ended is None:
            self._continue([session])
        else:
            # The engine has not received the last tokens of its turn.
            self._meridian_continued.append(session)

    def _continue(self, sessions: list[Request]) -> None:
        """Add the requests of streaming sessions again, with their new prompts and parameters."""
        for session in sessions:
            self._guard("following a streaming session", self._begin_again, session)

    def _begin_again(self, session: Request) -> None:
        engine = self._meridian
        if engine is not None:
            engine.remove(session.request_id, "continues")
            self._add(engine, session, time.monotonic() * 1e3, self._meridian_think)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        blocks = self._guard("counting the blocks of a preempted request", self._pauses, request)
        super()._preempt_request(request, *args, **kwargs)
        if self._meridian is not None:
            self._guard("following a preemption", self._paused, request, blocks)

    def _pauses(self, request: Request) -> int | None:
        """Report that a request is about to lose its KV blocks. Returns how many only it attends, if it answers."""
        engine, kv = self._meridian, self._meridian_kv
        if engine is None or kv is None:
            return None
        answers = self._meridian_schedules and engine.phase(request.request_id) == "output"
        blocks = kv.unshared_blocks(request) if answers else None
        kv.request_pauses(request)
        return blocks

    def _paused(self, request: Request, blocks: int | None) -> None:
        engine = self._meridian
        if engine is None:
            return
        if not self._meridian_schedules:
            engine.lost_blocks(request.request_id)
            return
        avoidable = engine.preempted(request.request_id, blocks or 0)
        if blocks is not None:
            self._log_output_preemption(engine, request, blocks, avoidable)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        kv = self._meridian_kv
        if kv is not None:
            self._guard("following the end of a request", kv.request_ends, request)
        freed = super()._free_request(request, *args, **kwargs)
        if self._meridian_ended is None:
            self._remove([request])
        else:
            self._meridian_ended.append(request)
        return freed

    def _remove(self, requests: list[Request]) -> None:
        for request in requests:
            self._guard("following the end of a request", self._ends, request)

    def _ends(self, request: Request) -> None:
        if self._meridian is not None:
            reason = request.get_finished_reason()
            self._meridian.remove(request.request_id, "" if reason is None else str(reason))

    def _reap(self, now_ms: float) -> None:
        """Forget requests that vLLM has dropped without a notice."""
        if self._meridian is not None:
            self._meridian.reap(now_ms, self.requests)

    def _pass_on_log(self) -> None:
        self._pass_on(_native.take_log())

    def _pass_on(self, lines: list[tuple[int, str]]) -> None:
        """Pass the host's log lines, from any thread, to Python's logger."""
        for level, line in lines:
            logger.log(level, "meridian: %s", line)

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


def add(
    engine: _native.Engine, request: Request, arrival_ms: float, whole_prompt: bool, think: ThinkHook | None
) -> None:
    """Add a request to the engine; with `think`, follow its thinking."""
    tenant, session, service_level, deadline_ms = _client_facts(request)
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
        model=request.lora_request.lora_name if request.lora_request is not None else "",
        service_level=service_level,
        whole_prompt=whole_prompt,
        client=None if asked is None else asked.client,
        interrupts=[] if asked is None else asked.interrupts,
        traceparent=traceparent,
        ignores_eos=request.sampling_params is not None and request.sampling_params.ignore_eos,
        has_mask=asked is not None and asked.has_mask,
        plain=asked is not None and asked.plain,
    )
    if think is not None and asked is not None and not isinstance(added, bool):
        think.follow(request, asked, added)


def fails_if_split(request: Request) -> bool:
    """Whether vLLM's model runner on a CPU fails at a part of this request's prompt: it has a seed, and a CPU's
    generators have no offset (vllm/v1/worker/gpu_model_runner.py: `generator.set_offset`)."""
    return request.sampling_params is not None and request.sampling_params.seed is not None


def _client_facts(request: Request) -> tuple[str, str, str, float]:
    """Tenant, session, service level and deadline (milliseconds after arrival) from the client's `vllm_xargs`, or the
    session that vLLM itself knows. Invalid values are ignored, because they must not fail the request of a client that
    does not use Meridian."""
    params = request.sampling_params
    given = (params.extra_args if params is not None else None) or {}
    keys = ("meridian_tenant", "meridian_session", "meridian_service_level")
    tenant, session, service_level = (_name(given.get(key)) for key in keys)
    session = session or _name(getattr(request, "session_id", None)) or _hinted_session(request)
    deadline = given.get("meridian_deadline_ms", math.inf)
    if isinstance(deadline, bool) or not isinstance(deadline, int | float) or not deadline > 0:
        deadline = math.inf
    return tenant, session, service_level, float(deadline)


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
