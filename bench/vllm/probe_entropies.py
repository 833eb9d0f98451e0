"""Are the entropies of probes in the real engine those of the model, and EAT's mean and variance those of the paper?

    python bench/vllm/probe_entropies.py --problems 60

The bundled reasoner thinks in the real engine, with a probe at every line. The same prefixes (prompt, thought so far,
end marker, suffix) then go through the model in transformers, in float32, and the entropy of the next token is computed
there in float64. EAT's recurrence (arXiv 2509.26522) is computed again, in Python, over the probes as they came. Prints
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from meridian.vllm.bench import arith
from meridian.vllm.bench.model import reasoner_dir
from meridian.vllm.bench.run import ENVIRONMENT, MERIDIAN_CLASS

NEVER = 1 << 20
SUFFIX = "ans"


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=60)
    parser.add_argument("--seed", type=int, default=77)
    args = parser.parse_args()
    if args.problems < 1:
        parser.error(f"--problems: {args.problems}: expected at least 1")
    os.environ.update(ENVIRONMENT)
    print(json.dumps(measure(args)))
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Probe in the engine, then compute the same with transformers."""
    prompts, tokens, signals, suffix = think(args)
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(reasoner_dir()), dtype=torch.float32).eval()

    def entropy(ids: list[int]) -> float:
        with torch.no_grad():
            logs = model(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)
        return float(-(logs.exp() * logs).sum())

    worst, probes = 0.0, 0
    by_request: dict[str, list[float]] = defaultdict(list)
    for name, think_tokens, bits, _, _ in signals:
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


def think(args: argparse.Namespace) -> tuple[dict[str, list[int]], dict[str, list[int]], list[Any], list[int]]:
    """Prompts and outputs by request, the signals, and the probes' suffix."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    folder = Path(tempfile.mkdtemp(prefix="meridian-entropies-"))
    text = f"[scheduler]\nmin_think_tokens = {NEVER}\nmax_think_tokens = {NEVER}\n"
    text += f'[entropy]\nprobe_at = "newline"\neat_probe_interval_tokens = 1\nprobe_suffix = "{SUFFIX}"\n'
    text += '[telemetry]\nprometheus = ""\n[admin]\nlisten = ""\n'
    (folder / "meridian.toml").write_text(text)
    os.environ["MERIDIAN_CONFIG"] = str(folder / "meridian.toml")
    engine: Any = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(reasoner_dir()),
            dtype="float32",
            max_model_len=512,
            block_size=32,  # type: ignore[arg-type]
            num_gpu_blocks_override=1024,
            max_num_seqs=128,
            enforce_eager=True,
            disable_log_stats=True,
            scheduler_cls=MERIDIAN_CLASS,
            logits_processors=["meridian.vllm:BudgetLogitsProcessor"],
        )
    )
    scheduler = engine.engine_core.engine_core.scheduler
    scheduler.meridian_record_signals(True)
    tokenizer = engine.get_tokenizer()
    prompts: dict[str, list[int]] = {}
    names: dict[str, str] = {}
    for i, problem in enumerate(arith.problems(args.seed, args.problems)):
        chat = [{"role": "user", "content": problem.text}]
        ids = list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
        params = SamplingParams(temperature=0.6, max_tokens=300)
        names[str(i)] = engine.add_request(str(i), {"prompt_token_ids": ids}, params)
        prompts[names[str(i)]] = ids
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[names[output.request_id]] = list(output.outputs[0].token_ids)
    suffix = [token for part in ("</think>", SUFFIX) for token in tokenizer.encode(part, add_special_tokens=False)]
    return prompts, tokens, scheduler.meridian_take_signals(), suffix


if __name__ == "__main__":
    sys.exit(main())
