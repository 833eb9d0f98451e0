"""The real engine: building it, with asynchronous scheduling and drafts too, and what every measurement asks it."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from meridian.vllm.bench import arith
from meridian.vllm.bench.model import model_dir
from meridian.vllm.bench.run import MERIDIAN_CLASS

from checks.engine import cpu

# No listeners: several engines run on one machine.
QUIET = '[telemetry]\nprometheus = ""\n[admin]\nlisten = ""\n'
# Thinking that nothing ends.
ENDLESS = f"[scheduler]\nmin_think_tokens = {1 << 20}\nmax_think_tokens = {1 << 20}\n"
PROCESSOR = "meridian.vllm:BudgetLogitsProcessor"


def configure(text: str) -> Path:
    """Makes the text the configuration of the next engine; returns its folder."""
    folder = Path(tempfile.mkdtemp(prefix="meridian-checks-"))
    (folder / "meridian.toml").write_text(text)
    os.environ["MERIDIAN_CONFIG"] = str(folder / "meridian.toml")
    return folder


def engine_of(config: str | None, *, asynchronous: bool = False, **changed: Any) -> Any:
    """The engine with both classes of Meridian and this configuration; None leaves the one that is set. `changed` are
    arguments of vLLM's, None for one to leave out."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    if config is not None:
        configure(config)
    arguments: dict[str, Any] = {
        "model": str(model_dir()),
        "dtype": "float32",
        "max_model_len": 512,
        "block_size": 32,
        "enforce_eager": True,
        "disable_log_stats": True,
        "scheduler_cls": MERIDIAN_CLASS,
        "logits_processors": [PROCESSOR],
        **changed,
    }
    from vllm.platforms import current_platform

    args = EngineArgs(**{name: given for name, given in arguments.items() if given is not None})
    if current_platform.is_cpu():
        cpu.install(asynchronous=asynchronous)
    else:
        args.async_scheduling = asynchronous
    return LLMEngine.from_engine_args(args)


def ngrams(drafts: int) -> dict[str, Any]:
    """vLLM's `speculative_config` for drafts from n-grams of the request."""
    return {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def scheduler_of(engine: Any) -> Any:
    """The scheduler inside."""
    return engine.engine_core.engine_core.scheduler


def gave_up(scheduler: Any) -> bool:
    """Whether the engine goes on as stock."""
    return scheduler._meridian is None or scheduler._meridian_think is None


def ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def problem_ids(tokenizer: Any, problem: arith.Problem) -> list[int]:
    """A problem of the bundled reasoner as a prompt."""
    chat = [{"role": "user", "content": problem.text}]
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))


def params(**changed: Any) -> Any:
    """Sampling parameters of a greedy request that is not ended by the model."""
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "detokenize": False, **changed})


def finished(engine: Any) -> Iterator[tuple[str, list[int]]]:
    """Runs all requests to their end; each as it ends, with its tokens."""
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                yield output.request_id, list(output.outputs[0].token_ids)


def percentile(values: Sequence[float], share: float) -> float:
    """A percentile, by the nearest rank."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


class Clock:
    """Time in some methods, without that in other methods which they call in turn."""

    def __init__(self) -> None:
        self.ns = 0
        self._stack: list[bool] = []
        self._last_ns = 0

    def _switch(self) -> None:
        now_ns = time.perf_counter_ns()
        if self._stack and self._stack[-1]:
            self.ns += now_ns - self._last_ns
        self._last_ns = now_ns

    def around(self, call: Callable[..., Any], counts: bool = True) -> Callable[..., Any]:
        """A method whose time counts, or does not."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._switch()
            self._stack.append(counts)
            try:
                return call(*args, **kwargs)
            finally:
                self._switch()
                self._stack.pop()

        return timed
