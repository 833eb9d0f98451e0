"""What happens to one scheduler in a random sequence, step by step, and what must hold after each step.

Everything is a function of the seed: what arrives when, who is aborted, what each request generates. Two drives of the
same feature and seed ask two schedulers for the same. What a request generates depends on the request alone, so that
it is known whatever the schedule.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from meridian.vllm.kv import ends_in_flight
from meridian.vllm.seams import admitted_first_name
from random_engine import (
    ADAPTERS,
    END,
    EPOCH_S,
    MAX_MODEL_LEN,
    MAX_STEPS,
    STEP_MS,
    STOP,
    THINK,
    TOKEN_MS,
    AnyToken,
    Feature,
    Limits,
    chance,
)


@dataclass
class InFlight:
    """A step that was scheduled and whose result is not taken in."""

    output: Any
    sampled: set[str]


@dataclass
class Drive:
    """One scheduler and what happens to it. `trace` is what each step was, `violations` what should not have been."""

    scheduler: Any
    feature: Feature
    limits: Limits
    seed: int
    # Stock itself: what vLLM does in a corner is its own.
    is_stock: bool = True
    trace: list[Any] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    empty_steps: int = 0
    steps: int = 0
    now_ms: float = 0.0
    aborted: set[str] = field(default_factory=set)
    # The longest time in which prompts could have gone on, and none did: from a step in which one did to the next.
    stalled_ms: float = 0.0
    prompts_since_ms: float = 0.0

    def __post_init__(self) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher

        self.rng = random.Random(self.seed)
        self.hasher = get_request_block_hasher(self.feature.block_tokens, sha256)
        self.in_flight: deque[InFlight] = deque()
        self.requests: dict[str, Any] = {}
        self.left = self.rng.randint(6, 16)
        self.arrived = 0
        self.grammars_due: dict[str, int] = {}
        self.shared = [self._random_tokens(40) for _ in range(2)]
        if self.feature.connector:
            self.scheduler.connector.seed = self.seed

    @property
    def admitted_first(self) -> Any:
        """vLLM's second queue."""
        return getattr(self.scheduler, admitted_first_name(self.scheduler))

    @property
    def depth(self) -> int:
        """Steps that are scheduled before the result of the first is there."""
        return max(self.feature.pipeline, 2 if self.feature.asynchronous else 1)

    def run(self) -> Drive:
        """To the end of all requests."""
        while (self.left or self.scheduler.requests) and len(self.violations) < 5:
            if self.steps == MAX_STEPS:
                self.violates(f"not over: {len(self.scheduler.requests)} requests are left")
                break
            self.step()
        while self.in_flight:
            self._take_in(self.in_flight.popleft())
        if not self.violations:
            self._check_end()
        return self

    def step(self) -> None:
        self.steps += 1
        self._events()
        output = self.scheduler.schedule()
        self._check_step(output)
        if not output.total_num_scheduled_tokens:
            output = self._empty(output)
        self.now_ms += STEP_MS + TOKEN_MS * output.total_num_scheduled_tokens
        requests = self.scheduler.requests
        sampled = {name for name in output.num_scheduled_tokens if not requests[name].is_prefill_chunk}
        self.in_flight.append(InFlight(output, sampled))
        self._note(output)
        self._note_prompts(output)
        if len(self.in_flight) >= self.depth or not output.total_num_scheduled_tokens:
            self._take_in(self.in_flight.popleft())

    # What happens.

    def _random_tokens(self, count: int) -> list[int]:
        return [self.rng.randint(10, 200) for _ in range(count)]

    def _events(self) -> None:
        while self.left and (self.rng.random() < 0.3 or not self.scheduler.requests):
            self.left -= 1
            self._arrive()
        self._compile()
        what, place = self.rng.random(), self.rng.random()
        live = sorted(self.scheduler.requests, key=int)
        if self.feature.aborts and what < 0.03 and live:
            from vllm.v1.request import RequestStatus

            name = live[int(place * len(live))]
            self.aborted.add(name)
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        if self.feature.resets and 0.03 <= what < 0.06:
            self.scheduler.reset_prefix_cache(reset_running_requests=what < 0.05)
        if self.feature.sessions and 0.06 <= what < 0.3:
            sessions = [name for name in live if self.requests[name].resumable]
            if sessions:
                self._go_on(sessions[int(place * len(sessions))])

    def _compile(self) -> None:
        """Grammars that are due are compiled."""
        for name in [name for name, due in self.grammars_due.items() if due <= self.steps]:
            del self.grammars_due[name]
            if name in self.scheduler.requests:
                self.requests[name].structured_output_request.grammar = AnyToken()

    def _arrive(self) -> None:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import StructuredOutputsParams

        rng, name = self.rng, str(self.arrived)
        self.arrived += 1
        start = rng.choice(self.shared)[: rng.choice((0, 16, 24, 40))]
        images = self._images(len(start)) if self.feature.images else []
        ends = [image.mm_position.offset + image.mm_position.length for image in images]
        filler = max(ends, default=len(start)) - len(start)
        prompt = [*start, *self._random_tokens(filler + rng.randint(1, 24)), THINK]
        adapter = rng.randrange(ADAPTERS) if self.feature.adapters else 0
        params = SamplingParams(
            max_tokens=min(rng.randint(1, 40), self.limits.model_len - len(prompt) - 1),
            stop_token_ids=[STOP],
            structured_outputs=StructuredOutputsParams(regex=".*")
            if self.feature.grammars and rng.random() < 0.5
            else None,
            seed=1 if self.feature.seeds and rng.random() < 0.7 else None,
        )
        request = self._request(
            name,
            prompt,
            params,
            mm_features=images or None,
            lora_request=LoRARequest(f"adapter-{adapter}", adapter, "nowhere") if adapter else None,
            resumable=self.feature.sessions and rng.random() < 0.5,
            priority=rng.choice((-1, 0, 0, 3)) if self.feature.priority else 0,
        )
        if params.structured_outputs is not None:
            self.grammars_due[name] = self.steps + rng.randint(0, 6)
        self.requests[name] = request
        self.tokens[name] = []
        self.scheduler.add_request(request)

    def _request(self, name: str, prompt: list[int], params: Any, **more: Any) -> Any:
        from vllm.v1.request import Request

        # Of two that are as urgent and came at one time, vLLM preempts the one that was admitted first.
        arrival_time = EPOCH_S + (self.now_ms + 1e-3 * self.arrived) / 1e3
        return Request(name, prompt, params, None, arrival_time=arrival_time, block_hasher=self.hasher, **more)

    def _images(self, offset: int) -> list[Any]:
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

        found = []
        for _ in range(self.rng.choice((0, 1, 1, 2))):
            length = self.rng.choice((8, 16, 24))
            position = PlaceholderRange(offset=offset + self.rng.randint(0, 4), length=length)
            identifier = f"image-{length}-{self.rng.randrange(3)}"
            found.append(MultiModalFeatureSpec(None, "image", identifier, position))
            offset = position.offset + length
        return found

    def _go_on(self, name: str) -> None:
        """More input for a session, or its end."""
        from vllm import SamplingParams

        is_over = self.rng.random() < 0.4 or self.requests[name].num_tokens > MAX_MODEL_LEN - 50
        params = SamplingParams(max_tokens=self.rng.randint(1, 10), stop_token_ids=[STOP])
        self.scheduler.add_request(self._request(name, self._random_tokens(5), params, resumable=not is_over))

    def _token(self, name: str, position: int) -> int:
        drawn = chance(self.seed, name, position) % 40
        return END if drawn < 4 else STOP if drawn == 4 else 10 + drawn

    def _take_in(self, step: InFlight) -> None:
        """The result of a step."""
        from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput

        output, scheduler = step.output, self.scheduler
        names = list(output.num_scheduled_tokens)
        generated, drafts = [], []
        for name in names:
            request = self.requests[name]
            if name not in step.sampled:
                generated.append([])
                continue
            position = request.num_output_tokens
            proposed = len(output.scheduled_spec_decode_tokens.get(name, ()))
            accepted = chance(self.seed, name, position, "accepted") % (proposed + 1)
            generated.append([self._token(name, position + i) for i in range(accepted + 1)])
            count = chance(self.seed, name, position, "drafts") % (self.feature.drafts + 1)
            drafts.append((name, [self._token(name, position + accepted + 1 + i) for i in range(count)]))
        receiving, sending = scheduler.connector.transfers_over() if self.feature.connector else (set(), set())
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=generated,
            kv_connector_output=KVConnectorOutput(finished_recving=receiving, finished_sending=sending)
            if receiving or sending
            else None,
        )
        said = {}
        for client in scheduler.update_from_output(output, result).values():
            for one in client.outputs:
                self.tokens[one.request_id] += one.new_token_ids
                said[one.request_id] = (list(one.new_token_ids), str(one.finish_reason))
        self.trace.append(said)
        if self.feature.drafts:
            scheduler.update_draft_token_ids(DraftTokenIds([d[0] for d in drafts], [d[1] for d in drafts]))

    def _note(self, output: Any) -> None:
        """What two schedulers that do the same have in common."""
        scheduler, cached = self.scheduler, output.scheduled_cached_reqs
        self.trace.append(
            (
                list(output.num_scheduled_tokens.items()),
                [(new.req_id, new.block_ids, new.num_computed_tokens) for new in output.scheduled_new_reqs],
                list(zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)),
                sorted(cached.resumed_req_ids),
                output.scheduled_spec_decode_tokens,
                output.scheduled_encoder_inputs,
                sorted(output.finished_req_ids),
                sorted(output.preempted_req_ids or ()),
                output.free_encoder_mm_hashes,
                [request.request_id for request in scheduler.running],
                [request.request_id for request in scheduler.waiting],
                [request.request_id for request in self.admitted_first],
                scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            )
        )

    # What must hold.

    def violates(self, what: str) -> None:
        self.violations.append(f"{self.feature.name}, seed {self.seed}, step {self.steps}: {what}")

    def _empty(self, output: Any) -> Any:
        """A step without tokens: stock, in the same state, would not have had any either. A step that preempts admits
        nobody, but serves those that still run, unless vLLM chose who goes."""
        from meridian.vllm.kv import can_take_tokens
        from vllm.v1.core.sched.scheduler import Scheduler

        self.empty_steps += 1
        if self.is_stock:
            return output
        if output.preempted_req_ids:
            is_ours = self.scheduler._meridian_kv is not None and not self.scheduler._meridian_stands_aside
            if is_ours and any(map(can_take_tokens, self.scheduler.running)):
                self.violates(f"nothing ran, {output.preempted_req_ids} made room for nobody")
            return output
        again = Scheduler.schedule(self.scheduler)
        if not again.total_num_scheduled_tokens:
            return output
        self.violates(f"nothing ran, stock would have run {again.num_scheduled_tokens}")
        return again

    def _check_step(self, output: Any) -> None:
        scheduler, requests = self.scheduler, self.scheduler.requests
        given = output.num_scheduled_tokens
        if scheduler.max_num_scheduled_tokens != self.limits.tokens:
            self.violates(f"the engine's token budget stays {scheduler.max_num_scheduled_tokens}")
        if sum(given.values()) != output.total_num_scheduled_tokens or sum(given.values()) > self.limits.tokens:
            self.violates(f"{sum(given.values())} tokens, expected at most {self.limits.tokens}")
        if len(scheduler.running) > self.limits.seqs:
            self.violates(f"{len(scheduler.running)} requests run, expected at most {self.limits.seqs}")
        places = Counter(
            request.request_id
            for queue in (scheduler.running, scheduler.waiting, self.admitted_first)
            for request in queue
        )
        ending = {name for name, request in requests.items() if request.is_finished()}
        if set(places) != set(requests) - ending or any(count > 1 for count in places.values()):
            self.violates(f"{sorted(requests)} are live, the queues hold {dict(places)}")
        adapters = {r.lora_request.lora_int_id for r in scheduler.running if r.lora_request and not ends_in_flight(r)}
        served = {requests[name].lora_request.lora_int_id for name in given if requests[name].lora_request is not None}
        if self.feature.adapters and max(len(served), 0 if self.is_stock else len(adapters)) > self.limits.adapters:
            self.violates(f"adapters {adapters} run, {served} are served, expected at most {self.limits.adapters}")
        encoded = sum(
            requests[name].get_num_encoder_embeds(i)
            for name, inputs in output.scheduled_encoder_inputs.items()
            for i in inputs
        )
        if self.feature.images and encoded > self.limits.encoder:
            self.violates(f"{encoded} encoder tokens, expected at most {self.limits.encoder}")
        self._check_splits(output)
        self._check_pool()

    def _check_splits(self, output: Any) -> None:
        """The computed tokens are those after the step. Where the engine's own budget is used up, vLLM itself splits an
        image that it has come up to."""
        is_used_up = output.total_num_scheduled_tokens == self.limits.tokens
        for name, tokens in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            after = request.num_computed_tokens
            before = after - tokens
            if self.feature.whole_images:
                for image in request.mm_features:
                    start = image.mm_position.offset
                    if before <= start < after < start + image.mm_position.length and not is_used_up:
                        self.violates(f"request {name} got tokens {before}..{after}, which splits its image at {start}")
            missing, most = request.num_tokens - before, self.limits.long_prefill or self.limits.tokens
            # Stock splits it, and its model runner fails.
            is_ours = not getattr(self.scheduler, "_meridian_stands_aside", True)
            has_seed = is_ours and request.sampling_params.seed is not None
            if has_seed and tokens < missing <= min(most, self.limits.tokens):
                self.violates(f"request {name} got {tokens} of {missing} missing tokens, which its seed does not bear")
            if not self.feature.chunked_prefill and not self.feature.images and after < request.num_prompt_tokens:
                self.violates(f"request {name} got tokens {before}..{after} of {request.num_prompt_tokens}")

    def _note_prompts(self, output: Any) -> None:
        """The time since a prompt got tokens, while one could: it runs, or waits for a free seat and nothing else."""
        from vllm.v1.request import RequestStatus

        requests, scheduler = self.scheduler.requests, self.scheduler
        given = {name for name in output.num_scheduled_tokens if requests[name].num_output_tokens == 0}
        seats = self.limits.seqs - len(scheduler.running)
        ready = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        waits = seats > 0 and any(request.status in ready for request in scheduler.waiting)
        runs = any(request.is_prefill_chunk for request in scheduler.running)
        if given or not (waits or runs):
            self.prompts_since_ms = self.now_ms
        self.stalled_ms = max(self.stalled_ms, self.now_ms - self.prompts_since_ms)

    def _check_pool(self) -> None:
        scheduler = self.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        holders: Counter[int] = Counter()
        for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
            for blocks in manager.req_to_blocks.values():
                holders.update(block.block_id for block in blocks if not block.is_null)
        for _, blocks in scheduler.deferred_frees:
            holders.update(block.block_id for block in blocks)
        free = {block.block_id for block in pool.free_block_queue.get_all_free_blocks()}
        for block in pool.blocks:
            number = block.block_id
            if not block.is_null and (block.ref_cnt != holders[number] or (number in free) != (holders[number] == 0)):
                self.violates(f"block {number}: {block.ref_cnt} references, {holders[number]} holders")
                return
        kv = getattr(scheduler, "_meridian_kv", None)
        for hook in kv.pools if kv is not None else ():
            try:
                hook.audit()
            except AssertionError as error:
                self.violates(f"the mirror of the free blocks: {error}")

    def _check_end(self) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        if pool.get_num_free_blocks() != self.limits.blocks - 1:
            self.violates(f"{pool.get_num_free_blocks()} free blocks at the end, expected {self.limits.blocks - 1}")
        for name, tokens in self.tokens.items():
            request = self.requests[name]
            if request.resumable:
                continue
            expected = [self._token(name, i) for i in range(len(tokens))]
            is_over = tokens[-1:] == [STOP] or len(tokens) == request.max_tokens
            if tokens != expected or (not is_over and name not in self.aborted):
                self.violates(f"request {name} generated {tokens}, expected {expected}")


