#!/usr/bin/env python3
"""What Meridian costs a token: time in its scheduler's methods and in its logits processor, on the real engine.

outputs_cost.py --out FILE
outputs_cost.py --out FILE --budgets      # each request has a thinking budget that it does not reach

The package `meridian` is the one that Python finds, so `PYTHONPATH` chooses between two versions. FILE is a JSON
object: microseconds a token in `schedule()` and `update_from_output()`, and in the processor; the least of some runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python" / "tests" / "vllm"))

REQUESTS, TOKENS, RUNS = 64, 100, 5


class Clock:
    """Nanoseconds inside some methods."""

    def __init__(self) -> None:
        self.ns = 0

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, with its time."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter_ns()
            try:
                return method(*args, **kwargs)
            finally:
                self.ns += time.perf_counter_ns() - began

        return timed


def main() -> int:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, required=True, help="write the figures to this file")
    p.add_argument("--budgets", action="store_true", help="each request has a budget that it does not reach")
    a = p.parse_args()
    from outputs.models import folder
    from outputs.run import ENVIRONMENT

    os.environ |= ENVIRONMENT
    # Both run folders and configuration are nobody's.
    os.chdir(tempfile.mkdtemp())
    os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="m", dir="/tmp")
    from meridian.vllm.budget import BudgetLogitsProcessor
    from vllm import LLM, SamplingParams

    processor = Clock()
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
        logits_processors=["meridian.vllm:BudgetLogitsProcessor"],
        disable_log_stats=True,
    )
    core: Any = llm.llm_engine.engine_core
    scheduler = core.engine_core.scheduler
    own = Clock()
    for name in ("schedule", "update_from_output"):
        setattr(scheduler, name, own.around(getattr(scheduler, name)))
    extra = {"meridian_think_budget": 100_000} if a.budgets else None
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, extra_args=extra)
    prompts = [{"prompt_token_ids": [1, 40 + i % 50, 2, 1, 600]} for i in range(REQUESTS)]
    runs: list[tuple[float, float]] = []
    for _ in range(RUNS + 1):
        own.ns = processor.ns = 0
        llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
        runs.append((own.ns / 1e3 / REQUESTS / TOKENS, processor.ns / 1e3 / REQUESTS / TOKENS))
    best = [min(column) for column in zip(*runs[1:], strict=True)]
    a.out.write_text(json.dumps({"scheduler_us": best[0], "processor_us": best[1]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
