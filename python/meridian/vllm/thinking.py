"""Thinking budgets in the scheduler: what is measured comes in, the policy is asked, ends are ordered, probes run.

A probe is a request of this engine that nobody sent: prompt, thinking so far, end marker, and what leads to the answer;
one token. It is offered behind everything that waits, in a step that has tokens, KV blocks and a seat left, and taken
back when the step did not admit it; it is complete after that step. Nothing of vLLM's is copied: a probe goes through
`Scheduler.schedule()` like any request (vllm/v1/core/sched/scheduler.py), and what it leaves behind in outputs and
statistics is taken out again.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from vllm import SamplingParams
from vllm.v1.request import Request, RequestStatus

from meridian import _native
from meridian.vllm.budget import interrupts_of
from meridian.vllm.channel import ToSamplers
from meridian.vllm.markers import around_end
from meridian.vllm.xargs import ROW, RequestBudget, read_budget

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler

    from meridian.config import MeridianConfig
    from meridian.vllm.markers import Tokenizer

logger = logging.getLogger("vllm.meridian")

# Nobody has a lower one, unless a client makes a point of it.
LOWEST_PRIORITY = (1 << 63) - 1
# Beginning of the name of a probe.
PROBE = "meridian-probe-"
# How tokens are written in a vocabulary that end a line, a sentence or a clause; byte-level ones write a line break so.
_LINE_ENDS = ("\n", "Ċ")
_CLAUSE_ENDS = (".", ";", "?", "!", ",", "。", "、")


@dataclass
class _Running:
    """A probe that runs."""

    probe: Request
    # Of the request that it is about.
    key: int


@dataclass
class Asked:
    """What a client asked for in `vllm_xargs`."""

    extra: dict[str, Any]
    client: RequestBudget
    # Token sequences that end its thinking.
    interrupts: list[list[int]]


class ThinkHook:
    """Meridian's hand in the thinking of one scheduler's requests."""

    def __init__(
        self,
        scheduler: Scheduler,
        engine: _native.Engine,
        config: MeridianConfig,
        tokenizer: Tokenizer,
        samplers: ToSamplers,
    ) -> None:
        self._scheduler = scheduler
        self._engine = engine
        self._tokenizer = tokenizer
        self._samplers = samplers
        self._output_tpot_ms = config.scheduler.output_tpot_budget_ms
        samplers.configure(config.model)
        forced = around_end(tokenizer, config.model.force_phrase, config.model.think_end)
        interrupt = config.model.interrupt
        texts = [text for text in ([interrupt] if isinstance(interrupt, str) else interrupt) if text]
        self._interrupts = interrupts_of(tokenizer, texts)
        self._suffix = _suffix(config, tokenizer)
        line_ends, boundaries = _boundaries(tokenizer)
        # Right behind the end marker many models begin every answer alike: such probes cost tokens and tell nothing.
        can_probe = config.entropy.enabled and config.entropy.probe_suffix != "" and self._can_probe()
        self._thinking = engine.follow_thinking(forced, line_ends, boundaries, self._interrupts, can_probe)
        # Offered to this step, by name.
        self._offered: dict[str, _Running] = {}
        self._running: dict[str, _Running] = {}
        self._made = 0

    @property
    def running(self) -> int:
        """Probes that are under way."""
        return len(self._running)

    @property
    def native(self) -> _native.Thinking:
        """What follows the thinking."""
        return self._thinking

    def drop_all(self) -> None:
        """Give up the probes that are under way."""
        self._offered.clear()
        self._drop(list(self._running))

    def close(self) -> None:
        """Let go of the sockets, and of the probes that are under way. Samplers go by their own configuration again."""
        self.drop_all()
        self._samplers.configure(None)
        self._samplers.close()

    def asked(self, request: Request) -> Asked | None:
        """What the client of a request asked for; None for one that samples nothing."""
        params = request.sampling_params
        if params is None:
            return None
        extra = {key: value for key, value in (params.extra_args or {}).items() if key != ROW}
        try:
            client = read_budget(extra)
        except ValueError as why:
            # Refused where it was asked; whoever came here another way gets the operator's.
            logger.warning("meridian: request %s: %s: not regarded", request.request_id, why)
            client = RequestBudget()
        interrupts = interrupts_of(self._tokenizer, client.interrupts) if client.interrupts else []
        return Asked(extra, client, interrupts)

    def follow(self, request: Request, asked: Asked, key: int, limit: int, measured: bool) -> None:
        """Tell the request's sampler its number, its limit and whether to measure, with its parameters."""
        row = {"key": key, "limit": limit, "interrupts": self._interrupts + asked.interrupts, "measured": measured}
        # The client's own object stays as it is.
        request.sampling_params = copy.copy(request.sampling_params)
        cast("Any", request.sampling_params).extra_args = {**asked.extra, ROW: row}

    def receive(self) -> None:
        """Take in what was measured."""
        for datagram in self._samplers.received():
            self._thinking.received(datagram)

    def decide(self, now_ms: float) -> None:
        """Before a step: ask the policy about what is new, and tell the samplers."""
        pool = self._scheduler.kv_cache_manager.block_pool
        orders = self._thinking.decide(now_ms, pool.get_num_free_blocks(), pool.num_gpu_blocks)
        self._samplers.tell(orders)

    def offer(self, token_budget: int, seats: int, enqueue: Any) -> set[str]:
        """Put the probes that are due behind everything that waits, as far as there may be room; returns their names.
        `enqueue` is the scheduler's own `add_request`."""
        scheduler = self._scheduler
        due = self._thinking.due()
        if not due:
            return set()
        room = self._room(token_budget)
        blocks = self._spare_blocks()
        for name, key, tokens in due:
            request = scheduler.requests.get(name)
            if request is None or not self._can_be_probed(request):
                self._thinking.probe_dropped(key)
                continue
            prompt = [*request.all_token_ids[: request.num_prompt_tokens + tokens], *self._suffix]
            # What its request computes in this step is found as well.
            cached = min(request.num_computed_tokens + 1, len(prompt) - len(self._suffix))
            cached -= cached % scheduler.block_size
            if len(prompt) >= scheduler.max_model_len:
                self._thinking.probe_dropped(key)
                continue
            needed_blocks = -(-(len(prompt) - cached + 1) // scheduler.block_size)
            if len(prompt) - cached > room or needed_blocks > blocks or len(self._offered) == seats:
                break
            room -= len(prompt) - cached
            blocks -= needed_blocks
            probe = self._make(request, key, tokens, prompt)
            self._offered[probe.request_id] = _Running(probe, key)
            enqueue(probe)
        return set(self._offered)

    def settle(self, output: SchedulerOutput) -> None:
        """After the step was scheduled: what it did not admit is taken back."""
        scheduler = self._scheduler
        for name, offered in self._offered.items():
            tokens = output.num_scheduled_tokens.get(name)
            if tokens is not None:
                self._running[name] = offered
                self._thinking.probe_runs(offered.key, tokens)
                continue
            for queue in (scheduler.waiting, getattr(scheduler, "kv_holding_waiting", None)):
                if queue is not None and offered.probe in queue:
                    queue.remove_request(offered.probe)
            getattr(scheduler, "deferred_waiting", set()).discard(offered.probe)
            scheduler.requests.pop(name, None)
        self._offered.clear()
        # One that lost its blocks to somebody else is not tried again.
        self._drop([name for name, run in self._running.items() if run.probe.status == RequestStatus.PREEMPTED])

    def take_out(self, outputs: dict[int, Any]) -> None:
        """Take what probes have told out of a step's outputs."""
        if not self._running:
            return
        for client in list(outputs):
            told = outputs[client]
            if told.finished_requests:
                told.finished_requests -= self._running.keys()
            own = [output for output in told.outputs if output.request_id in self._running]
            if not own:
                continue
            told.outputs = [output for output in told.outputs if output.request_id not in self._running]
            for output in own:
                run = self._running.pop(output.request_id)
                self._thinking.probed(run.key, output.new_token_ids[0] if output.new_token_ids else None)
            if not told.outputs and not told.finished_requests and told.scheduler_stats is None:
                del outputs[client]

    def drop_pointless(self) -> None:
        """Give up the probes of requests that have left their thinking."""
        self._drop([name for name, run in self._running.items() if not self._thinking.is_thinking(run.key)])

    def prompt_tokens(self, name: str) -> int | None:
        """Tokens of a probe that its request has as well: nobody will ask for what follows. None when it is none."""
        run = self._running.get(name) or self._offered.get(name)
        return None if run is None else run.probe.num_prompt_tokens - len(self._suffix)

    def hide_lookups(self, probes: set[str]) -> None:
        """Keep probes out of vLLM's statistics of its prefix cache until `show_lookups`."""
        manager = cast("Any", self._scheduler.kv_cache_manager)
        record = getattr(manager, "record_prefix_cache_stats", None)
        if record is not None:

            def hidden(request: Request, *args: Any, **kwargs: Any) -> None:
                if request.request_id not in probes:
                    record(request, *args, **kwargs)

            vars(manager)["record_prefix_cache_stats"] = hidden
            return
        # Before vLLM 0.32 the lookup itself counts.
        lookup = manager.get_computed_blocks

        def looked_up(request: Request, *args: Any, **kwargs: Any) -> Any:
            if request.request_id not in probes:
                return lookup(request, *args, **kwargs)
            counted = copy.copy(manager.prefix_cache_stats)
            try:
                return lookup(request, *args, **kwargs)
            finally:
                manager.prefix_cache_stats = counted

        vars(manager)["get_computed_blocks"] = looked_up

    def show_lookups(self) -> None:
        """Count them again."""
        for name in ("record_prefix_cache_stats", "get_computed_blocks"):
            vars(self._scheduler.kv_cache_manager).pop(name, None)

    def stats(self, stats: Any) -> Any:
        """The scheduler's statistics without the probes."""
        under_way = sum(run.probe.status == RequestStatus.RUNNING for run in self._running.values())
        return replace(stats, num_running_reqs=stats.num_running_reqs - under_way) if under_way else stats

    def _drop(self, names: list[str]) -> None:
        if names:
            self._scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
            # Where clients are told of what ended: nobody has begun these.
            for finished in (getattr(self._scheduler, "finished_req_ids_dict", None) or {}).values():
                finished.difference_update(names)
        for name in names:
            run = self._running.pop(name, None)
            if run is not None:
                self._thinking.probe_dropped(run.key)

    def _make(self, request: Request, key: int, tokens: int, prompt: list[int]) -> Request:
        self._made += 1
        extra = {ROW: {"probe": key, "at": tokens}}
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, extra_args=extra)
        return Request(
            f"{PROBE}{self._made}-{request.request_id}",
            prompt,
            params,
            None,
            client_index=request.client_index,
            lora_request=request.lora_request,
            cache_salt=request.cache_salt,
            # Behind everybody where vLLM schedules by priority, and the first that it preempts.
            priority=LOWEST_PRIORITY,
            block_hasher=cast("Any", request)._block_hasher,
        )

    def _can_probe(self) -> bool:
        scheduler = self._scheduler
        if scheduler.connector is not None:
            logger.warning("meridian: no probes beside a KV connector, so EAT is off")
            return False
        if not scheduler.cache_config.enable_prefix_caching:
            logger.warning(
                "meridian: no probes without prefix caching, which would compute every prompt again: EAT is off"
            )
            return False
        return True

    def _can_be_probed(self, request: Request) -> bool:
        """Not what the probe's own tokens do not tell: images, embeddings."""
        return (
            request.status == RequestStatus.RUNNING
            and not request.mm_features
            and request.prompt_embeds is None
            and request.prompt_token_ids is not None
        )

    def _room(self, token_budget: int) -> int:
        """Tokens that a step may carry beside what it has to: of its budget, and while somebody's answer streams, of
        the time that its steps are held to."""
        running = cast("list[Any]", self._scheduler.running)
        room = token_budget - len(running)
        facts = self._engine.step_facts
        if facts is not None:
            answering, (fixed_ms, decode_ms, prefill_ms) = facts
            if answering and prefill_ms > 0:
                spare_ms = self._output_tpot_ms - fixed_ms - decode_ms * len(running)
                room = min(room, int(spare_ms / prefill_ms))
        return room

    def _spare_blocks(self) -> int:
        """KV blocks that are left when every running request has taken the next one."""
        manager = self._scheduler.kv_cache_manager
        watermark = getattr(manager, "watermark_blocks", 0)
        reserve = max(2 * len(self._scheduler.running), watermark)
        return manager.block_pool.get_num_free_blocks() - reserve


def _suffix(config: MeridianConfig, tokenizer: Tokenizer) -> list[int]:
    """What a probe has behind the thinking: an optional line break, the end marker, and what leads to the answer."""
    entropy, ends = config.entropy, config.model.think_end
    first = ends if isinstance(ends, str) else ends[0]
    return around_end(tokenizer, ("\n" if entropy.probe_newline else "") + first + entropy.probe_suffix, first)


def _boundaries(tokenizer: Any) -> tuple[set[int], set[int]]:
    """Tokens that end a line, and those that end a line, a sentence or a clause."""
    lines: set[int] = set()
    clauses: set[int] = set()
    for text, token in tokenizer.get_vocab().items():
        if text.endswith(_LINE_ENDS):
            lines.add(token)
        elif text.endswith(_CLAUSE_ENDS):
            clauses.add(token)
    return lines, lines | clauses
