"""What do probes cost in wall time?

Requests that think all the time run in the real engine with probes every 32 think tokens and without, in turn, in one
process; the ratios are of each pair. Nothing is ever ended, so that both do the same work.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import replace
from typing import Any

from checks.engine.llm import ENDLESS, QUIET, engine_of, gave_up, ids, params, scheduler_of

REQUESTS, INTERVAL, TOKENS = 32, 32, 256
CONFIG = f'{ENDLESS}[entropy]\neat_probe_interval_tokens = {INTERVAL}\nprobe_suffix = "ans"\n{QUIET}'


def measure(rounds: int = 7) -> dict[str, Any]:
    """Alternate, first one way round and then the other."""
    engine = engine_of(
        CONFIG,
        dtype="bfloat16",
        max_model_len=1024,
        num_gpu_blocks_override=REQUESTS * 20,
        max_num_seqs=2 * REQUESTS,
        max_num_batched_tokens=2048,
    )
    from meridian import load_config
    from meridian.vllm.parts import make_engine

    scheduler = scheduler_of(engine)
    tail = ids(engine.get_tokenizer(), "<think>\n")
    config = load_config()
    ways = {"probes": config, "none": replace(config, entropy=replace(config.entropy, enabled=False))}
    times: dict[str, list[float]] = {name: [] for name in ways}
    done = 0
    for round_ in range(rounds + 1):
        for name in list(ways) if round_ % 2 else reversed(list(ways)):
            scheduler._meridian_engine = make_engine(ways[name], scheduler)
            scheduler._meridian_use(scheduler._meridian_engine)
            # Both ways have the same prompts: the second must not find them.
            if not scheduler.reset_prefix_cache():
                sys.exit("error: the prefix cache is in use between two runs")
            seconds = run(engine, tail, seed=round_)
            if round_:  # the first is to warm up
                times[name].append(seconds)
            if name == "probes":
                done = scheduler.meridian_stats()["budget"]["probes"]["done"]
    if gave_up(scheduler):
        sys.exit("error: Meridian gave up")
    return {
        "pairs": [a / b for a, b in zip(times["probes"], times["none"], strict=True)],
        "share_of_probes": done / (REQUESTS * (TOKENS // INTERVAL)),
    }


def run(engine: Any, tail: list[int], seed: int) -> float:
    """Seconds that the requests take."""
    rng = random.Random(seed)
    for i in range(REQUESTS):
        prompt = [rng.randrange(20, 900) for _ in range(rng.randint(40, 120))] + tail
        engine.add_request(f"{seed}-{i}", {"prompt_token_ids": prompt}, params(max_tokens=TOKENS))
    started = time.perf_counter()
    while engine.has_unfinished_requests():
        engine.step()
    return time.perf_counter() - started
