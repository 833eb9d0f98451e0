"""Meridian's order of eviction inside vLLM's own KV cache, and its choice of requests to preempt.

No code of vLLM is copied. Through the scheduler's seams (seams.py), the hook wraps the methods that take and free
blocks (vllm/v1/core/block_pool.py: `BlockPool.free_blocks`, `get_new_blocks`, `touch`, `evict_blocks`,
`reset_prefix_cache`). `KVCacheManager.allocate_slots` (vllm/v1/core/kv_cache_manager.py), which vLLM calls for each
request, is wrapped only while it admits requests, and in steps that may run out of blocks. `detach` unwraps them.
vLLM's own queue of free blocks stays the truth. Meridian changes only the order in which blocks enter the queue, and
the blocks at its front when vLLM allocates.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import RequestStatus

from meridian import _native

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    from meridian.vllm.seams import Seams
    from meridian.vllm.thinking import ThinkHook

# Below vLLM's own logger, whose handlers and level it shares.
logger = logging.getLogger("vllm.meridian")

# Exceptions that Meridian itself could raise: a panic of the native code derives from BaseException.
DEFECTS = (Exception, _native.PanicException)

# In `vllm_xargs`: the client will return the thinking of this request, whatever the model's template does.
KEEP_THINKING = "meridian_keep_thinking"

# Blocks chosen at most for allocations that a step may still make: putting blocks at the front takes time.
MOST_AHEAD = 16

# Recently ended requests, for an offloading policy that asks a step later; None without such a policy.
_ended: OrderedDict[str, int] | None = None
_ENDED_KEPT = 4096
_attached: weakref.ref[KvHook] | None = None


def follow_ended_requests() -> None:
    """Make `ended_request` remember requests that end from now on."""
    global _ended
    if _ended is None:
        _ended = OrderedDict()


def ended_request(request_id: str) -> int | None:
    """Start of the dead thinking of an ended request, tokens; None when none of it is dead. Call once per request."""
    return None if _ended is None else _ended.pop(request_id, None)


def engine_here() -> tuple[_native.Engine, int] | None:
    """The engine of the `MeridianScheduler` in this process and the tokens of its KV blocks."""
    hook = _attached() if _attached is not None else None
    return None if hook is None else (hook.engine, hook.block_tokens)


def can_take_tokens(request: Request) -> bool:
    """Whether the request has tokens that are neither computed nor in flight."""
    has_tokens = request.num_tokens_with_spec + request.num_output_placeholders > request.num_computed_tokens
    return has_tokens and not ends_in_flight(request)


def ends_in_flight(request: Request) -> bool:
    """Whether a step in flight computes the request's last token: asynchronous scheduling passes over it (scheduler.py:
    `schedule`)."""
    in_flight = request.num_output_placeholders
    last = request.num_prompt_tokens + request.max_tokens
    return in_flight > 0 and request.num_computed_tokens + 2 - in_flight >= last


class OwnTime:
    """Nanoseconds that Meridian's code took inside vLLM's."""

    __slots__ = ("ns",)

    def __init__(self) -> None:
        self.ns = 0


class KvHook:
    """Connects Meridian to the KV cache of one scheduler, from `attach` to `detach`.

    When Meridian itself fails, the hook detaches and calls `failed` once, with a description of the failed action. The
    engine's own behaviour is back within the same call.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        seams: Seams,
        engine: _native.Engine,
        failed: Callable[[str], None],
        own_time: OwnTime,
    ) -> None:
        self._scheduler = scheduler
        self._seams = seams
        self._own_time = own_time
        self.engine = engine
        self.block_tokens: int = scheduler.block_size
        self._tool_calls = engine.tool_calls
        # The hook that knows the probes.
        self.probes: ThinkHook | None = None
        self._failed = failed
        self._on = False
        manager = scheduler.kv_cache_manager
        managers = manager.coordinator.single_type_managers
        # Without prefix caching, all free blocks are equal.
        pools = dict.fromkeys(m.block_pool for m in managers) if manager.enable_caching else {}
        # A connector may still read a freed block, and allocation then waits for it: dead blocks go before all other
        # cached blocks, but not before empty ones. It may also load what a session has lost, so none waits for others.
        has_connector = scheduler.connector is not None
        self._pools = {
            id(pool): PoolHook(pool, seams, engine, self.block_tokens, has_connector, self._fail, own_time)
            for pool in pools
        }
        self._hooks = tuple(self._pools.values())
        self._growth_blocks = engine.growth_blocks
        # Whether a request has received tokens in this step, and whether any has yet to take KV blocks for its prompt.
        self._step_serves = self._has_prompts = False
        # Of the running requests counted so far in this step: the blocks that their prompts lack, by priority.
        self._missing_blocks: Counter[int] = Counter()
        self._counted = 0
        # What the hook's wrapper of `allocate_slots` calls; whether the wrapper is in its place, or inside one of other
        # code; and whether it looks at the allocations of this step.
        self._allocate_slots: Callable[..., Any] = manager.allocate_slots
        self._is_wrapped = self._watches = False
        self._groups = len({(id(m.block_pool), m.kv_cache_group_id) for m in managers})
        # Sliding windows and the like give blocks back as a prompt goes on.
        self._keeps_all_blocks = self._groups == 1 and all(isinstance(m, FullAttentionManager) for m in managers)
        # Blocks that a step takes at most: for each running request (those of its lookahead and one that it begins, in
        # each group), and for the tokens of prompts.
        least = min((m.block_size for m in managers), default=self.block_tokens)
        self._blocks_a_request = self._groups * (2 + scheduler.num_lookahead_tokens // least)
        self._blocks_of_prompts = self._groups * (scheduler.max_num_scheduled_tokens // least)
        self._most_growth = manager.block_pool.num_gpu_blocks // 10
        self._preempts_the_last = scheduler.policy is SchedulingPolicy.FCFS
        # Of each waiting request, the cached blocks that its prompt matched at its arrival.
        self._awaited: dict[str, list[tuple[PoolHook, list[int]]]] = {}

    @property
    def pools(self) -> list[PoolHook]:
        """One hook for each of the scheduler's block pools; none without prefix caching."""
        return list(self._pools.values())

    @property
    def is_detached(self) -> bool:
        """Whether vLLM's objects keep no trace of the hook, so that it can be attached again."""
        return not self._on and not self._is_wrapped and all(pool.is_detached for pool in self._pools.values())

    def attach(self) -> None:
        """Take over the order of eviction."""
        self.engine.keep_answers_ahead(self._groups, self._scheduler.num_lookahead_tokens)
        for pool in self._pools.values():
            pool.attach()
        self._on = True
        global _attached
        _attached = weakref.ref(self)

    def detach(self) -> None:
        """Return the order of eviction to vLLM, which allocates free blocks in the order of its queue."""
        global _attached
        self._on = False
        self._awaited.clear()
        for pool in self._pools.values():
            pool.turn_off()
        if _attached is not None and _attached() is self:
            _attached = None
        self.step_ends()
        for pool in self._pools.values():
            pool.detach()

    def step_begins(self, prompt_blocks: int) -> None:
        """Begin a step in which running requests have yet to take `prompt_blocks` for their prompts."""
        self._step_serves, self._has_prompts = False, prompt_blocks > 0
        self._missing_blocks.clear()
        self._counted = 0
        scheduler = self._scheduler
        if self._preempts_the_last:
            free = scheduler.kv_cache_manager.block_pool.free_block_queue.num_free_blocks
            if free < len(scheduler.running) * self._blocks_a_request + self._blocks_of_prompts:
                self._watch_allocations()

    def admission_begins(self) -> None:
        """From here on, the step admits requests. A later call in the same step does nothing."""
        if not self._watches and self._on:
            try:
                self._step_serves = any(map(can_take_tokens, self._scheduler.running))
                self._watch_allocations()
            except DEFECTS:
                self._fail("admitting requests")

    def _watch_allocations(self) -> None:
        self._watches = True
        if not self._is_wrapped:
            manager = self._scheduler.kv_cache_manager
            self._allocate_slots = self._seams.wrap(manager, "allocate_slots", self._allocate)
            self._is_wrapped = True

    def step_ends(self) -> None:
        """Restore vLLM's method."""
        if self._watches:
            self._watches = False
            manager = self._scheduler.kv_cache_manager
            self._is_wrapped = not self._seams.unwrap(manager, "allocate_slots", self._allocate)

    def taken(self) -> list[tuple[int, list[int]]]:
        """The blocks that each pool, by its number in the engine, handed out in this step and that have not been
        reported. Ends the step for the pools."""
        taken = []
        for pool in self._hooks:
            if pool.in_step:
                taken.append((pool.pool_number, pool.step_ends()))
        return taken

    def request_arrives(self, request: Request) -> None:
        """Report the cached blocks that a request will need. Call it once vLLM has queued it."""
        if not self._on or not self._pools or not self.engine.reads_awaited or self._is_probe(request):
            return
        # One for which a seat is free may wait too: for KV blocks, or for warm sessions.
        manager = self._scheduler.kv_cache_manager
        groups = manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)[0]
        found = [block for group in groups for block in group if not block.is_null]
        awaited = []
        for hook in self._pools.values():
            ids = [block.block_id for block in found if _is_of(block, hook.pool)]
            if ids:
                hook.native.awaited(ids, time.monotonic() * 1e3)
                awaited.append((hook, ids))
        if awaited:
            self._awaited[request.request_id] = awaited

    def _no_longer_waits(self, request: Request, is_admitted: bool) -> None:
        for hook, ids in self._awaited.pop(request.request_id, ()):
            if not is_admitted:
                hook.native.not_awaited(ids)

    def request_ends(self, request: Request) -> None:
        """Mark the dead blocks of an ending request, and report its chain. Call it before vLLM frees its blocks. A
        connector or a running step may release them later; they count as dead from this call on."""
        self._mark_dead(request)
        self._no_longer_waits(request, is_admitted=False)
        if self._on and self._pools and self.engine.reads_chains and not self._is_probe(request):
            self._chain_ends(request, "tool" if self._calls_tool(request) else "turn")

    def request_pauses(self, request: Request) -> None:
        """Report the chain of a request that is about to be preempted."""
        if self._on and self._pools and self.engine.reads_chains and not self._is_probe(request):
            self._chain_ends(request, "preempted")

    def _chain_ends(self, request: Request, stop: Literal["turn", "tool", "preempted"]) -> None:
        """Report the blocks that a request leaves, head first, with what is known of it and of its session."""
        chains = []
        for manager in self._scheduler.kv_cache_manager.coordinator.single_type_managers:
            blocks = manager.req_to_blocks.get(request.request_id, ())
            pool = self._pools[id(manager.block_pool)]
            chains.append((pool.native, [block.block_id for block in blocks if not block.is_null]))
        self.engine.chain_ends(request.request_id, stop, chains, time.monotonic() * 1e3)

    def _mark_dead(self, request: Request) -> None:
        if _ended is not None:
            # A later request may reuse the id.
            _ended.pop(request.request_id, None)
        if not self._on or not self._pools:
            return
        # No request reuses the tokens that a probe appends to its request's tokens.
        think_from = None if self.probes is None else self.probes.prompt_tokens(request.request_id)
        is_probe = think_from is not None
        if not is_probe and self._thinking_is_dead(request):
            think_from = self.engine.think_from(request.request_id)
        if think_from is None:
            return
        if _ended is not None and not is_probe:
            _ended[request.request_id] = think_from
            while len(_ended) > _ENDED_KEPT:
                _ended.popitem(last=False)
        for manager in self._scheduler.kv_cache_manager.coordinator.single_type_managers:
            pool = self._pools[id(manager.block_pool)]
            blocks = manager.req_to_blocks.get(request.request_id, ())
            pool.mark_dead(blocks, manager.block_size, think_from)

    def unshared_blocks(self, request: Request) -> int:
        """KV blocks that only this request attends."""
        managers = self._scheduler.kv_cache_manager.coordinator.single_type_managers
        blocks = (block for m in managers for block in m.req_to_blocks.get(request.request_id, ()))
        return sum(block.ref_cnt == 1 and not block.is_null for block in blocks)

    def _thinking_is_dead(self, request: Request) -> bool:
        """Whether the next prompt leaves out this request's thinking."""
        dead = self.engine.evicts_dead_thinking
        if dead is None:
            return False
        params = request.sampling_params
        given = ((params.extra_args if params is not None else None) or {}).get(KEEP_THINKING)
        if not dead or given is True or given == 1:
            return False
        # A client may send thinking back that was cut off, to continue it; a session continues by itself.
        cut_off = request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        if cut_off and self.engine.phase(request.request_id) == "think":
            return False
        if getattr(request, "resumable", False):
            return False
        # The tool's result follows a turn that ends in a tool call, and its thinking stays until the next question.
        # Structured output may force a tool call without the tokens that begin one.
        if request.use_structured_output:
            return False
        return not self._calls_tool(request)

    def _calls_tool(self, request: Request) -> bool:
        """Whether its output begins a tool call, by the model's markers."""
        return any(_contains(request.output_token_ids, ids) for ids in self._tool_calls)

    def _allocate(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        began_ns = time.perf_counter_ns()
        original = self._allocate_slots
        if not self._watches or not self._on:
            return original(request, *args, **kwargs)
        watermark = self._watermark(request, kwargs)
        own_watermark = None if watermark is None else self._seams.leave_free(watermark)
        own_time = self._own_time
        own_time.ns += time.perf_counter_ns() - began_ns
        try:
            allocated = original(request, *args, **kwargs)
        finally:
            began_ns = time.perf_counter_ns()
            if own_watermark is not None and (changed := self._seams.leave_free(own_watermark)) != watermark:
                # By the wrapper of other code.
                self._seams.leave_free(changed)
        try:
            new_tokens = kwargs.get("num_new_tokens", args[0] if args else 0)
            if allocated is not None and request.status != RequestStatus.RUNNING:
                self._has_prompts = self._has_prompts or new_tokens < request.num_tokens
            self._step_serves = self._step_serves or (allocated is not None and new_tokens > 0)
            if allocated is not None and self._awaited:
                self._no_longer_waits(request, is_admitted=True)
            found = kwargs.get("new_computed_blocks", args[2] if len(args) > 2 else None)
            if allocated is None:
                if request.status == RequestStatus.RUNNING:
                    self._choose_victim(request)
            elif found is not None and self._pools and not self._is_probe(request):
                self._matched([b for group in found.blocks for b in group if not b.is_null], request)
        except DEFECTS:
            self._fail("following an allocation")
        own_time.ns += time.perf_counter_ns() - began_ns
        return allocated

    def _watermark(self, request: Request, kwargs: dict[str, Any]) -> int | None:
        """Free blocks that the admission of this request leaves to those that run; None to leave vLLM's own number.

        vLLM reads it when it admits a request while others run (kv_cache_manager.py: `allocate_slots`). Without
        it, vLLM admits a request when its prompt just fits, and then preempts another for the next block. Waiting would
        be pointless where a connector loads the request's KV, or where the request has the step to itself because the
        running ones are in flight. No request waits for less urgent ones."""
        is_admitted = request.status != RequestStatus.RUNNING and self._step_serves
        try:
            is_loaded = request.num_computed_tokens > 0 or kwargs.get("num_external_computed_tokens", 0) > 0
            if not is_admitted or is_loaded:
                return None
            running = self._scheduler.running
            ahead = len(running)
            if not self._preempts_the_last:
                ahead = sum(other.priority <= request.priority for other in running)
            # The rule of `KvGrowth::reserve` in the core.
            reserve = min(int(self._growth_blocks * ahead), self._most_growth)
            if self._has_prompts and self._keeps_all_blocks:
                reserve += self._prompt_blocks(running, None if self._preempts_the_last else request.priority)
        except DEFECTS:
            self._fail("admitting a request")
            return None
        return reserve if reserve > cast("Any", self._scheduler.kv_cache_manager).watermark_blocks else None

    def _prompt_blocks(self, running: list[Request], priority: int | None) -> int:
        """KV blocks that running requests have yet to take for tokens that they already have; with `priority`, those
        that are at least as urgent.

        vLLM admits only after it has served the running requests. Between two admissions of a step, it only adds to its
        list, and takes no blocks for those in it. So each request is counted once: counting a thousand of them at every
        admission would take half a millisecond.
        """
        (manager,) = self._scheduler.kv_cache_manager.coordinator.single_type_managers
        for request in running[self._counted :]:
            if request.num_tokens - request.num_computed_tokens > 1:
                held = len(manager.req_to_blocks.get(request.request_id, ()))
                missing = max(-(-request.num_tokens // manager.block_size) - held, 0)
                self._missing_blocks[request.priority] += missing
        self._counted = len(running)
        urgent = (blocks for other, blocks in self._missing_blocks.items() if priority is None or other <= priority)
        return sum(urgent)

    def _is_probe(self, request: Request) -> bool:
        return self.probes is not None and self.probes.prompt_tokens(request.request_id) is not None

    def _choose_victim(self, request: Request) -> None:
        """Choose who gives up KV blocks for this running request."""
        scheduler = self._scheduler
        if not self._preempts_the_last:
            return
        candidates = self._seams.candidates(request, self._step_serves)
        if len(candidates) < 2:
            return
        reads_blocks = self.engine.reads_victim_blocks
        blocks = [self.unshared_blocks(candidate) for candidate in candidates] if reads_blocks else []
        block_pool = scheduler.kv_cache_manager.block_pool
        pool = self._pools.get(id(block_pool))
        counts = (block_pool.get_num_free_blocks(), 0) if pool is None else pool.counts()
        memory = (time.monotonic() * 1e3, counts[0], counts[1], block_pool.num_gpu_blocks)
        victim = self.engine.victim(candidates, blocks, memory)
        if victim is not None:
            self._seams.preempt_next(candidates[victim])

    def _matched(self, blocks: list[KVCacheBlock], request: Request) -> None:
        for hook in self._pools.values():
            own = [block for block in blocks if _is_of(block, hook.pool)]
            # A resumed request finds the blocks that it computed itself; that is no reuse.
            ids = [] if request.num_preemptions else [block.block_id for block in own]
            if ids and self.engine.reads_chains:
                hook.native.prefix_matched(request.request_id, ids)
            hook.matched(ids, [block.block_id for block in own if block.ref_cnt > 1])

    def _fail(self, doing: str) -> None:
        if self._on:
            self.detach()
            self._failed(doing)


class PoolHook:
    """The wrapped methods of one `BlockPool`."""

    def __init__(
        self,
        pool: BlockPool,
        seams: Seams,
        engine: _native.Engine,
        block_tokens: int,
        has_connector: bool,
        failed: Callable[[str], None],
        own_time: OwnTime,
    ) -> None:
        self.pool = pool
        self._seams = seams
        self._failed = failed
        self._own_time = own_time
        self._on = False
        self.mirror = engine.pool(pool.num_gpu_blocks, block_tokens, has_connector)
        self.pool_number = self.mirror.number
        # Blocks that were handed out, and that the mirror has not been told of.
        self._taken: list[int] = []
        # How many blocks without contents stand at the front of vLLM's queue, at least; how many of its first blocks
        # may be handed out without a choice; how many this step took; and how many the one before took.
        self._empty = self._ready = self.in_step = self._in_last_step = 0
        self._originals: dict[str, Callable[..., Any]] = {}
        # The methods that are wrapped.
        self._wrapped: list[str] = []
        self._wrappers: dict[str, Callable[..., Any]] = {
            "free_blocks": self._free_blocks,
            "get_new_blocks": self._get_new_blocks,
            "touch": self._touch,
            "evict_blocks": self._evict_blocks,
            "reset_prefix_cache": self._reset_prefix_cache,
            "unpin_blocks": self._unpin_blocks,
        }

    def attach(self) -> None:
        """Wrap the methods, and take in the free blocks."""
        for name, wrapper in self._wrappers.items():
            self._originals[name] = _latest(self.pool, name, self._seams.wrap(self.pool, name, wrapper))
            self._wrapped.append(name)
        self._resync()
        self._on = True

    @property
    def is_detached(self) -> bool:
        """Whether no wrapper of this hook is left in the pool."""
        return not self._on and not self._wrapped

    def turn_off(self) -> None:
        """Make the wrapped methods pass all calls on unchanged."""
        self._on = False

    def detach(self) -> None:
        """Unwrap the methods, except those that other code has wrapped in turn."""
        self.turn_off()
        unwrap = self._seams.unwrap
        self._wrapped = [name for name in self._wrapped if not unwrap(self.pool, name, self._wrappers[name])]

    @property
    def native(self) -> _native.BlockPool:
        """The mirror of the pool's free blocks, for a call that may change which of them go first."""
        if self._taken and self._on:
            self._empty = self.mirror.taken(self.take_taken(), time.monotonic() * 1e3)
        self._ready = self._empty
        return self.mirror

    def take_taken(self) -> list[int]:
        """The blocks that were handed out since the last report."""
        taken, self._taken = self._taken, []
        return taken

    def step_ends(self) -> list[int]:
        """What was chosen for this step may be out of date in the next. Returns what has not been reported."""
        self._ready = self._empty
        self._in_last_step, self.in_step = self.in_step, 0
        return self.take_taken()

    def counts(self) -> tuple[int, int]:
        """Numbers of empty and of cached free blocks."""
        return self.native.counts()

    def audit(self) -> None:
        """Raise AssertionError when the mirror does not agree with vLLM's queue."""
        self.native.audit(*self._queue())

    def mark_dead(self, blocks: Sequence[KVCacheBlock], block_tokens: int, think_from: int) -> None:
        """Mark the cached blocks of a request's chain after `think_from` tokens: no prompt will match them."""
        dead = []
        for position in range(len(blocks) - 1, think_from // block_tokens - 1, -1):
            block = blocks[position]
            if block.is_null or block.block_hash is None:
                continue
            tokens = getattr(block, "block_hash_num_tokens", None) or (position + 1) * block_tokens
            # A shorter prefix may find the block as well.
            if tokens > think_from and not self._has_more_hashes(block):
                dead.append(block.block_id)
        if dead:
            self.native.mark_dead(dead)

    def matched(self, blocks: list[int], shared: list[int]) -> None:
        """Note that a prompt matched `blocks`, and that another request uses `shared` of them."""
        if blocks or shared:
            self.native.matched(blocks, shared)

    def _has_more_hashes(self, block: KVCacheBlock) -> bool:
        return bool(getattr(self.pool, "cached_block_hashes_by_block", {}).get(block.block_id))

    def _queue(self) -> tuple[list[int], list[int | None]]:
        free = self.pool.free_block_queue.get_all_free_blocks()
        return [block.block_id for block in free], [_tokens(block) for block in free]

    def _resync(self) -> None:
        free = self.pool.free_block_queue.get_all_free_blocks()
        cached = [block.block_hash is not None for block in free]
        if cached != sorted(cached):
            self._to_front(block.block_id for block in free if block.block_hash is None)
        self._taken = []
        self.mirror.resync(*self._queue())
        self._empty = self._ready = self.mirror.counts()[0]

    def _to_front(self, block_ids: Iterable[int]) -> None:
        blocks = [self.pool.blocks[block_id] for block_id in block_ids]
        queue = self.pool.free_block_queue
        removed: list[KVCacheBlock] = []
        try:
            for block in blocks:
                queue.remove(block)
                removed.append(block)
        finally:
            # A block that is not in the queue must not lose the others.
            queue.prepend_n(removed)

    def _free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        blocks = list(ordered_blocks)
        if self._on:
            began_ns = time.perf_counter_ns()
            try:
                blocks = self._order(blocks)
            except DEFECTS:
                self._failed("ordering freed blocks")
            self._own_time.ns += time.perf_counter_ns() - began_ns
        self._originals["free_blocks"](blocks)

    def _order(self, blocks: list[KVCacheBlock]) -> list[KVCacheBlock]:
        """Take dead blocks out of the prefix cache, so that vLLM puts them at the front of its queue. The rest goes to
        the tail in the policy's order."""
        pool = self.pool
        leaving = [b for b in blocks if b.ref_cnt == 1 and not b.is_null and _is_of(b, pool)]
        ids = [block.block_id for block in leaving]
        if any(block.ref_cnt > 1 for block in blocks) and len({id(block) for block in blocks}) < len(blocks):
            # Blocks released several times in one call (copies of partly matched blocks): rare, no order to choose.
            times = Counter(id(block) for block in blocks)
            last = [b for b in blocks if 1 < b.ref_cnt == times[id(b)] and not b.is_null and _is_of(b, pool)]
            twice = list({id(b): b for b in last}.values())
            changed = self.native.leaving(
                [block.block_id for block in twice], [_tokens(block) for block in twice], time.monotonic() * 1e3
            )
            if changed is not None and changed[0]:
                self._originals["evict_blocks"](set(changed[0]))
        if not leaving:
            return blocks
        changed = self.native.leaving(ids, [_tokens(block) for block in leaving], time.monotonic() * 1e3)
        if changed is None:
            return blocks
        dead, freed = changed
        if dead:
            self._originals["evict_blocks"](set(dead))
        rest = [block for block in blocks if block.ref_cnt != 1 or block.is_null or not _is_of(block, pool)]
        return [*(pool.blocks[block_id] for block_id in freed), *rest]

    def _unpin_blocks(self, blocks: Iterable[KVCacheBlock], *args: Any, **kwargs: Any) -> None:
        blocks = list(blocks)
        self._originals["unpin_blocks"](blocks, *args, **kwargs)
        if self._on:
            try:
                # They are at the tail of the queue and readable until vLLM allocates them, like cached blocks.
                free = [block.block_id for block in blocks if block.ref_cnt == 0]
                self.native.leaving(free, [0] * len(free), time.monotonic() * 1e3)
            except DEFECTS:
                self._failed("following unpinned blocks")

    def _get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        if not self._on:
            return self._originals["get_new_blocks"](num_blocks)
        began_ns = time.perf_counter_ns()
        if num_blocks > self._ready:
            try:
                self._choose(num_blocks)
            except DEFECTS:
                self._failed("choosing blocks to evict")
        chosen_ns = time.perf_counter_ns()
        blocks = self._originals["get_new_blocks"](num_blocks)
        taken_ns = time.perf_counter_ns()
        if self._on:
            self._empty -= num_blocks
            self._ready -= num_blocks
            self.in_step += num_blocks
            self._taken += [block.block_id for block in blocks]
        self._own_time.ns += time.perf_counter_ns() - taken_ns + chosen_ns - began_ns
        return blocks

    def _choose(self, num_blocks: int) -> None:
        """Put the blocks that the policy evicts first at the front of vLLM's queue, at once for as many as the step may
        still take."""
        free = self.pool.free_block_queue.num_free_blocks
        ahead = min(max(self._in_last_step - self.in_step, 0), MOST_AHEAD, free)
        choice = self.mirror.choose(self.take_taken(), num_blocks, ahead, free, time.monotonic() * 1e3)
        if choice is None:
            self._resync()
        else:
            self._empty, self._ready, chosen = choice
            if chosen:
                self._to_front(chosen)

    def _touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._originals["touch"](blocks)
        if self._on:
            began_ns = time.perf_counter_ns()
            try:
                self.native.touched([block.block_id for block in blocks if not block.is_null])
            except DEFECTS:
                self._failed("following touched blocks")
            self._own_time.ns += time.perf_counter_ns() - began_ns

    def _evict_blocks(self, block_ids: set[int]) -> None:
        self._originals["evict_blocks"](block_ids)
        if self._on:
            try:
                every = self.pool.blocks
                free = [i for i in block_ids if every[i].ref_cnt == 0 and not every[i].is_null]
                # They are empty now, so vLLM should use them before blocks with content.
                self._to_front(free)
                self.native.emptied(free)
            except DEFECTS:
                self._failed("following evicted blocks")

    def _reset_prefix_cache(self) -> bool:
        is_reset = self._originals["reset_prefix_cache"]()
        if self._on and is_reset:
            try:
                self._resync()
            except DEFECTS:
                self._failed("following a reset of the prefix cache")
        return is_reset


def _is_of(block: KVCacheBlock, pool: BlockPool) -> bool:
    """Whether the block belongs to this pool; before vLLM 0.32, blocks do not name a pool, and there is only one."""
    return getattr(block, "pool", None) in (pool, None)


def _tokens(block: KVCacheBlock) -> int | None:
    """Tokens of the prefix that the block ends; None when no prompt can find it."""
    return None if block.block_hash is None else getattr(block, "block_hash_num_tokens", None) or 0


def _contains(tokens: Sequence[int], marker: list[int]) -> bool:
    """Whether `marker` occurs in `tokens` as a contiguous sequence."""
    first, length = marker[0], len(marker)
    tokens = list(tokens)
    at = -1
    try:
        while True:
            at = tokens.index(first, at + 1)
            if tokens[at : at + length] == marker:
                return True
    except ValueError:
        return False


def _latest(owner: Any, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    """A method that a wrapper has replaced. One of the class is looked up at each call: others may wrap it there."""
    if getattr(own, "__self__", None) is not owner:
        return own
    kind = type(owner)
    return lambda *args, **kwargs: getattr(kind, name)(owner, *args, **kwargs)
