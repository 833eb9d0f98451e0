#!/usr/bin/env python3
"""Prefix hit rates of chats, without the time that a model takes: vLLM's real scheduler, KV cache manager and block
pools, with a model runner that generates random tokens.

    hit_rates.py --model DIR --scheduler stock --kv-blocks 900 --seed 1 --seed 2

Which blocks are asked for, and when, depends on lengths alone, so that the hit rates are those of the real model;
latencies mean nothing here. Prints one JSON list, a hit rate in percent a seed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from meridian.bench.chat import sessions
from meridian.bench.engine_run import STOCK, Chat, Options, Run, build, drive_chat, setting
from meridian.bench.probe import SchedulerProbe
from meridian.bench.report import summarise


def without_model(run: Run, seed: int) -> None:
    """From here on the engine's tokens are random, but for the end marker where the thinking budget puts it."""
    from vllm.v1.outputs import ModelRunnerOutput

    rng = random.Random(seed)
    requests = run.scheduler.requests

    def token(request: Any) -> list[int]:
        if request.num_computed_tokens < request.num_tokens:
            return []
        thinks = request.sampling_params.thinking_token_budget - run.tokens_before_think
        into_end = request.num_output_tokens - thinks
        return [run.end_ids[into_end] if 0 <= into_end < len(run.end_ids) else rng.choice(run.vocabulary)]

    def execute(output: Any, non_block: bool = False) -> Any:
        ids = list(output.num_scheduled_tokens)
        done: Future[Any] = Future()
        done.set_result(
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
                sampled_token_ids=[token(requests[request_id]) for request_id in ids],
            )
        )
        return done

    run.engine.engine_core.engine_core.model_executor.execute_model = execute


def main() -> int:
    """Command line."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--model", type=Path, required=True)
    p.add_argument("--scheduler", default=STOCK)
    p.add_argument("--kv-blocks", type=int, required=True)
    p.add_argument("--context-tokens", type=int, default=200)
    p.add_argument("--seed", type=int, action="append", required=True)
    p.add_argument("--preserve-thinking", action="store_true")
    p.add_argument("--set", type=setting, action="append", default=[], dest="settings")
    a = p.parse_args()
    settings = (*a.settings, ("model.strips_reasoning", str(not a.preserve_thinking).lower()))
    options = Options(
        a.model, a.scheduler, kv_blocks=a.kv_blocks, max_num_seqs=16, max_model_len=8192, settings=settings
    )
    run = build(options)
    without_model(run, 0)
    rates = []
    for seed in a.seed:
        for name in ("schedule", "_preempt_request"):
            run.scheduler.__dict__.pop(name, None)
        run.seen.clear()
        run.by_name.clear()
        if run.engine.reset_prefix_cache() is False:
            sys.exit("error: the prefix cache cannot be reset")
        probe = SchedulerProbe(run.scheduler, run.seen)
        chat = Chat(sessions(seed, 30, 5, user_tokens=100, context_tokens=a.context_tokens), a.preserve_thinking)
        observed, took_s = drive_chat(run, chat, probe, options)
        rates.append(summarise([o.row() for o in observed], probe, took_s)["hit_rate"])
    print(json.dumps(rates))
    return 0


if __name__ == "__main__":
    sys.exit(main())
