"""How long does an urgent request wait for its first token while the engine is full?

    python bench/vllm/urgent_requests.py --scheduler native:priority --preempt

Long requests of the lowest urgency fill every seat and a queue; urgent ones arrive at fixed times. With `--scheduler
stock` this is vLLM with its own priority policy. The same requests, in the real engine, greedy and in float32. Prints
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from meridian.vllm.bench.model import model_dir
from meridian.vllm.bench.probe import SchedulerProbe
from meridian.vllm.bench.request import TraceRequest
from meridian.vllm.bench.run import Options, build, drive, warm_up

URGENT = -10
LAZY = 10


def trace_of(args: argparse.Namespace) -> list[TraceRequest]:
    """Long requests from the start, and urgent ones at fixed times, in the order of their arrival."""
    rng = random.Random(args.seed)
    long = [
        TraceRequest(
            0.01 * i,
            rng.randint(32, 256),
            4,
            rng.randint(args.shortest, args.longest),
            priority=LAZY,
        )
        for i in range(args.long)
    ]
    urgent = [
        TraceRequest(args.first_s + i * args.every_s, rng.randint(32, 128), 4, 8, priority=URGENT)
        for i in range(args.urgent)
    ]
    return sorted(long + urgent, key=lambda request: request.arrival_s)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--scheduler",
        default="stock",
        help="stock, or a dispatch policy such as native:priority",
    )
    parser.add_argument(
        "--preempt",
        action="store_true",
        help="waiting requests may take the place of running ones",
    )
    parser.add_argument(
        "--scheduling-policy",
        choices=("fcfs", "priority"),
        default="priority",
        help="vLLM's own",
    )
    parser.add_argument("--long", type=int, default=64)
    parser.add_argument("--urgent", type=int, default=70)
    parser.add_argument("--shortest", type=int, default=500, help="tokens of a long request, at least")
    parser.add_argument("--longest", type=int, default=900)
    parser.add_argument("--first-s", type=float, default=2.0)
    parser.add_argument("--every-s", type=float, default=0.25)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--kv-blocks", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--outputs", action="store_true", help="print the tokens of every request too")
    args = parser.parse_args()
    toml = (
        f'[policy.dispatch]\nsource = "{args.scheduler}"\n'
        f"[scheduler]\npreempt_for_waiting = {str(args.preempt).lower()}\n"
        '[telemetry]\nprometheus = ""\n[admin]\nlisten = ""\n'
    )
    options = Options(
        model=model_dir(),
        scheduler=args.scheduler,
        kv_blocks=args.kv_blocks,
        block_size=32,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=1024,
        max_model_len=2048,
        dtype="float32",
        meridian_toml=toml,
        scheduling_policy=args.scheduling_policy,
    )
    run = build(options)
    warm_up(run, options.max_model_len)
    probe = SchedulerProbe(run.scheduler, run.seen)
    started = time.perf_counter()
    seen, makespan_s = drive(run, trace_of(args), probe, options)
    urgent = sorted(1e3 * (o.times[0] - o.arrival) for o in seen if o.planned.priority == URGENT)
    long = [o for o in seen if o.planned.priority == LAZY]
    # While the engine was full: until the last long request was admitted.
    tokens = sum(len(o.tokens) for o in seen)
    document: dict[str, Any] = {
        "scheduler": args.scheduler,
        "preempts": args.preempt,
        "urgent_ttft_p50_ms": urgent[len(urgent) // 2],
        "urgent_ttft_p99_ms": urgent[min(len(urgent) - 1, int(0.99 * len(urgent)))],
        "makespan_s": makespan_s,
        "wall_s": time.perf_counter() - started,
        "throughput_tok_s": tokens / makespan_s,
        "preemptions": sum(o.preemptions for o in seen),
        "most_preemptions_of_a_request": max(o.preemptions for o in seen),
        "urgent_preempted": sum(o.preemptions for o in seen if o.planned.priority == URGENT),
        "long_e2e_p99_s": sorted((o.finished or 0.0) - o.arrival for o in long)[int(0.99 * len(long))],
        "recomputed_tokens": probe.recomputed_tokens,
        "outputs": [o.tokens for o in seen] if args.outputs else None,
    }
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
