"""What do probes cost in wall time?

    python bench/vllm/probe_overhead.py --requests 32 --interval 32 --rounds 7

Requests that think all the time run in the real engine with probes every `--interval` think tokens and without, in
turn, in one process; the ratio is of the medians, and of each pair. Nothing is ever ended, so that both do the same
work. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from meridian.vllm.bench.model import model_dir
from meridian.vllm.bench.run import ENVIRONMENT, MERIDIAN_CLASS

NEVER = 1 << 20


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--interval", type=int, default=32, help="think tokens between two probes")
    parser.add_argument("--tokens", type=int, default=256, help="think tokens of a request")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    print(json.dumps(measure(args)))
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Alternate, first one way round and then the other."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    folder = Path(tempfile.mkdtemp(prefix="meridian-probes-"))
    text = f"[scheduler]\nmin_think_tokens = {NEVER}\nmax_think_tokens = {NEVER}\n"
    text += f'[entropy]\neat_probe_interval_tokens = {args.interval}\nprobe_suffix = "ans"\n'
    text += '[telemetry]\nprometheus = ""\n[admin]\nlisten = ""\n'
    (folder / "meridian.toml").write_text(text)
    os.environ["MERIDIAN_CONFIG"] = str(folder / "meridian.toml")
    from meridian import load_config
    from meridian.vllm.parts import make_engine

    engine: Any = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(model_dir()),
            dtype="bfloat16",
            max_model_len=1024,
            block_size=32,  # type: ignore[arg-type]
            num_gpu_blocks_override=args.requests * 20,
            max_num_seqs=2 * args.requests,
            max_num_batched_tokens=2048,
            enforce_eager=True,
            disable_log_stats=True,
            scheduler_cls=MERIDIAN_CLASS,
            logits_processors=["meridian.vllm:BudgetLogitsProcessor"],
        )
    )
    scheduler = engine.engine_core.engine_core.scheduler
    tail = list(engine.get_tokenizer().encode("<think>\n", add_special_tokens=False))
    config = load_config()
    ways = {"probes": config, "none": replace(config, entropy=replace(config.entropy, enabled=False))}
    times: dict[str, list[float]] = {name: [] for name in ways}
    done = 0
    for round_ in range(args.rounds + 1):
        for name in list(ways) if round_ % 2 else reversed(list(ways)):
            scheduler._meridian_engine = make_engine(ways[name], scheduler)
            scheduler._meridian_use(scheduler._meridian_engine)
            # Both ways have the same prompts: the second must not find them.
            if not scheduler.reset_prefix_cache():
                sys.exit("error: the prefix cache is in use between two runs")
            seconds = run(engine, args, tail, seed=round_)
            if round_:  # the first is to warm up
                times[name].append(seconds)
            if name == "probes":
                budget = scheduler.meridian_stats()["budget"]
                done = budget["probes"]["done"]
    pairs = sorted(a / b for a, b in zip(times["probes"], times["none"], strict=True))
    return {
        "ratio": statistics.median(times["probes"]) / statistics.median(times["none"]),
        "pairs": [round(pair, 4) for pair in pairs],
        "probes_a_round": done,
        "probes_due_a_round": args.requests * (args.tokens // args.interval),
        "seconds": {name: round(statistics.median(of), 3) for name, of in times.items()},
        "gave_up": scheduler._meridian is None or scheduler._meridian_think is None,
    }


def run(engine: Any, args: argparse.Namespace, tail: list[int], seed: int) -> float:
    """Seconds that the requests take."""
    from vllm import SamplingParams

    rng = random.Random(seed)
    for i in range(args.requests):
        prompt = [rng.randrange(20, 900) for _ in range(rng.randint(40, 120))] + tail
        params = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, max_tokens=args.tokens)
        engine.add_request(f"{seed}-{i}", {"prompt_token_ids": prompt}, params)
    started = time.perf_counter()
    while engine.has_unfinished_requests():
        engine.step()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
