"""How many answers are empty when thinking has a tight budget: with Meridian, with vLLM's own budget, with none?

    python bench/vllm/answers.py --requests 10000 --model reasoner --arm meridian

Every arm gets the same requests: a temperature between 0.6 and 1.5, a budget of 0 to 24 think tokens, and room for 8
to 96 tokens. An answer is empty when nothing but white space, special tokens and markers follows the first end of
thinking, or when thinking has no end: the client then sees only reasoning.

The arms are `meridian` (`meridian_think_budget`), `budget` (vLLM without Meridian, with its `thinking_token_budget`)
and `none` (vLLM without any budget). `--bias` adds to the logit of the end of sequence in every arm, for models that
hardly ever stop early by themselves.

Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from meridian.vllm.bench import arith
from meridian.vllm.bench.model import model_dir, reasoner_dir
from meridian.vllm.bench.run import ENVIRONMENT, MERIDIAN_CLASS

ARMS = ("meridian", "budget", "none")
MODELS = ("reasoner", "random")
CONFIG = """[entropy]
enabled = false
[scheduler]
thinking = "guarded"
min_think_tokens = 0
[telemetry]
prometheus = ""
[admin]
listen = ""
"""
DRAFTS = 3


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--model", choices=MODELS, default="reasoner")
    parser.add_argument("--arm", choices=ARMS, default="meridian")
    parser.add_argument("--bias", type=float, default=0.0, help="added to the logit of the end of sequence")
    parser.add_argument("--scheduling", choices=("sync", "async"), default="sync")
    parser.add_argument("--speculate", action="store_true", help="drafts from n-grams of the request")
    parser.add_argument("--greedy", action="store_true", help="temperature 0 for every request")
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args()
    if args.requests < 1:
        parser.error(f"--requests: {args.requests}: expected at least 1")
    if args.speculate and (args.bias or args.scheduling == "async"):
        parser.error("--speculate: vLLM has no logit bias and no asynchronous scheduling beside n-grams on CPU")
    os.environ.update(ENVIRONMENT)
    print(json.dumps(run(args)))
    return 0


def build(args: argparse.Namespace) -> Any:
    """The real engine."""
    from vllm import LLM

    options: dict[str, Any] = {}
    if args.arm == "meridian":
        config = Path(tempfile.mkdtemp(prefix="meridian-answers-")) / "meridian.toml"
        config.write_text(CONFIG)
        os.environ["MERIDIAN_CONFIG"] = str(config)
        options = {
            "scheduler_cls": MERIDIAN_CLASS,
            "logits_processors": ["meridian.vllm:BudgetLogitsProcessor"],
        }
    elif args.arm == "budget":
        options["reasoning_config"] = {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}
    if args.speculate:
        options["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": DRAFTS,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        }
    if args.scheduling == "async":
        from forced_ends import made_up_streams
        from vllm.platforms.cpu import CpuPlatform

        made_up_streams()
        check = CpuPlatform.check_and_update_config

        def checked(vllm_config: Any) -> None:
            check(vllm_config)
            vllm_config.scheduler_config.async_scheduling = True

        setattr(CpuPlatform, "check_and_update_config", staticmethod(checked))  # noqa: B010
    return LLM(
        model=str(reasoner_dir() if args.model == "reasoner" else model_dir()),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=256,
        enforce_eager=True,
        seed=args.seed,
        **options,
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run all requests and count the empty answers."""
    engine = build(args)
    tokenizer = engine.get_tokenizer()
    prompts, params = requests(args, tokenizer)
    outputs = [output.outputs[0] for output in engine.generate(prompts, params, use_tqdm=False)]
    end = tokenizer.convert_tokens_to_ids(arith.THINK_END)
    kinds = Counter(emptiness(tokenizer, list(output.token_ids), end) for output in outputs)
    found: dict[str, Any] = {
        "requests": len(outputs),
        "empty": len(outputs) - kinds["answered"],
        "kinds": dict(kinds),
        "finished": dict(Counter(str(output.finish_reason) for output in outputs)),
    }
    if args.arm == "meridian":
        scheduler = engine.llm_engine.engine_core.engine_core.scheduler
        budget = scheduler.meridian_stats()["budget"]
        found |= {
            "scheduler": type(scheduler).__name__,
            "gave_up": scheduler._meridian is None,
            "missed": budget["missed"],
            "forced": {reason: count for reason, count in budget["forced"].items() if count},
            "reopened": budget["reopened"],
        }
    return found


def requests(args: argparse.Namespace, tokenizer: Any) -> tuple[list[Any], list[Any]]:
    """Prompts and sampling parameters, the same in every arm."""
    from vllm import SamplingParams

    rng = random.Random(args.seed)
    prompts, params = [], []
    for problem in arith.problems(args.seed, args.requests):
        if args.model == "reasoner":
            chat = [{"role": "user", "content": problem.text}]
            ids = list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
        else:
            start = tokenizer.encode("<think>\n", add_special_tokens=False)
            ids = [*(rng.randrange(20, 900) for _ in range(rng.randint(8, 24))), *start]
        budget, room = rng.randint(0, 24), rng.randint(8, 96)
        own: dict[str, Any] = {}
        if args.arm == "meridian":
            own["extra_args"] = {"meridian_think_budget": budget}
        elif args.arm == "budget":
            own["thinking_token_budget"] = budget
        if args.bias:
            own["logit_bias"] = {tokenizer.eos_token_id: args.bias}
        temperature = 0.0 if args.greedy else rng.uniform(0.6, 1.5)
        prompts.append({"prompt_token_ids": ids})
        params.append(SamplingParams(temperature=temperature, max_tokens=room, **own))
    return prompts, params


def emptiness(tokenizer: Any, tokens: list[int], end: int) -> str:
    """`answered`, or why the client sees no answer."""
    if end not in tokens:
        return "only reasoning"
    rest = [token for token in tokens[tokens.index(end) + 1 :] if token != end]
    return "answered" if tokenizer.decode(rest, skip_special_tokens=True).strip() else "empty answer"


if __name__ == "__main__":
    sys.exit(main())
