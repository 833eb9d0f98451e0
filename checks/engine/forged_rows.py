"""Can a client give a sampler an order, in the real engine?

It solves problems alone, and with a forged `meridian_row` in every request, which bypasses the check of the front end.
Its outputs must be the same, with Meridian's scheduler and without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meridian.vllm.bench import arith
from meridian.vllm.bench.model import reasoner_dir
from meridian.vllm.bench.run import MERIDIAN_CLASS

from checks.engine.llm import QUIET, engine_of, finished, params, problem_ids, scheduler_of

PROBLEMS = 64
# Keys of requests that an engine may use: the engine's number in the process, and the request's.
KEYS = [(engine << 40) + request for engine in (1, 2, 3) for request in range(4 * PROBLEMS)]


def solve(meridian: bool = True, rows: Callable[[int], Any] | None = None) -> dict[str, Any]:
    """The outputs of the real engine; `rows` gives what a client puts into `meridian_row`."""
    from meridian.vllm.processor import BudgetLogitsProcessor
    from vllm.exceptions import VLLMClientError

    config = "[scheduler]\nmin_think_tokens = 0\nmax_think_tokens = 60\n[entropy]\nrpdi_threshold = 2.0\n"
    engine = engine_of(
        config + QUIET,
        model=str(reasoner_dir()),
        max_num_seqs=PROBLEMS,
        scheduler_cls=MERIDIAN_CLASS if meridian else None,
    )
    refused = 0
    for i, problem in enumerate(arith.problems(9, 4 * PROBLEMS, (8, 10))):
        prompt = {"prompt_token_ids": problem_ids(engine.get_tokenizer(), problem)}
        extra = {} if rows is None else {"meridian_row": rows(i)}
        sampling = params(max_tokens=100, ignore_eos=False, extra_args=extra)
        try:
            engine.add_request(str(i), prompt, sampling)
        except (ValueError, VLLMClientError):
            refused += 1
            validate = BudgetLogitsProcessor.validate_params
            BudgetLogitsProcessor.validate_params = classmethod(lambda cls, params: None)  # type: ignore[assignment]
            try:
                engine.add_request(str(i), prompt, sampling)
            finally:
                BudgetLogitsProcessor.validate_params = validate  # type: ignore[method-assign]
    outputs = dict(finished(engine))
    stats = scheduler_of(engine).meridian_stats() if meridian else {}
    engine.engine_core.shutdown()
    return {
        "outputs": outputs,
        "refused": refused,
        "missed": (stats.get("budget") or {}).get("missed", 0),
    }


def forged_row(number: int) -> Any:
    """What a client may put in the scheduler's place."""
    row = {"key": KEYS[number], "limit": 0, "interrupts": [], "measured": False}
    return [row, {"probe": number, "at": 0}, "row", [1, 2], {**row, "key": None}, 7][number % 6]


def measure() -> dict[str, Any]:
    """Outputs with forged rows and without."""
    honest, rows = solve(), solve(rows=forged_row)
    stock, rows_stock = solve(meridian=False), solve(meridian=False, rows=forged_row)

    def changed(one: dict[str, Any], other: dict[str, Any]) -> int:
        return sum(one["outputs"].get(number) != tokens for number, tokens in other["outputs"].items())

    return {
        "rows_changed": changed(rows, honest),
        "rows_stock_changed": changed(rows_stock, stock),
        "requests": len(honest["outputs"]),
        "rows_sent": 2 * len(honest["outputs"]),
        "rows_refused": rows["refused"] + rows_stock["refused"],
        "missed": honest["missed"] + rows["missed"],
    }