@dataclass(frozen=True)
class Arrival:
    """One request of a scripted drive."""

    step: int
    prompt_tokens: int
    answer_tokens: int
    adapter: int = 0
    # Steps that its grammar takes to compile; 0 for none.
    grammar_steps: int = 0


@dataclass
class Scripted(Drive):
    """Requests that answer from their second token on, and nothing else."""

    arrivals: tuple[Arrival, ...] = ()
    # When each request was over, milliseconds after the start.
    over_ms: dict[str, float] = field(default_factory=dict)

    def _events(self) -> None:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import StructuredOutputsParams

        self._compile()
        self.left = sum(arrival.step > self.steps for arrival in self.arrivals)
        for i, arrival in enumerate(self.arrivals):
            if arrival.step != self.steps:
                continue
            name, adapter = str(i), arrival.adapter
            self.tokens[name] = []
            grammar = StructuredOutputsParams(regex=".*") if arrival.grammar_steps else None
            if grammar is not None:
                self.grammars_due[name] = self.steps + arrival.grammar_steps
            self.requests[name] = self._request(
                name,
                [*self._random_tokens(arrival.prompt_tokens - 1), THINK],
                SamplingParams(max_tokens=arrival.answer_tokens, structured_outputs=grammar),
                lora_request=LoRARequest(f"adapter-{adapter}", adapter, "nowhere") if adapter else None,
            )
            self.scheduler.add_request(self.requests[name])

    def _token(self, name: str, position: int) -> int:
        return 10 if position else END

    def _take_in(self, step: InFlight) -> None:
        super()._take_in(step)
        for name, request in self.requests.items():
            if request.is_finished():
                self.over_ms.setdefault(name, self.now_ms)
