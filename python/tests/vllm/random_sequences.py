"""Random requests through vLLM's own scheduler, KV cache manager and encoder cache, with a model that is a hash.

Stock and `native:fcfs` must do the same in every step. Under every other policy vLLM's limits must hold, no request is
lost, and no step is empty that could have run something. Takes milliseconds a sequence.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from random_drive import Arrival, Drive, Scripted
from random_engine import EPOCH_S, Feature, Limits, make_scheduler

# An answer of 200 tokens, and after it has begun a prompt whose KV blocks are free when it is over.
STARVED = Limits(seqs=4, tokens=256, blocks=36, adapters=1, encoder=0, long_prefill=0, model_len=512)
STARVED_ARRIVALS = (Arrival(1, 10, 200), Arrival(60, 240, 8))
# One adapter at a time, and requests of two. The request between them has none: while it decodes, a policy can leave
# out the first one, whose adapter still counts, without making the step empty.
TWO_ADAPTERS = Limits(seqs=4, tokens=64, blocks=60, adapters=1, encoder=0, long_prefill=0)
TWO_ADAPTERS_ARRIVALS = (Arrival(1, 10, 60, adapter=1), Arrival(10, 10, 60), Arrival(12, 10, 60, adapter=2))


def scripted(
    limits: Limits,
    arrivals: tuple[Arrival, ...],
    model: str,
    policy: Policy | None = None,
    hostile: Path = Path(),
    chunked_prefill: bool = True,
) -> tuple[Scripted, int]:
    """A scripted drive, and how many plans of the policy the host changed because they left nothing to run."""
    feature = Feature(
        "scripted",
        adapters=any(arrival.adapter for arrival in arrivals),
        grammars=any(arrival.grammar_steps for arrival in arrivals),
        chunked_prefill=chunked_prefill,
    )
    drive = Scripted(make_scheduler(feature, limits, model), feature, limits, 0, arrivals=arrivals)
    if policy is None:
        drive.run()
        return drive, 0
    with decided_by(policy, drive, hostile) as native:
        drive.run()
        return drive, 0 if native is None else native.stats()["idle_plans"]


# One adapter at a time; requests of the first arrive all the time. Then comes one that vLLM passes over.
CROWDED = Limits(seqs=8, tokens=64, blocks=200, adapters=1, encoder=0, long_prefill=0)
CROWD = tuple(Arrival(step, 10, 12, adapter=1) for step in range(1, 400, 3))
PASSED_OVER = {
    "an adapter without a place": Arrival(20, 10, 4, adapter=2),
    "a grammar in compilation": Arrival(20, 10, 4, grammar_steps=30),
}


def passed_over(lone: Arrival, model: str, policy: Policy | None = None) -> tuple[float, list[str]]:
    """Milliseconds until that request is over, beside the crowd, and what should not have been."""
    arrivals = tuple(sorted((*CROWD, lone), key=lambda arrival: arrival.step))
    name = str(arrivals.index(lone))
    drive, _ = scripted(CROWDED, arrivals, model, policy)
    return drive.over_ms[name] - (drive.requests[name].arrival_time - EPOCH_S) * 1e3, drive.violations


class Clock:
    """Stands in for the module `time` where Meridian reads it: a step takes as long as its tokens say."""

    def __init__(self, drive: Drive) -> None:
        self.drive = drive

    def monotonic(self) -> float:
        return self.drive.now_ms / 1e3

    def time(self) -> float:
        return EPOCH_S + self.monotonic()

    def perf_counter_ns(self) -> int:
        return int(self.drive.now_ms * 1e6)


@dataclass(frozen=True)
class Policy:
    """Who decides in a drive."""

    name: str
    source: str
    options: dict[str, Any] = field(default_factory=dict)
    max_defer_ms: float = 2000.0
    kv_memory: bool = True
    # Tight, so that budgets are lowered.
    tpot_ms: tuple[float, float] = (8.0, 16.0)
    preempts_for_waiting: bool = False
    growth_blocks: float | None = None

    def config(self, hostile: Path) -> Any:
        """As it would stand in meridian.toml, without listeners."""
        from meridian import (
            AdminConfig,
            KvMemoryConfig,
            MeridianConfig,
            ModelConfig,
            PolicyConfig,
            SchedulerConfig,
            SlotConfig,
            TelemetryConfig,
        )

        source = self.source if self.source.startswith("native:") else str(hostile / self.source)
        output_ms, think_ms = self.tpot_ms
        return MeridianConfig(
            scheduler=SchedulerConfig(
                output_tpot_budget_ms=output_ms,
                think_tpot_budget_ms=think_ms,
                max_defer_ms=self.max_defer_ms,
                preempt_for_waiting=self.preempts_for_waiting,
            ),
            kv_memory=KvMemoryConfig(enabled=self.kv_memory)
            if self.growth_blocks is None
            else KvMemoryConfig(growth_blocks=self.growth_blocks),
            model=ModelConfig(strips_reasoning=True),
            # A busy machine may pause any call; deadlines are no subject here.
            policy=PolicyConfig(watch=False, dispatch=SlotConfig(source, self.options, deadline_ms=1000.0)),
            telemetry=TelemetryConfig(prometheus=""),
            admin=AdminConfig(listen=""),
        )


FCFS = Policy("fcfs", "native:fcfs")
POLICIES = (
    Policy("balanced", "native:balanced"),
    Policy("balanced, nobody waits", "native:balanced", max_defer_ms=1.0),
    Policy("output-first", "native:output-first"),
    Policy("pascal", "native:pascal"),
    Policy("qoe", "native:qoe"),
    Policy("srpt", "native:srpt"),
    Policy("scorpio", "native:scorpio"),
    Policy("jitserve", "native:jitserve"),
    Policy("lpm", "native:lpm"),
    Policy("mlfq, for waiting", "native:mlfq", {"quantum_tokens": 4}, preempts_for_waiting=True),
    Policy("caps-of-nothing", "caps-of-nothing.wasm"),
    Policy("output-first, nobody waits", "native:output-first", max_defer_ms=1.0),
    Policy("pascal, nobody waits", "native:pascal", {"lead_tokens": 0.0}, max_defer_ms=1.0),
    Policy("caps-of-nothing, nobody waits", "caps-of-nothing.wasm", max_defer_ms=1.0),
    Policy("qoe, KV memory is vLLM's", "native:qoe", kv_memory=False),
    Policy("caps-of-nothing, KV memory is vLLM's", "caps-of-nothing.wasm", kv_memory=False),
)


def stock(feature: Feature, seed: int, model: str) -> Drive:
    """Stock's drive, to its end."""
    limits = Limits.drawn(feature, random.Random(seed))
    return Drive(make_scheduler(feature, limits, model), feature, limits, seed).run()


