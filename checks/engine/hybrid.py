"""How long do prompts of a hybrid model wait for their first token beside many answers?

vLLM computes such prompts in whole state blocks. The model is Qwen3-Next's architecture with two layers and random
weights, on the real engine; answers of the same length stream from the start, and prompts of three blocks follow.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from meridian.vllm.bench.model import model_dir
from meridian.vllm.bench.request import TraceRequest
from meridian.vllm.bench.run import Options, Run, build, warm_up

from checks.engine.llm import QUIET, percentile

PROMPTS = 20
EVERY_STEPS = 6


def hybrid_model(folder: Path) -> Path:
    """The tokenizer of the small model, and a configuration without weights, which vLLM then makes."""
    from transformers import Qwen3NextConfig

    shutil.copytree(
        model_dir(), folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors", "config.json")
    )
    config = Qwen3NextConfig(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=1,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        # vLLM's kernels for a CPU know this size, and bfloat16.
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        layer_types=["linear_attention", "full_attention"],
        mlp_only_layers=[0],
        max_position_embeddings=8192,
        architectures=["Qwen3NextForCausalLM"],
    )
    config.save_pretrained(folder)
    return folder


def first_tokens(run: Run, streams: int, block: int) -> list[float]:
    """Milliseconds to the first token of prompts that follow each other while so many answers stream."""
    rng = random.Random(1)
    for i in range(streams):
        run.add(f"answer{i}", TraceRequest(0.0, 20, 0, 1900), i, 0.0, rng)
    while any(not seen.tokens for seen in run.by_name.values()):
        run.step()
    for _ in range(30):
        run.step()
    prompts = []
    for i in range(PROMPTS * EVERY_STEPS):
        if i % EVERY_STEPS == 0:
            long = TraceRequest(0.0, 3 * block + 16, 0, 4)
            prompts.append(run.add(f"prompt{i}", long, streams + i, time.perf_counter(), rng))
        run.step()
    for _ in range(200):
        if all(seen.tokens for seen in prompts):
            break
        run.step()
    return [1e3 * (seen.times[0] - seen.arrival) if seen.tokens else float("inf") for seen in prompts]


def measure(scheduler: str = "stock", block: int = 32, streams: int = 300) -> dict[str, Any]:
    """Under stock or a dispatch policy. vLLM raises `block` to the size of its state blocks."""
    with tempfile.TemporaryDirectory() as folder:
        options = Options(
            model=hybrid_model(Path(folder)),
            scheduler=scheduler,
            block_size=block,
            max_num_seqs=400,
            meridian_toml=f'[policy.dispatch]\nsource = "{scheduler}"\n{QUIET}',
        )
        run = build(options)
        assert run.scheduler.need_mamba_block_aligned_split, "vLLM does not compute this model in whole blocks"
        warm_up(run, options.max_model_len)
        state_block = run.scheduler.cache_config.block_size
        waits = first_tokens(run, streams, state_block)
    return {"state_block": state_block, "ttft_p50_ms": percentile(waits, 0.5), "ttft_max_ms": max(waits)}
