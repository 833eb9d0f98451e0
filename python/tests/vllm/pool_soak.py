"""Requests of random lengths against vLLM's real KV cache manager and block pools, without a model.
Requests arrive in chat sessions that share prefixes, are matched, computed, preempted, resumed, aborted and finished at
random; blocks are also pinned, let go of late and dropped from the cache as connectors do. After each of these steps
the pool is recounted from nothing: the queue of free blocks forwards and backwards, reference counts against who holds
each block, the hash table against the blocks' own hashes, and Meridian's mirror against all of it.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from meridian.engine import Scheduled

BLOCK_TOKENS = 4
THINK, END = 7, 8
TOOL_CALL = 9
KINDS = ("full", "hybrid")
MAX_TOKENS = 120
MAX_WAITING = 8


@dataclass
class Held:
    """Blocks that something other than a request's block table holds."""

    blocks: list[Any]
    due: int


@dataclass
class Soak:
    """One pool under test. `violations` holds the first lines of what was found wrong."""

    seed: int = 0
    kind: str = "full"
    blocks: int = 48
    eviction: str = "native:tiered-lru"
    attached: bool = True
    check: bool = True
    caching: bool = True
    connector: object = None
    # Whether a step computes several requests and may admit one as well.
    together: bool = False
    rng: random.Random = field(init=False)
    steps: int = 0
    checks: int = 0
    ended: int = 0
    preempted: int = 0
    aborted: int = 0
    resets: int = 0
    matched_tokens: int = 0
    prompt_tokens: int = 0
    violations: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        import torch
        from meridian import MeridianConfig, ModelConfig, PolicyConfig, SlotConfig, _native
        from meridian.vllm.kv import KvHook, OwnTime
        from meridian.vllm.markers import TokenMarkers
        from meridian.vllm.seams import ListSeams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.request_queue import SchedulingPolicy
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            SlidingWindowSpec,
        )

        self.rng = random.Random(self.seed)
        common: dict[str, Any] = {"block_size": BLOCK_TOKENS, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
        groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**common))]
        if self.kind == "hybrid":
            groups.append(KVCacheGroupSpec(["window"], SlidingWindowSpec(**common, sliding_window=3 * BLOCK_TOKENS)))
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks=self.blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=4 * MAX_TOKENS,
            scheduler_block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            enable_caching=self.caching,
        )
        self.pool = self.manager.block_pool
        self.scheduler = SimpleNamespace(
            kv_cache_manager=self.manager,
            block_size=BLOCK_TOKENS,
            policy=SchedulingPolicy.FCFS,
            running=[],
            waiting=deque(),
            max_num_running_reqs=2,
            connector=self.connector,
            num_lookahead_tokens=0,
            max_num_scheduled_tokens=MAX_TOKENS,
        )
        config = MeridianConfig(
            model=ModelConfig(strips_reasoning=True),
            policy=PolicyConfig(eviction=SlotConfig(self.eviction, deadline_ms=1000.0)),
        )
        self.engine = _native.Engine(
            config.to_json(),
            ".",
            markers=TokenMarkers([[THINK]], [[END]], tool_calls=[[TOOL_CALL]]),
            block_tokens=BLOCK_TOKENS,
            steps_ahead=0,
        )
        seams = ListSeams(self.scheduler)
        self.hook = KvHook(self.scheduler, seams, self.engine, self._failed, OwnTime())  # type: ignore[arg-type]
        if self.attached:
            self.hook.attach()
        self.running: list[Any] = self.scheduler.running
        self.waiting: deque[Any] = self.scheduler.waiting
        self.held: list[Held] = []
        self.sessions: list[list[int]] = [self._tokens(self.rng.randint(2, 20)) for _ in range(6)]
        self.session_of: dict[str, int] = {}
        self.started = 0

    def run(self, requests: int) -> None:
        """Go on until so many requests have ended."""
        while self.ended < requests and len(self.violations) < 10:
            self.step()
        while self.running or self.waiting or self.held:
            self.steps += 1000
            self._let_go()
            for request in [*self.running, *self.waiting]:
                self._end(request, aborted=True)
            self._check("the end")

    def step(self) -> None:
        """One thing that happens to an engine's KV cache, and a recount."""
        self.steps += 1
        self._let_go()
        if self.attached:
            # As a plan does before each step: in the engine, past the hooks.
            for hook in self.hook.pools:
                hook.mirror.rekey(time.monotonic() * 1e3)
        what = self.rng.random()
        if not (self.running or self.waiting) or (what < 0.25 and len(self.waiting) < MAX_WAITING):
            self._arrive()
        elif what < 0.35 and self.waiting:
            self._admit()
        elif what < 0.82 and self.running:
            self._compute(self.rng.sample(self.running, self.rng.randint(1, len(self.running)) if self.together else 1))
        elif what < 0.93 and self.running:
            self._end(self.rng.choice(self.running), aborted=self.rng.random() < 0.4)
        elif what < 0.95 and self.waiting:
            self._end(self.rng.choice(self.waiting), aborted=True)
        elif what < 0.97 and self.running:
            self._preempt(self.rng.choice(self.running))
        elif what < 0.985 and self.running:
            self._pin(self.rng.choice(self.running))
        elif what < 0.995:
            self.manager.evict_blocks({self.rng.randrange(1, self.blocks) for _ in range(3)})
        else:
            self.resets += self.manager.reset_prefix_cache()
        self._check("a step")

    def _failed(self, doing: str) -> None:
        self.violations.append(f"step {self.steps}: Meridian failed while {doing}: {sys.exc_info()[1]!r}")

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randint(10, 14) for _ in range(count)]

    def _arrive(self) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        session = self.rng.randrange(len(self.sessions))
        prompt = [*self.sessions[session], *self._tokens(self.rng.randint(1, 8)), THINK]
        request_id = str(self.started)
        self.started += 1
        extra = {"meridian_keep_thinking": True} if self.rng.random() < 0.1 else None
        params = SamplingParams(max_tokens=MAX_TOKENS, extra_args=extra)
        request = Request(request_id, prompt, params, None, block_hasher=self.hasher)
        self.session_of[request_id] = session
        self.engine.add(
            request,
            request_id,
            prompt=prompt[-8:],
            prompt_tokens=len(prompt),
            max_tokens=MAX_TOKENS,
            arrival_ms=float(self.steps),
            deadline_ms=float("inf"),
            priority=0,
            tenant="",
            # The host finds the other sessions by their prompts.
            session=str(session) if session % 2 else "",
        )
        self.waiting.append(request)
        self.hook.request_arrives(request)
        self._admit()

    def _admit(self) -> None:
        """A step that admits the first waiting request, if it fits."""
        self._step_begins()
        self._step_ends({}, admits=True)

    def _step_ends(self, scheduled: dict[str, int], *, admits: bool) -> None:
        """The end of a step that has scheduled these tokens of each request. It may admit the first waiting request."""
        from vllm.v1.request import RequestStatus

        admitted = []
        request = self.waiting[0] if admits and self.waiting else None
        if request is not None:
            if self.attached:
                self.hook.admission_begins()
            found, tokens, _ = self.manager.get_computed_blocks(request)
            missing = request.num_tokens - tokens
            if self.manager.allocate_slots(request, missing, tokens, new_computed_blocks=found) is not None:
                self.waiting.popleft()
                self.running.append(request)
                request.status = RequestStatus.RUNNING
                request.num_computed_tokens = request.num_tokens
                if not request.num_preemptions:
                    self.matched_tokens += tokens
                    self.prompt_tokens += request.num_tokens
                admitted.append(SimpleNamespace(req_id=request.request_id, num_computed_tokens=tokens))
                scheduled = {**scheduled, request.request_id: missing}
        self.hook.step_ends()
        taken = self.hook.taken() if self.attached else []
        if scheduled:
            self.engine.end(Scheduled(scheduled, admitted), float(self.steps), False, taken)

    def _step_begins(self) -> None:
        if self.attached:
            self.hook.step_begins(0)

    def _compute(self, requests: list[Any]) -> None:
        """A few decode steps; whoever is last makes room, as in vLLM's scheduler."""
        for _ in range(self.rng.randint(1, 6)):
            for request in [request for request in requests if request in self.running]:
                if request.num_tokens >= MAX_TOKENS:
                    self._end(request, aborted=False)
                    continue
                what = self.rng.random()
                token = END if what < 0.1 else TOOL_CALL if what < 0.11 else self.rng.randint(10, 14)
                request.append_output_token_ids(token)
                generated = SimpleNamespace(request_id=request.request_id, new_token_ids=[token])
                self.engine.tokens([[generated]], float(self.steps))
            self._step_begins()
            for request in requests:
                while request in self.running and self.manager.allocate_slots(request, 1) is None:
                    self._preempt(self.running[-1])
                if request in self.running:
                    request.num_computed_tokens += 1
            scheduled = {request.request_id: 1 for request in requests if request in self.running}
            self._step_ends(scheduled, admits=self.together and self.rng.random() < 0.1)

    def _preempt(self, request: Any) -> None:
        from vllm.v1.request import RequestStatus

        self.preempted += 1
        self.running.remove(request)
        self.hook.request_pauses(request)
        self._free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)
        self.engine.preempted(request.request_id, 1)

    def _end(self, request: Any, *, aborted: bool) -> None:
        from vllm.v1.request import RequestStatus

        (self.running if request in self.running else self.waiting).remove(request)
        request.status = RequestStatus.FINISHED_ABORTED if aborted else RequestStatus.FINISHED_STOPPED
        self.hook.request_ends(request)
        self._free(request)
        self.engine.remove(request.request_id)
        self.ended += 1
        self.aborted += aborted
        if not aborted:
            # The next turn sees the prompt and the answer, not the thinking; a long session begins anew.
            answer = list(request.output_token_ids)
            answer = answer[answer.index(END) + 1 :] if END in answer else []
            history = [*request.prompt_token_ids[:-1], *answer]
            session = self.session_of[request.request_id]
            self.sessions[session] = history if len(history) < 60 else self._tokens(8)
        del self.session_of[request.request_id]

    def _free(self, request: Any) -> None:
        """At once, or after the step that may still write to the blocks (`Scheduler._free_request_blocks`)."""
        if self.rng.random() < 0.8:
            self.manager.free(request)
            return
        blocks = self.manager.pop_blocks_for_free(request)
        if blocks:
            self.held.append(Held(blocks, self.steps + self.rng.randint(1, 5)))

    def _pin(self, request: Any) -> None:
        """What a connector does with blocks that it is about to read."""
        blocks = [block for group in self.manager.get_blocks(request.request_id).blocks for block in group]
        blocks = [block for block in blocks if not block.is_null][: self.rng.randint(1, 6)]
        self.pool.touch(blocks)
        if self.rng.random() < 0.3:
            # Several holders let go of the same blocks in one call, as of the sources of copies.
            self.pool.touch(blocks)
            blocks = [*blocks, *blocks]
        self.held.append(Held(blocks, self.steps + self.rng.randint(1, 20)))

    def _let_go(self) -> None:
        for held in [held for held in self.held if held.due <= self.steps]:
            self.held.remove(held)
            self.pool.free_blocks(reversed(held.blocks))

    def _check(self, after: str) -> None:
        if not self.check:
            return
        self.checks += 1
        try:
            self._recount()
        except AssertionError as error:
            self.violations.append(f"step {self.steps}, after {after}: {error}")

    def _recount(self) -> None:
        pool, queue = self.pool, self.pool.free_block_queue
        free = []
        block = queue.fake_free_list_head.next_free_block
        before = queue.fake_free_list_head
        while block is not queue.fake_free_list_tail:
            assert block is not None, "the queue of free blocks ends early"
            assert block.prev_free_block is before, f"block {block.block_id}: the queue differs backwards"
            free.append(block)
            assert len(free) <= self.blocks, "the queue of free blocks goes in a circle"
            before, block = block, block.next_free_block
        assert len(free) == queue.num_free_blocks, f"{len(free)} blocks in the queue, {queue.num_free_blocks} counted"
        holders: Counter[int] = Counter()
        for manager in self.manager.coordinator.single_type_managers:
            for blocks in manager.req_to_blocks.values():
                holders.update(block.block_id for block in blocks if not block.is_null)
        for held in self.held:
            holders.update(block.block_id for block in held.blocks if not block.is_null)
        in_queue = {block.block_id for block in free}
        table = {
            block.block_id: key
            for key, entry in pool.cached_block_hash_to_block._cache.items()
            for block in (entry.values() if isinstance(entry, dict) else [entry])
        }
        for block in pool.blocks:
            if block.is_null:
                continue
            number, readers = block.block_id, holders[block.block_id]
            assert block.ref_cnt == readers, f"block {number}: {block.ref_cnt} references, {readers} holders"
            assert (number in in_queue) == (readers == 0), f"block {number}: {readers} holders, in the queue or not"
            assert table.get(number) == block.block_hash, f"block {number}: the hash table has another hash"
        if self.attached:
            for hook in self.hook.pools:
                hook.audit()