@contextmanager
def decided_by(policy: Policy, drive: Drive, hostile: Path) -> Iterator[Any]:
    """Meridian in the scheduler of `drive`, its clock the drive's; yields the native engine."""
    from meridian.vllm import scheduler

    drive.is_stock = False
    clock = Clock(drive)
    read_by = [
        module
        for name, module in sys.modules.items()
        if name.startswith("meridian.") and getattr(module, "time", None) is time
    ]
    for module in read_by:
        module.time = clock  # type: ignore[attr-defined]
    try:
        own = scheduler.attach_to(drive.scheduler, policy.config(hostile))
        native = drive.scheduler._meridian
        try:
            yield native
            if drive.scheduler._meridian is not native:
                drive.violates("Meridian gave up")
        finally:
            scheduler.detach_from(drive.scheduler, own)
    finally:
        for module in read_by:
            module.time = time  # type: ignore[attr-defined]


def decided(policy: Policy, feature: Feature, seed: int, model: str, hostile: Path) -> Drive:
    """The same drive as `stock`, with Meridian."""
    limits = Limits.drawn(feature, random.Random(seed))
    drive = Drive(make_scheduler(feature, limits, model), feature, limits, seed)
    with decided_by(policy, drive, hostile):
        drive.run()
    return drive


def first_difference(ours: Drive, stocks: Drive) -> str | None:
    """Where two drives part; None when they do the same."""
    for i, (a, b) in enumerate(zip(ours.trace, stocks.trace, strict=False)):
        if a != b:
            return f"{ours.feature.name}, seed {ours.seed}, entry {i}: {a}, stock {b}"
    if len(ours.trace) != len(stocks.trace):
        return f"{ours.feature.name}, seed {ours.seed}: {ours.steps} steps, stock {stocks.steps}"
    return None
