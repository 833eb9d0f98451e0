"""Are the entropies of probes in the real engine those of the model, and EAT's mean and variance those of the paper?

The bundled reasoner thinks in the real engine, with a probe at every line. The same prefixes (prompt, thought so far,
end marker, suffix) then go through the model in transformers, in float32, and the entropy of the next token is computed
there in float64. EAT's recurrence (arXiv 2509.26522) is computed again, in Python, over the probes as they came.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from meridian.vllm.bench import arith
from meridian.vllm.bench.model import reasoner_dir

from checks.engine.llm import ENDLESS, QUIET, engine_of, finished, ids, params, problem_ids, scheduler_of

CONFIG = f'{ENDLESS}[entropy]\nprobe_at = "newline"\neat_probe_interval_tokens = 1\nprobe_suffix = "ans"\n{QUIET}'


def measure(problems: int = 60) -> dict[str, Any]:
    """Probe in the engine, then compute the same with transformers."""
    prompts, tokens, signals, suffix = think(problems)
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(reasoner_dir()), dtype=torch.float32).eval()

    def entropy(prefix: list[int]) -> float:
        with torch.no_grad():
            logs = model(torch.tensor([prefix])).logits[0, -1].double().log_softmax(-1)
        return float(-(logs.exp() * logs).sum())

    worst, probes = 0.0, 0
    by_request: dict[str, list[float]] = defaultdict(list)
    for name, think_tokens, bits, *_ in signals:
        if bits is None:
            continue
        by_request[name].append(bits)
        found = entropy([*prompts[name], *tokens[name][:think_tokens], *suffix])
        worst, probes = max(worst, abs(found - bits * math.log(2))), probes + 1
    eat = max(recurrence_error(bits) for bits in by_request.values())
    return {"probes": probes, "worst_nats": worst, "requests": len(by_request), "eat_error": eat}


def recurrence_error(bits: list[float], alpha: float = 0.2) -> float:
    """Largest difference from `M_i = a x_i + (1-a) M_(i-1)` and `V_i = a (x_i - M_i)^2 + (1-a) V_(i-1)`."""
    import meridian.budget

    means, variances = meridian.budget.eat(bits, alpha)
    mean, variance, worst = bits[0], 0.0, 0.0
    for i, x in enumerate(bits):
        if i:
            mean = alpha * x + (1 - alpha) * mean
            variance = alpha * (x - mean) ** 2 + (1 - alpha) * variance
        worst = max(worst, abs(means[i] - mean), abs(variances[i] - variance))
    return worst


def think(problems: int) -> tuple[dict[str, list[int]], dict[str, list[int]], list[Any], list[int]]:
    """Prompts and outputs by request, the signals, and the probes' suffix."""
    engine = engine_of(CONFIG, model=str(reasoner_dir()), num_gpu_blocks_override=1024, max_num_seqs=128)
    scheduler = scheduler_of(engine)
    scheduler.meridian_record_signals(True)
    tokenizer = engine.get_tokenizer()
    prompts: dict[str, list[int]] = {}
    names: dict[str, str] = {}
    for i, problem in enumerate(arith.problems(77, problems)):
        prompt = problem_ids(tokenizer, problem)
        sampled = params(temperature=0.6, max_tokens=300, ignore_eos=False)
        names[str(i)] = engine.add_request(str(i), {"prompt_token_ids": prompt}, sampled)
        prompts[names[str(i)]] = prompt
    tokens = {names[name]: found for name, found in finished(engine)}
    return prompts, tokens, scheduler.meridian_take_signals(), [*ids(tokenizer, "</think>"), *ids(tokenizer, "ans")]
