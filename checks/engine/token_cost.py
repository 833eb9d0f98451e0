"""What Meridian costs a token: time in its scheduler's methods and in its logits processor, on the real engine.

The package `meridian` is the one that Python finds, so `PYTHONPATH` chooses between two versions.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

from checks.engine.llm import PROCESSOR, Clock
from python.tests.vllm.outputs.models import folder

REQUESTS, TOKENS, RUNS = 64, 100, 5


def measure(budgets: bool = False) -> dict[str, float]:
    """Microseconds a token, the least of some runs; `budgets`: each request has a budget that it does not reach."""
    # Both run folders and configuration are nobody's.
    os.chdir(tempfile.mkdtemp())
    os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="m", dir="/tmp")
    from meridian.vllm import BudgetLogitsProcessor
    from vllm import LLM, SamplingParams

    processor, own = Clock(), Clock()
    for name in ("update_state", "apply"):
        setattr(BudgetLogitsProcessor, name, processor.around(getattr(BudgetLogitsProcessor, name)))
    llm = LLM(
        model=str(folder("thinks")),
        max_model_len=1024,
        dtype="float32",
        enforce_eager=True,
        seed=0,
        max_num_seqs=REQUESTS,
        scheduler_cls="meridian.vllm.MeridianScheduler",
        logits_processors=[PROCESSOR],
        disable_log_stats=True,
    )
    core: Any = llm.llm_engine.engine_core
    scheduler = core.engine_core.scheduler
    for name in ("schedule", "update_from_output"):
        setattr(scheduler, name, own.around(getattr(scheduler, name)))
    extra = {"meridian_think_budget": 100_000} if budgets else None
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, extra_args=extra)
    prompts: Any = [{"prompt_token_ids": [1, 40 + i % 50, 2, 1, 600]} for i in range(REQUESTS)]
    runs: list[tuple[float, float]] = []
    for _ in range(RUNS + 1):
        own.ns = processor.ns = 0
        llm.generate(prompts, params, use_tqdm=False)
        runs.append((own.ns / 1e3 / REQUESTS / TOKENS, processor.ns / 1e3 / REQUESTS / TOKENS))
    scheduler_us, processor_us = (min(column) for column in zip(*runs[1:], strict=True))
    return {"scheduler": scheduler_us, "processor": processor_us}
