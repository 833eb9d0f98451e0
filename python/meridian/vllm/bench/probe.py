"""What a run observes: each request's token times by phase, and what the scheduler did at every step.

The phase is read from the tokens the engine delivered, never from the scheduler under test: ``prefill`` until the first
token, ``think`` until the end marker has come, ``output`` after it. All times are ``time.perf_counter`` seconds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from meridian.vllm.bench.request import TraceRequest

PREFILL, THINK, OUTPUT = "prefill", "think", "output"
PHASES: tuple[str, ...] = (PREFILL, THINK, OUTPUT)


@dataclass
class Observed:
    """One request while it runs. ``arrival`` is when it was due, so waiting for a busy step counts as latency."""

    index: int
    planned: TraceRequest
    arrival: float
    end_ids: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    think_end: int | None = None  # position of the end marker's last token
    preemptions: int = 0
    finished: float | None = None
    # Prompt tokens that the first admission found in the prefix cache; None before it.
    cached_tokens: int | None = None
    # Which turn of which chat session; None for a request of a trace.
    session: int | None = None
    turn: int | None = None

    @property
    def phase(self) -> str:
        """One of ``PHASES``."""
        if not self.tokens:
            return PREFILL
        return THINK if self.think_end is None else OUTPUT

    def deliver(self, tokens: Sequence[int], now: float) -> None:
        """Take tokens that the engine delivered at ``now``."""
        for token in tokens:
            self.tokens.append(token)
            self.times.append(now)
            if self.think_end is None and tuple(self.tokens[-len(self.end_ids) :]) == self.end_ids:
                self.think_end = len(self.tokens) - 1

    def row(self) -> dict[str, Any]:
        """The request's raw row: times in ms, ``arrival_s`` as planned; None for what was never reached."""
        end, times = self.think_end, self.times
        first_output = times[end + 1] if end is not None and len(times) > end + 1 else None
        ended = times[end] if end is not None else None
        gaps_ms = [1e3 * (b - a) for a, b in pairwise(times)]
        split = end if end is not None else len(gaps_ms)  # gap i ends at token i + 1; the marker belongs to thinking

        def since_arrival(t: float | None) -> float | None:
            return None if t is None else 1e3 * (t - self.arrival)

        planned = self.planned
        return {
            "index": self.index,
            "session": self.session,
            "turn": self.turn,
            "tenant": planned.tenant,
            "priority": planned.priority,
            "deadline_ms": planned.deadline_ms,
            "arrival_s": planned.arrival_s,
            "prompt_tokens": planned.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "think_tokens": planned.think_tokens,
            "output_tokens": planned.output_tokens,
            "delivered_tokens": len(self.tokens),
            "think_forced_ok": end == planned.think_tokens + len(self.end_ids) - 1,
            "ttft_ms": since_arrival(times[0] if times else None),
            "think_end_ms": since_arrival(ended),
            "ttfo_ms": since_arrival(first_output),
            "ttot_ms": None if first_output is None or ended is None else 1e3 * (first_output - ended),
            "e2e_ms": since_arrival(self.finished),
            "preemptions": self.preemptions,
            "itl_think_ms": [round(g, 3) for g in gaps_ms[:split]],
            "itl_output_ms": [round(g, 3) for g in gaps_ms[split:]],
        }


