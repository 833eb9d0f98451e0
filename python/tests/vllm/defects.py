"""Defects of Meridian itself, injected into the real engine at every call that Meridian makes in a step."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from harness import Engine, requests
from meridian.vllm.bench.request import TraceRequest

# Methods of the native engine, of its mirrors of block pools and of what follows the thinking; those that a step of a
# synchronous engine calls.
ENGINE = [
    "add",
    "begin",
    "end",
    "phase",
    "preempted",
    "reap",
    "remove",
    "step_facts",
    "think_from",
    "tokens",
    "victim",
    "evicts_dead_thinking",
    "output_preemptions",
    "reads_victim_blocks",
]
POOL = ["choose", "counts", "leaving", "mark_dead", "matched", "taken", "touched"]
THINKING = ["due", "probe_dropped", "probe_runs", "probed", "received"]
# The same in Python.
SCHEDULER = [
    "_apply_caps",
    "_begin_step",
    "_keeps_whole",
    "_observe",
    "_offer_probes",
    "_pass_on",
    "_plan",
    "_preempt_for_waiting",
    "_take_in",
]
KV_HOOK = [
    "_matched",
    "_prompt_blocks",
    "_choose_victim",
    "_watch_allocations",
    "request_ends",
    "step_begins",
    "step_ends",
    "unshared_blocks",
]
POOL_HOOK = ["_choose", "_order", "mark_dead", "matched", "step_ends", "take_taken"]
THINK_HOOK = [
    "asked",
    "follow",
    "hide_lookups",
    "offer",
    "prompt_tokens",
    "receive",
    "settle",
    "show_lookups",
    "take_out",
    "tell",
    "_make",
    "_room",
    "_spare_blocks",
]
SAMPLERS = ["tell", "reports"]
POINTS = tuple(
    f"{owner}.{name}"
    for owner, names in (
        ("Engine", ENGINE),
        ("BlockPool", POOL),
        ("Thinking", THINKING),
        ("_Meridian", SCHEDULER),
        ("KvHook", KV_HOOK),
        ("PoolHook", POOL_HOOK),
        ("ThinkHook", THINK_HOOK),
        ("Samplers", SAMPLERS),
    )
    for name in names
)


# Too much for the engine's KV memory, with answers that have only each other to preempt, and thinking that goes on when
# there is room for probes again.
SHAPES = [
    *requests(12),
    *[TraceRequest(0.0, 40, 2, 150)] * 8,
    *[TraceRequest(0.0, 40, 220, 4)] * 3,
]


@dataclass
class Defect:
    """Raises `error` at the `at`-th call of `point`; a native part is broken from then on. Counts the calls of all."""

    point: str = ""
    at: int = 0
    error: BaseException | None = None
    calls: Counter[str] = field(default_factory=Counter)
    is_raised: bool = False
    is_armed: bool = False

    def called(self, point: str, *, stays_broken: bool = False) -> None:
        """`point` is called."""
        if not self.is_armed:
            return
        self.calls[point] += 1
        if point != self.point or self.error is None:
            return
        if self.calls[point] == self.at or (stays_broken and self.calls[point] > self.at):
            self.is_raised = True
            raise self.error


class PassesOn:
    """Stands in for a native object and passes everything on to it, others that stand in unwrapped."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found
        return lambda *args, **kwargs: found(*(_unwrapped(arg) for arg in args), **kwargs)


def _unwrapped(arg: Any) -> Any:
    """`arg` as native code takes it: an engine takes its own pools only. A list that it changes is passed as it is."""
    if isinstance(arg, PassesOn):
        return arg._inner
    if isinstance(arg, list | tuple) and any(isinstance(part, PassesOn | tuple) for part in arg):
        return type(arg)(_unwrapped(part) for part in arg)
    return arg


class Native(PassesOn):
    """A native object whose attributes tell the defect when they are used."""

    def __init__(self, kind: str, inner: Any, defect: Defect) -> None:
        super().__init__(inner)
        self._kind, self._defect = kind, defect

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        point = f"{self._kind}.{name}"
        if not callable(found):
            self._defect.called(point, stays_broken=True)
            return found
        if name == "pool":
            return lambda *args: Native("BlockPool", found(*args), self._defect)
        if name == "follow_thinking":
            return lambda *args: Native("Thinking", found(*args), self._defect)

        def call(*args: Any, **kwargs: Any) -> Any:
            self._defect.called(point, stays_broken=True)
            return found(*args, **kwargs)

        return call


class Samplers:
    """Samplers that take every order and measure what is asked of probes."""

    def __init__(self, defect: Defect) -> None:
        self._defect = defect

    def configure(self, model: Any) -> None:
        """Nothing to configure."""

    def tell(self, orders: bytes | None) -> None:
        """Nothing is ended."""
        self._defect.called("Samplers.tell")

    def leave_with(self, step: Any) -> None:
        """Nothing to say."""

    def reports(self, output: Any) -> list[bytes]:
        """A report of nobody."""
        self._defect.called("Samplers.reports")
        return [b"\0" * 22]


