"""How long does an urgent request wait for its first token while the engine is full?

Long requests of the lowest urgency fill every seat and a queue; urgent ones arrive at fixed times. With the scheduler
`stock` this is vLLM with its own priority policy. The same requests, in the real engine, greedy and in float32.
"""

from __future__ import annotations

import random
from typing import Any

from meridian.vllm.bench.model import model_dir
from meridian.vllm.bench.probe import SchedulerProbe
from meridian.vllm.bench.request import TraceRequest
from meridian.vllm.bench.run import Options, build, drive, warm_up

from checks.engine.llm import QUIET, percentile

URGENT, LAZY = -10, 10


def trace() -> list[TraceRequest]:
    """Long requests from the start, and urgent ones at fixed times, in the order of their arrival."""
    rng = random.Random(1)
    long = [TraceRequest(0.01 * i, rng.randint(32, 256), 4, rng.randint(500, 900), priority=LAZY) for i in range(64)]
    urgent = [TraceRequest(2 + 0.25 * i, rng.randint(32, 128), 4, 8, priority=URGENT) for i in range(70)]
    return sorted(long + urgent, key=lambda request: request.arrival_s)


def measure(scheduler: str = "stock", preempt: bool = False) -> dict[str, Any]:
    """Under stock or a dispatch policy; `preempt`: waiting requests may take the place of running ones."""
    toml = f'[policy.dispatch]\nsource = "{scheduler}"\n[scheduler]\npreempt_for_waiting = {str(preempt).lower()}\n'
    options = Options(
        model=model_dir(),
        scheduler=scheduler,
        kv_blocks=1200,
        max_num_seqs=16,
        max_num_batched_tokens=1024,
        max_model_len=2048,
        dtype="float32",
        meridian_toml=toml + QUIET,
        scheduling_policy="priority",
    )
    run = build(options)
    warm_up(run, options.max_model_len)
    probe = SchedulerProbe(run.scheduler, run.seen)
    seen, makespan_s = drive(run, trace(), probe, options)
    urgent_ms = [1e3 * (o.times[0] - o.arrival) for o in seen if o.planned.priority == URGENT]
    return {
        "requests": len(seen),
        "urgent_ttft_p99_ms": percentile(urgent_ms, 0.99),
        "throughput_tok_s": sum(len(o.tokens) for o in seen) / makespan_s,
        "preemptions": sum(o.preemptions for o in seen),
        "most_preemptions_of_a_request": max(o.preemptions for o in seen),
        "outputs": [o.tokens for o in seen],
    }