class SchedulerProbe:
    """Times ``schedule`` of one scheduler, classifies its preemptions and counts what was found in the prefix cache.

    Wraps the instance, not the class, and reads only what vLLM's own scheduler has.
    """

    def __init__(self, scheduler: Any, observed: dict[str, Observed]) -> None:
        self._scheduler = scheduler
        self._observed = observed  # by the engine's own request id
        self._schedule = scheduler.schedule
        self._preempt = scheduler._preempt_request
        self.reset()
        scheduler.schedule = self._timed_schedule
        scheduler._preempt_request = self._watched_preempt

    def reset(self) -> None:
        """Forget what was seen so far: called once, when the warm-up is over."""
        self.schedule_ns: list[int] = []
        self.running: list[int] = []
        self.scheduled_tokens: list[int] = []
        self.output_scheduled: list[int] = []
        self.step_s: list[float] = []
        # What each step does, for a model of its time (bench/src/sim/step_model.rs): requests that are given tokens,
        # tokens of context whose KV is read, pairs of a prompt's new token and a token it attends to.
        self.step_requests: list[int] = []
        self.context_tokens: list[int] = []
        self.attention_pairs: list[int] = []
        # Requests taken in before each step, and how long that took.
        self.arrivals: list[int] = []
        self.arrivals_s: list[float] = []
        self._own_s = 0.0
        self.preemptions: dict[str, int] = dict.fromkeys(PHASES, 0)
        self.output_preempted = 0
        self.output_preempted_while_think_held = 0
        self.recomputed_tokens = 0
        # Tokens that were computed when a request was preempted, until it is resumed.
        self._lost: dict[str, int] = {}

    def steps(self) -> dict[str, list[Any]]:
        """What was seen of each step: times in ms and us, work in tokens and requests."""
        return {
            "ms": [round(1e3 * s, 3) for s in self.step_s],
            "schedule_us": [round(ns / 1e3, 1) for ns in self.schedule_ns],
            "running": self.running,
            "tokens": self.scheduled_tokens,
            "output_requests": self.output_scheduled,
            "requests": self.step_requests,
            "context_tokens": self.context_tokens,
            "attention_pairs": self.attention_pairs,
            "arrivals": self.arrivals,
            "arrivals_ms": [round(1e3 * s, 3) for s in self.arrivals_s],
        }

    def counts(self) -> dict[str, Any]:
        """What the scheduler did in all steps together."""
        return {
            "preemptions": self.preemptions,
            "output_preempted_while_think_held": self.output_preempted_while_think_held,
            "recomputed_tokens": self.recomputed_tokens,
        }

    def step_took(self, seconds: float, arrivals: int = 0, arrivals_s: float = 0.0) -> None:
        """The engine step that the last ``schedule`` call began took this long; what the probe itself took is left out.
        Before it, ``arrivals`` requests were taken in."""
        self.step_s.append(seconds - self._own_s)
        self.arrivals.append(arrivals)
        self.arrivals_s.append(arrivals_s)
        self._own_s = 0.0

    def _timed_schedule(self, *args: Any, **kwargs: Any) -> Any:
        start_ns = time.perf_counter_ns()
        out = self._schedule(*args, **kwargs)
        self.schedule_ns.append(time.perf_counter_ns() - start_ns)
        started = time.perf_counter()
        self.running.append(len(self._scheduler.running))
        self._note_work(out.num_scheduled_tokens)
        self.scheduled_tokens.append(out.total_num_scheduled_tokens)
        seen = self._observed
        self.output_scheduled.append(sum(r in seen and seen[r].phase == OUTPUT for r in out.num_scheduled_tokens))
        for new in out.scheduled_new_reqs:
            if new.req_id in seen:
                seen[new.req_id].cached_tokens = new.num_computed_tokens
        cached = out.scheduled_cached_reqs
        if cached.resumed_req_ids:
            for request_id, found in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                if request_id in cached.resumed_req_ids:
                    self.recomputed_tokens += max(0, self._lost.pop(request_id, 0) - found)
        self._own_s += time.perf_counter() - started
        return out

    def _note_work(self, given: Mapping[str, int]) -> None:
        """``schedule`` has counted the tokens that it gave as computed."""
        requests = self._scheduler.requests
        context = pairs = 0
        for request_id, tokens in given.items():
            before = requests[request_id].num_computed_tokens - tokens
            context += before
            if tokens > 1:
                pairs += tokens * before + tokens * (tokens + 1) // 2
        self.step_requests.append(len(given))
        self.context_tokens.append(context)
        self.attention_pairs.append(pairs)

    def _watched_preempt(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        victim = self._observed.get(request.request_id)
        if victim is not None:
            self._lost[request.request_id] = request.num_computed_tokens
            victim.preemptions += 1
            self.preemptions[victim.phase] += 1
            if victim.phase == OUTPUT:
                self.output_preempted += 1
                # The victim has left `running` by now. Victims fall before anyone is admitted in a step, so whoever is
                # still there was scheduled before and holds blocks.
                holders = (self._observed.get(r.request_id) for r in self._scheduler.running)
                if any(h is not None and h.phase != OUTPUT for h in holders):
                    self.output_preempted_while_think_held += 1
        return self._preempt(request, *args, **kwargs)