@contextmanager
def broken(engine: Engine, native: Any, defect: Defect) -> Iterator[None]:
    """Put `native` into the idle engine with `defect` in all that a step calls, thinking and probes included."""
    from meridian.vllm import following, kv, scheduler, speculation, thinking

    meridian = engine.scheduler
    before = meridian._meridian
    meridian._meridian_use(None)
    owners = {
        "_Meridian": (scheduler._Meridian, SCHEDULER),
        "KvHook": (kv.KvHook, KV_HOOK),
        "PoolHook": (kv.PoolHook, POOL_HOOK),
        "ThinkHook": (thinking.ThinkHook, THINK_HOOK),
    }
    with ExitStack() as patches:
        for owner, (kind, names) in owners.items():
            for name in names:
                wrapped = _wrapped(getattr(kind, name), f"{owner}.{name}", defect)
                patches.enter_context(mock.patch.object(kind, name, wrapped))
        kept = _keeps_vllms_budget(scheduler._Meridian.add_request)
        patches.enter_context(mock.patch.object(scheduler._Meridian, "add_request", kept))
        patches.enter_context(mock.patch.object(following, "REAP_STEPS", 1))
        samplers = Samplers(defect)
        patches.enter_context(mock.patch.object(meridian, "_meridian_samplers", samplers))
        patches.enter_context(mock.patch.object(thinking, "reports_in", samplers.reports))
        model_config = meridian.vllm_config.model_config
        patches.enter_context(mock.patch.object(model_config, "logits_processors", [speculation.OURS[0]]))
        meridian._meridian_use(Native("Engine", native, defect))
        meridian._meridian_output_preemptions_logged = 0
        assert meridian._meridian_think is not None
        defect.is_armed = True
        try:
            yield
        finally:
            defect.is_armed = False
            meridian._meridian_use(before)


def _keeps_vllms_budget(add: Callable[..., Any]) -> Callable[..., Any]:
    """These samplers force nothing, so vLLM has to end thinking as planned; Meridian would take its budget over."""

    def add_request(self: Any, request: Any) -> None:
        planned = request.sampling_params.thinking_token_budget
        try:
            add(self, request)
        finally:
            request.sampling_params.thinking_token_budget = planned

    return add_request


def _wrapped(method: Callable[..., Any], point: str, defect: Defect) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        defect.called(point)
        return method(self, *args, **kwargs)

    return call


def native_for(engine: Engine) -> Any:
    """A native engine whose steps call everything: caps, victims, dead thinking, probes."""
    from meridian import (
        EntropyConfig,
        KvMemoryConfig,
        MeridianConfig,
        ModelConfig,
        PolicyConfig,
        SchedulerConfig,
        SlotConfig,
    )
    from meridian.vllm.parts import make_engine

    config = MeridianConfig(
        # Targets that no machine is too slow for, and a bound that is always broken: every plan has grants.
        scheduler=SchedulerConfig(
            output_tpot_budget_ms=1e9,
            think_tpot_budget_ms=1e9,
            min_think_tokens=4,
            max_defer_ms=1e-3,
            preempt_for_waiting=True,
        ),
        entropy=EntropyConfig(
            eat_probe_interval_tokens=8, eat_variance_threshold=1e-12, rpdi_threshold=2.0, probe_suffix="\n\n"
        ),
        kv_memory=KvMemoryConfig(growth_blocks=0.25, evict_dead_thinking=True),
        model=ModelConfig(strips_reasoning=True),
        policy=PolicyConfig(dispatch=SlotConfig("native:srpt", {"forecast": "attained"}, deadline_ms=1000.0)),
    )
    return make_engine(config, engine.scheduler)


def serve(engine: Engine) -> list[list[int]]:
    """Serve `SHAPES` from a cache that has some of their prompts and nothing else."""
    assert engine.scheduler.reset_prefix_cache()
    engine.generate([replace(shape, think_tokens=1, output_tokens=1) for shape in SHAPES[:4]])
    return engine.generate(SHAPES)


def left_behind(engine: Engine) -> list[str]:
    """What is not as vLLM has it, in an idle engine whose Meridian has given up; empty when all is."""
    scheduler = engine.scheduler
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    wrong = []
    if scheduler._meridian is not None:
        wrong.append("Meridian has not given up")
    if scheduler.max_num_scheduled_tokens != scheduler.scheduler_config.max_num_batched_tokens:
        wrong.append(f"token budget {scheduler.max_num_scheduled_tokens}")
    if manager.watermark_blocks != 0:
        wrong.append(f"watermark {manager.watermark_blocks}")
    for owner in (scheduler, manager, pool):
        wrapped = sorted(name for name, value in owner.__dict__.items() if callable(getattr(type(owner), name, None)))
        if wrapped:
            wrong.append(f"{type(owner).__name__} has {', '.join(wrapped)}")
    # One is vLLM's own null block.
    if pool.get_num_free_blocks() != pool.num_gpu_blocks - 1:
        wrong.append(f"{pool.get_num_free_blocks()} of {pool.num_gpu_blocks - 1} blocks are free")
    if scheduler.running or scheduler.waiting or scheduler.requests:
        wrong.append("requests are left")
    return wrong


def positions(calls: int) -> list[int]:
    """Which calls of a point to break: the first, one in the middle."""
    return sorted({1, random.Random(calls).randint(1, calls)})
