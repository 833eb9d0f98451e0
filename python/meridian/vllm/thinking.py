"""Thinking budgets in the scheduler: it takes in measurements, asks the policy, orders ends and runs probes.

A probe is a request that the engine itself makes, for one token: prompt, thinking so far, end marker, and the text that
leads to the answer. The scheduler offers it behind all waiting requests, in a step with spare tokens, KV blocks and a
seat. It takes the probe back if the step does not admit it; otherwise the probe is complete after that step. No code of
vLLM is copied: a probe goes through `Scheduler.schedule()` like any request (vllm/v1/core/sched/scheduler.py). Its
traces in outputs and statistics are removed afterwards.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from vllm import SamplingParams
from vllm.v1.request import Request, RequestStatus

from meridian import _native
from meridian.vllm.channel import reports_in
from meridian.vllm.effort import for_request
from meridian.vllm.markers import around_end
from meridian.vllm.probing import HiddenFromConnector, SharedBlocks
from meridian.vllm.processor import has_no_phrase, interrupts_of
from meridian.vllm.xargs import ROW, RequestBudget, Row, read_budget

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput

    from meridian.config import MeridianConfig
    from meridian.vllm.channel import ToSamplers
    from meridian.vllm.markers import Tokenizer, TokenMarkers
    from meridian.vllm.seams import Seams

logger = logging.getLogger("vllm.meridian")

# No request has a lower priority, unless a client sets it on purpose.
LOWEST_PRIORITY = (1 << 63) - 1
# Prefix of the name of a probe.
PROBE = "meridian-probe-"
# Endings of vocabulary entries that end a line, a sentence or a clause; byte-level ones write a line break as `Ċ`.
_LINE_ENDS = ("\n", "Ċ")
_CLAUSE_ENDS = (".", ";", "?", "!", ",", "。", "、")


@dataclass
class _Running:
    """A probe in a step."""

    probe: Request
    # Key of the probed request.
    key: int


@dataclass
class Asked:
    """What a client asks for, in `vllm_xargs` and in its sampling parameters."""

    extra: dict[str, Any]
    client: RequestBudget
    # Token sequences that end the request's thinking.
    interrupts: list[list[int]]
    # The client limits the tokens that may be sampled.
    has_mask: bool
    # Force the end marker without a phrase; see `has_no_phrase`.
    plain: bool


class ThinkHook:
    """Connects Meridian to the thinking of one scheduler's requests."""

    def __init__(
        self,
        scheduler: Scheduler,
        seams: Seams,
        engine: _native.Engine,
        config: MeridianConfig,
        tokenizer: Tokenizer,
        markers: TokenMarkers,
        samplers: ToSamplers,
    ) -> None:
        self._scheduler = scheduler
        self._seams = seams
        self._engine = engine
        self._tokenizer = tokenizer
        self._samplers = samplers
        # Where vLLM's prefix cache does not serve probes.
        self._shared: SharedBlocks | None = None
        self._hidden: HiddenFromConnector | None = None
        self._output_tpot_ms = config.scheduler.output_tpot_budget_ms
        self._efforts = config.scheduler.reasoning_effort
        samplers.configure(config.model)
        self._phrase = config.model.force_phrase
        self._forced = markers.forced
        interrupt = config.model.interrupt
        texts = [text for text in ([interrupt] if isinstance(interrupt, str) else interrupt) if text]
        self._interrupts = interrupts_of(tokenizer, texts)
        self._suffix = _suffix(config, tokenizer)
        line_ends, boundaries = _boundaries(tokenizer)
        # Directly after the end marker, many models begin every answer alike: such probes cost tokens and show nothing.
        can_probe = config.entropy.enabled and config.entropy.probe_suffix != "" and self._can_probe()
        # The model runner V2 leaves the logits of a request alone that no processor wants when it arrives.
        wakes = not getattr(scheduler.vllm_config, "use_v2_model_runner", False)
        self._thinking = engine.follow_thinking(
            markers.forced, line_ends, boundaries, self._interrupts, can_probe, scheduler.num_spec_tokens, wakes
        )
        # Offered to this step, by name.
        self._offered: dict[str, _Running] = {}
        self._running: dict[str, _Running] = {}
        # Requests of which the latest step computed a part of the prompt, and not the last.
        self._chunked: set[str] = set()
        # Whether the thinking of any request is followed, as of the latest step.
        self._is_active = False
        self._made = 0
        # Wraps a method of vLLM's KV cache manager in this step.
        self._hides: Callable[..., Any] | None = None
        if can_probe and scheduler.connector is not None:
            self._hidden = HiddenFromConnector(scheduler.connector, seams, lambda name: name.startswith(PROBE))

    @property
    def running(self) -> int:
        """Number of running probes."""
        return len(self._running)

    @property
    def native(self) -> _native.Thinking:
        """The native object that follows the thinking."""
        return self._thinking

    def drop_all(self) -> None:
        """Drop all running probes."""
        self._offered.clear()
        self._drop(list(self._running))

    def close(self) -> None:
        """Drop the running probes. Samplers then use their own configuration again."""
        self.drop_all()
        if self._hidden is not None:
            self._hidden.close()
        self._samplers.configure(None)

    def asked(self, request: Request) -> Asked | None:
        """The client's options for a request; None for a request that samples nothing."""
        params = request.sampling_params
        if params is None:
            return None
        extra = {key: value for key, value in (params.extra_args or {}).items() if key != ROW}
        try:
            client = read_budget(extra)
        except ValueError as why:
            # The front end refuses these options; a request that bypassed it gets the operator's values.
            logger.warning("meridian: request %s: %s: not regarded", request.request_id, why)
            client = RequestBudget()
        client = for_request(client, extra, self._efforts)
        interrupts = interrupts_of(self._tokenizer, client.interrupts) if client.interrupts else []
        plain = has_no_phrase(params, self._phrase, self._forced)
        return Asked(extra, client, interrupts, _has_mask(params), plain)

    def follow(self, request: Request, asked: Asked, row: dict[str, Any]) -> None:
        """Send the sampler of a request what it has to know, in the sampling parameters."""
        # The client's own object stays unchanged.
        request.sampling_params = copy.copy(request.sampling_params)
        cast("Any", request.sampling_params).extra_args = {**asked.extra, ROW: Row(row)}

    def most_tokens(self, request: Request) -> int:
        """Most tokens that the request may generate, also by the model's length."""
        return min(request.max_tokens, max(self._scheduler.max_model_len - request.num_prompt_tokens, 0))

    def receive(self, output: ModelRunnerOutput) -> None:
        """Take in the measurements of the samplers."""
        if self._is_active:
            for report in reports_in(output):
                self._thinking.received(report)

    def tell(self, orders: bytes | None, is_active: bool) -> None:
        """Before a step: send the policy's orders to the samplers."""
        self._is_active = is_active
        if is_active:
            self._samplers.tell(orders)

    def offer(self, token_budget: int, seats: int, enqueue: Any) -> set[str]:
        """Put the due probes behind all waiting requests, as far as there may be room, and return their names.
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
            # The token that its request computes in this step is cached as well.
            cached = min(request.num_computed_tokens + 1, len(prompt) - len(self._suffix))
            cached -= cached % scheduler.block_size
            if self._shared is not None:
                cached = self._shared.tokens(request, cached)
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
            if self._shared is not None and cached:
                self._shared.give(request, probe, cached)
        return set(self._offered)

    def settle(self, output: SchedulerOutput) -> None:
        """After scheduling a step: take back the probes that it did not admit."""
        if not self._is_active:
            return
        for name, offered in self._offered.items():
            tokens = output.num_scheduled_tokens.get(name)
            if tokens is not None:
                self._running[name] = offered
                self._thinking.probe_runs(offered.key, tokens)
                continue
            self._seams.withdraw(offered.probe)
            if self._shared is not None:
                self._shared.take_back(offered.probe)
        self._offered.clear()
        self._tell_chunks(output)
        # A probe that lost its blocks to another request is not retried.
        self._drop([name for name, run in self._running.items() if run.probe.status == RequestStatus.PREEMPTED])

    def _tell_chunks(self, output: SchedulerOutput) -> None:
        """Tell the samplers in which rows this step ends with a token that vLLM discards: it computes a part of a
        prompt, or of the tokens of a preempted request, that is not the last."""
        scheduled = output.num_scheduled_tokens
        new = [request.req_id for request in output.scheduled_new_reqs if request.req_id not in self._running]
        resumed = [name for name in output.scheduled_cached_reqs.resumed_req_ids if name in scheduled]
        parts, last_parts = [], []
        for name in {*new, *resumed, *(self._chunked & scheduled.keys())}:
            request = self._scheduler.requests.get(name)
            if request is None:
                continue
            # vLLM has counted the step's tokens as computed.
            is_last = request.num_computed_tokens >= request.num_tokens
            if not is_last:
                parts.append(name)
            elif name in self._chunked:
                last_parts.append(name)
        if parts or last_parts:
            self._chunked.difference_update(last_parts)
            self._chunked.update(parts)
            self._chunked.intersection_update(self._scheduler.requests.keys())
            self._samplers.tell(self._thinking.chunks(parts, last_parts))

    def take_out(self, outputs: dict[int, Any]) -> None:
        """Take the results of probes out of a step's outputs."""
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
        """Drop the probes of requests that no longer think."""
        self._drop([name for name, run in self._running.items() if not self._thinking.is_thinking(run.key)])

    def prompt_tokens(self, name: str) -> int | None:
        """Tokens that a probe shares with its request; no request reuses the tokens after them. None if `name` is no
        probe."""
        run = self._running.get(name) or self._offered.get(name)
        return None if run is None else run.probe.num_prompt_tokens - len(self._suffix)

    def hide_lookups(self, probes: set[str]) -> None:
        """Keep probes out of vLLM's statistics of its prefix cache until `show_lookups`."""
        manager = self._scheduler.kv_cache_manager

        def hidden(request: Request, *args: Any, **kwargs: Any) -> None:
            if request.request_id not in probes:
                own(request, *args, **kwargs)

        self._hides = hidden
        own = self._seams.wrap(manager, "record_prefix_cache_stats", hidden)

    def show_lookups(self) -> None:
        """Let vLLM count the lookups of probes again."""
        hides, self._hides = self._hides, None
        if hides is not None:
            self._seams.unwrap(self._scheduler.kv_cache_manager, "record_prefix_cache_stats", hides)

    def stats(self, stats: Any) -> Any:
        """The scheduler's statistics without the probes."""
        under_way = sum(run.probe.status == RequestStatus.RUNNING for run in self._running.values())
        return replace(stats, num_running_reqs=stats.num_running_reqs - under_way) if under_way else stats

    def _drop(self, names: list[str]) -> None:
        if names:
            self._scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
            # vLLM reports ended requests to clients here; no client started the probes.
            for finished in (getattr(self._scheduler, "finished_req_ids_dict", None) or {}).values():
                finished.difference_update(names)
        for name in names:
            run = self._running.pop(name, None)
            if run is not None:
                self._thinking.probe_dropped(run.key)

    def _make(self, request: Request, key: int, tokens: int, prompt: list[int]) -> Request:
        self._made += 1
        extra = {ROW: Row(probe=key, at=tokens)}
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, extra_args=extra)
        return Request(
            f"{PROBE}{self._made}-{request.request_id}",
            prompt,
            params,
            None,
            client_index=request.client_index,
            lora_request=request.lora_request,
            cache_salt=request.cache_salt,
            # With priority scheduling, probes come last, and vLLM preempts them first.
            priority=LOWEST_PRIORITY,
            block_hasher=cast("Any", request)._block_hasher,
        )

    def _can_probe(self) -> bool:
        scheduler = self._scheduler
        if scheduler.connector is None and scheduler.cache_config.enable_prefix_caching:
            return True
        if not SharedBlocks.are_possible(scheduler):
            logger.warning(
                "meridian: EAT is off: without prefix caching, and beside a KV connector, probes need a model whose "
                "layers all have full attention"
            )
            return False
        self._shared = SharedBlocks(scheduler)
        return True

    def _can_be_probed(self, request: Request) -> bool:
        """Whether tokens alone describe the request; images and embeddings would be missing from a probe."""
        return (
            request.status == RequestStatus.RUNNING
            and not request.mm_features
            and request.prompt_embeds is None
            and request.prompt_token_ids is not None
        )

    def _room(self, token_budget: int) -> int:
        """Spare tokens of a step: within its token budget and, while an answer streams, within the target step time."""
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
        """Free KV blocks beyond a reserve of two for each running request, and at least vLLM's watermark."""
        manager = self._scheduler.kv_cache_manager
        reserve = max(2 * len(self._scheduler.running), manager.watermark_blocks)
        return manager.block_pool.get_num_free_blocks() - reserve


def _suffix(config: MeridianConfig, tokenizer: Tokenizer) -> list[int]:
    """Tokens that a probe appends to the thinking: an optional line break, the end marker, and the `probe_suffix`."""
    entropy, ends = config.entropy, config.model.think_end
    first = ends if isinstance(ends, str) else ends[0]
    return around_end(tokenizer, ("\n" if entropy.probe_newline else "") + first + entropy.probe_suffix, first)


def _has_mask(params: SamplingParams) -> bool:
    """Whether the client limits the tokens that may be sampled, so that one that is to be forced may be forbidden, or
    vLLM's own budget may force another."""
    return bool(
        params.structured_outputs is not None
        or params.allowed_token_ids
        or params.bad_words
        or params.min_tokens
        or params.logit_bias
        or getattr(params, "thinking_token_budget", None) is not None
    )


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
