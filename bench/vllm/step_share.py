"""What share of a step is Meridian's, with many sessions in the cache?

    python bench/vllm/step_share.py --eviction native:cost-aware

Fills the KV cache of the real engine with the chains of `--sessions` sessions, then serves their further turns with
`--running` requests at a time, and times everything that Meridian adds: planning, following, the order of the blocks
when they are taken and released, chains and sessions. Time inside vLLM's own methods does not count. Prints one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from meridian.vllm.bench.model import model_dir
from meridian.vllm.bench.no_model import without_model
from meridian.vllm.bench.run import Options, Run, build, warm_up

BLOCK_SIZE = 32


class Clock:
    """Time in Meridian's own code: entered by `own`, left by `vllms` for what it calls in turn."""

    def __init__(self) -> None:
        self.own_ns = 0
        self._stack: list[bool] = []
        self._last_ns = 0

    def _switch(self) -> None:
        now_ns = time.perf_counter_ns()
        if self._stack and self._stack[-1]:
            self.own_ns += now_ns - self._last_ns
        self._last_ns = now_ns

    def _wrapped(self, call: Callable[..., Any], is_own: bool) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._switch()
            self._stack.append(is_own)
            try:
                return call(*args, **kwargs)
            finally:
                self._switch()
                self._stack.pop()

        return timed

    def own(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A method of Meridian's."""
        return self._wrapped(call, True)

    def vllms(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A method of vLLM's that Meridian calls."""
        return self._wrapped(call, False)


def time_meridian(run: Run, clock: Clock) -> None:
    """Time what Meridian's scheduler adds to vLLM's."""
    from vllm.v1.core.sched.scheduler import Scheduler

    scheduler = run.scheduler
    for name in (
        "schedule",
        "update_from_output",
        "add_request",
        "_preempt_request",
        "_free_request",
    ):
        setattr(Scheduler, name, clock.vllms(getattr(Scheduler, name)))
        scheduler.__dict__[name] = clock.own(getattr(scheduler, name))
    kv = scheduler._meridian_kv
    manager = scheduler.kv_cache_manager
    kv._allocate_slots = clock.vllms(kv._allocate_slots)
    manager.__dict__["allocate_slots"] = clock.own(manager.allocate_slots)
    for hook in kv.pools:
        for name, wrapper in hook._wrappers.items():
            hook._originals[name] = clock.vllms(hook._originals[name])
            hook.pool.__dict__[name] = clock.own(wrapper)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eviction", default="native:cost-aware")
    parser.add_argument("--dispatch", default="native:balanced")
    parser.add_argument("--sessions", type=int, default=2000)
    parser.add_argument("--cached-blocks", type=int, default=100_000)
    parser.add_argument("--running", type=int, default=128)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    toml = (
        f'[policy.dispatch]\nsource = "{args.dispatch}"\n[policy.eviction]\nsource = "{args.eviction}"\n'
        '[telemetry]\nprometheus = ""\n[admin]\nlisten = ""\n'
    )
    chain_blocks = args.cached_blocks // args.sessions
    options = Options(
        model=model_dir(),
        scheduler=args.dispatch,
        kv_blocks=args.cached_blocks + args.running * (chain_blocks + 8),
        block_size=BLOCK_SIZE,
        max_num_seqs=args.running,
        max_num_batched_tokens=2048,
        max_model_len=4096,
        dtype="bfloat16",
        meridian_toml=toml,
    )
    run = build(options)
    warm_up(run, options.max_model_len)
    rng = random.Random(args.seed)
    prompts = {i: [rng.choice(run.vocabulary) for _ in range(chain_blocks * BLOCK_SIZE)] for i in range(args.sessions)}
    executor = run.engine.engine_core.engine_core.model_executor
    execute = executor.execute_model
    # Filling the cache needs no model: nobody reads what is in the blocks.
    without_model(run, args.seed)
    for session, prompt in prompts.items():
        send(run, f"fill-{session}", session, prompt, 2)
    drain(run)
    executor.execute_model = execute
    pool = run.scheduler._meridian_kv.pools[0]
    empty, cached = pool.counts()
    clock = Clock()
    time_meridian(run, clock)
    document = measure(args, run, clock, prompts)
    document |= {
        "eviction": args.eviction,
        "cached_blocks": cached,
        "empty_blocks": empty,
        "sessions": args.sessions,
        "faults": run.scheduler.meridian_stats()["faults"],
    }
    pool.audit()
    print(json.dumps(document))
    return 0


def send(run: Run, name: str, session: int, prompt: list[int], tokens: int) -> None:
    """Send the next turn of a session."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        max_tokens=tokens + len(run.end_ids),
        thinking_token_budget=run.tokens_before_think,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"meridian_session": str(session)},
    )
    run.engine.add_request(name, {"prompt_token_ids": [*prompt, *run.template.tail]}, params)


def drain(run: Run) -> None:
    """Serve what is there to its end."""
    while run.engine.has_unfinished_requests():
        run.engine.step()


def measure(args: argparse.Namespace, run: Run, clock: Clock, prompts: dict[int, list[int]]) -> dict[str, Any]:
    """Serve further turns, always as many as there are seats; Meridian's time and the time of each step."""
    rng = random.Random(args.seed)
    sessions = list(prompts)
    rng.shuffle(sessions)
    own_ms, step_ms = [], []
    live = sent = 0
    for step in range(args.steps + 40):
        while live < args.running:
            session = sessions[sent % len(sessions)]
            # What the session's user adds.
            prompts[session] = [
                *prompts[session],
                *(rng.choice(run.vocabulary) for _ in range(8)),
            ]
            send(run, f"turn-{sent}", session, prompts[session], rng.randint(30, 90))
            live, sent = live + 1, sent + 1
        before_ns = clock.own_ns
        started = time.perf_counter()
        outputs = run.engine.step()
        took_ms = 1e3 * (time.perf_counter() - started)
        live -= sum(output.finished for output in outputs)
        if step >= 40 and len(run.scheduler.running) > 0.9 * args.running:
            own_ms.append((clock.own_ns - before_ns) / 1e6)
            step_ms.append(took_ms)
    ordered = sorted(own_ms)
    return {
        "steps": len(own_ms),
        "turns": sent,
        "running": args.running,
        "own_ms_mean": statistics.fmean(own_ms),
        "own_ms_p50": ordered[len(ordered) // 2],
        "own_ms_p99": ordered[int(0.99 * len(ordered))],
        "step_ms_p50": statistics.median(step_ms),
        "share_of_step": sum(own_ms) / sum(step_ms),
    }


if __name__ == "__main__":
    sys.exit(main())
