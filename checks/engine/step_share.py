"""What share of a step is Meridian's, with many sessions in the cache?

Fills the KV cache of the real engine with the chains of 2,000 sessions, then serves their further turns with all
seats taken, and times everything that Meridian adds: planning, following, the order of the blocks when they are
taken and released, chains and sessions. Time inside vLLM's own methods does not count.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from meridian.vllm.bench.model import model_dir
from meridian.vllm.bench.no_model import without_model
from meridian.vllm.bench.run import Options, Run, build, warm_up

from checks.engine.llm import QUIET, Clock, params, percentile

BLOCK_SIZE = 32
SESSIONS, CACHED_BLOCKS = 2000, 100_000
CHAIN_BLOCKS = CACHED_BLOCKS // SESSIONS
WARM_UP_STEPS = 40
DISPATCH = "native:balanced"
METHODS = ("schedule", "update_from_output", "add_request", "_preempt_request", "_free_request")


def time_meridian(run: Run, clock: Clock) -> None:
    """Time what Meridian's scheduler adds to vLLM's."""
    from vllm.v1.core.sched.scheduler import Scheduler

    scheduler = run.scheduler
    for name in METHODS:
        setattr(Scheduler, name, clock.around(getattr(Scheduler, name), counts=False))
        scheduler.__dict__[name] = clock.around(getattr(scheduler, name))
    kv = scheduler._meridian_kv
    manager = scheduler.kv_cache_manager
    # The hook puts this in the place of vLLM's method while it needs to.
    kv._allocate = clock.around(kv._allocate)
    type(manager).allocate_slots = clock.around(type(manager).allocate_slots, counts=False)
    for hook in kv.pools:
        for name, wrapper in hook._wrappers.items():
            hook._originals[name] = clock.around(hook._originals[name], counts=False)
            hook.pool.__dict__[name] = clock.around(wrapper)


def measure(eviction: str = "native:cost-aware", seats: int = 128, steps: int = 400) -> dict[str, Any]:
    """Under an eviction policy."""
    options = Options(
        model=model_dir(),
        scheduler=DISPATCH,
        kv_blocks=CACHED_BLOCKS + seats * (CHAIN_BLOCKS + 8),
        block_size=BLOCK_SIZE,
        max_num_seqs=seats,
        max_num_batched_tokens=2048,
        meridian_toml=f'[policy.dispatch]\nsource = "{DISPATCH}"\n[policy.eviction]\nsource = "{eviction}"\n{QUIET}',
    )
    run = build(options)
    warm_up(run, options.max_model_len)
    rng = random.Random(1)
    prompts = {i: [rng.choice(run.vocabulary) for _ in range(CHAIN_BLOCKS * BLOCK_SIZE)] for i in range(SESSIONS)}
    executor = run.engine.engine_core.engine_core.model_executor
    execute = executor.execute_model
    # Filling the cache needs no model: nobody reads what is in the blocks.
    without_model(run, 1)
    for session, prompt in prompts.items():
        send(run, f"fill-{session}", session, prompt, 2)
    while run.engine.has_unfinished_requests():
        run.engine.step()
    executor.execute_model = execute
    pool = run.scheduler._meridian_kv.pools[0]
    _, cached = pool.counts()
    found = {"cached_blocks": cached, **serve(run, prompts, seats, steps)}
    pool.audit()
    return found


def send(run: Run, name: str, session: int, prompt: list[int], tokens: int) -> None:
    """Send the next turn of a session."""
    from vllm.sampling_params import RequestOutputKind

    sampling = params(
        max_tokens=tokens + len(run.end_ids),
        thinking_token_budget=run.tokens_before_think,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"meridian_session": str(session)},
    )
    run.engine.add_request(name, {"prompt_token_ids": [*prompt, *run.template.tail]}, sampling)


def serve(run: Run, prompts: dict[int, list[int]], seats: int, steps: int) -> dict[str, float]:
    """Serve further turns, always as many as there are seats; Meridian's time and the time of each step."""
    clock, rng = Clock(), random.Random(1)
    time_meridian(run, clock)
    sessions = list(prompts)
    rng.shuffle(sessions)
    own_ms, step_ms = [], []
    live = sent = 0
    for step in range(steps + WARM_UP_STEPS):
        while live < seats:
            session = sessions[sent % len(sessions)]
            # What the session's user adds.
            prompts[session] = [*prompts[session], *(rng.choice(run.vocabulary) for _ in range(8))]
            send(run, f"turn-{sent}", session, prompts[session], rng.randint(30, 90))
            live, sent = live + 1, sent + 1
        before_ns, started = clock.ns, time.perf_counter()
        outputs = run.engine.step()
        took_ms = 1e3 * (time.perf_counter() - started)
        live -= sum(output.finished for output in outputs)
        if step >= WARM_UP_STEPS and len(run.scheduler.running) > 0.9 * seats:
            own_ms.append((clock.ns - before_ns) / 1e6)
            step_ms.append(took_ms)
    return {
        "own_ms_mean": statistics.fmean(own_ms),
        "own_ms_p99": percentile(own_ms, 0.99),
        "step_ms_p50": statistics.median(step_ms),
        "share_of_step": sum(own_ms) / sum(step_ms),
    }
