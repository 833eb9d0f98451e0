"""How many answers are empty when thinking has a tight budget: with Meridian, with vLLM's own budget, with none?

Every arm gets the same requests: a temperature between 0.6 and 1.5, a budget of 0 to 24 think tokens, and room for 8
to 96 tokens. An answer is empty when nothing but white space, special tokens and markers follows the first end of
thinking, or when thinking has no end: the client then sees only reasoning.

The arms are `meridian` (`meridian_think_budget`), `budget` (vLLM without Meridian, with its `thinking_token_budget`)
and `none` (vLLM without any budget). `bias` is added to the logit of the end of sequence in every arm, for models that
hardly ever stop early by themselves.
"""

from __future__ import annotations

import random
from typing import Any

from meridian.vllm.bench import arith
from meridian.vllm.bench.model import model_dir, reasoner_dir
from meridian.vllm.bench.run import MERIDIAN_CLASS

from checks.engine import cpu
from checks.engine.llm import PROCESSOR, QUIET, configure, gave_up, ids, ngrams, problem_ids

CONFIG = f"""[entropy]
enabled = false
[scheduler]
thinking = "guarded"
min_think_tokens = 0
{QUIET}"""
OF_ARM: dict[str, dict[str, Any]] = {
    "meridian": {"scheduler_cls": MERIDIAN_CLASS, "logits_processors": [PROCESSOR]},
    "budget": {"reasoning_config": {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}},
    "none": {},
}
SEED = 11


def measure(
    requests: int = 500,
    model: str = "reasoner",
    arm: str = "meridian",
    bias: float = 0.0,
    scheduling: str = "sync",
    speculate: bool = False,
    greedy: bool = False,
) -> dict[str, Any]:
    """Run all requests and count the empty answers. `speculate`: drafts from n-grams of the request, for which vLLM has
    no logit bias and no asynchronous scheduling on CPU."""
    from vllm import LLM, SamplingParams

    assert not speculate or scheduling == "sync"
    configure(CONFIG)
    options = {**OF_ARM[arm]}
    if scheduling == "async":
        cpu.install(asynchronous=True)
    if speculate:
        options["speculative_config"] = ngrams(3)
    engine = LLM(
        model=str(reasoner_dir() if model == "reasoner" else model_dir()),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=256,
        enforce_eager=True,
        seed=SEED,
        **options,
    )
    tokenizer: Any = engine.get_tokenizer()
    rng = random.Random(SEED)
    prompts: list[Any] = []
    params = []
    for problem in arith.problems(SEED, requests):
        if model == "reasoner":
            prompt = problem_ids(tokenizer, problem)
        else:
            prompt = [*(rng.randrange(20, 900) for _ in range(rng.randint(8, 24))), *ids(tokenizer, "<think>\n")]
        budget, room = rng.randint(0, 24), rng.randint(8, 96)
        own: dict[str, Any] = {"logit_bias": {tokenizer.eos_token_id: bias}} if bias else {}
        if arm == "meridian":
            own["extra_args"] = {"meridian_think_budget": budget}
        elif arm == "budget":
            own["thinking_token_budget"] = budget
        temperature = 0.0 if greedy else rng.uniform(0.6, 1.5)
        prompts.append({"prompt_token_ids": prompt})
        params.append(SamplingParams(temperature=temperature, max_tokens=room, **own))
    outputs = [list(output.outputs[0].token_ids) for output in engine.generate(prompts, params, use_tqdm=False)]
    end = tokenizer.convert_tokens_to_ids(arith.THINK_END)
    found: dict[str, Any] = {
        "requests": len(outputs),
        "empty": sum(is_empty(tokenizer, tokens, end) for tokens in outputs),
    }
    if arm == "meridian":
        core: Any = engine.llm_engine.engine_core
        scheduler = core.engine_core.scheduler
        budget = scheduler.meridian_stats()["budget"]
        found |= {
            "scheduler": type(scheduler).__name__,
            "gave_up": gave_up(scheduler),
            "missed": budget["missed"],
            "forced": {reason: count for reason, count in budget["forced"].items() if count},
        }
    return found


def is_empty(tokenizer: Any, tokens: list[int], end: int) -> bool:
    """Whether the client sees no answer."""
    if end not in tokens:
        return True
    rest = [token for token in tokens[tokens.index(end) + 1 :] if token != end]
    return not tokenizer.decode(rest, skip_special_tokens=True).strip()
