"""The engine without the time that a model takes: vLLM's real scheduler, KV cache manager and block pools, with a model
runner that generates random tokens.

Which blocks are asked for, and when, depends on lengths alone, so that hit rates are those of the real model; latencies
mean nothing.
"""

from __future__ import annotations

import random
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meridian.vllm.bench.run import Run


def without_model(run: Run, seed: int) -> None:
    """From here on the engine's tokens are random, but for the end marker where the thinking budget puts it."""
    from vllm.v1.outputs import ModelRunnerOutput

    rng = random.Random(seed)
    requests = run.scheduler.requests

    def token(request: Any) -> list[int]:
        if request.num_computed_tokens < request.num_tokens:
            return []
        thinks = request.sampling_params.thinking_token_budget - run.tokens_before_think
        into_end = request.num_output_tokens - thinks
        return [run.end_ids[into_end] if 0 <= into_end < len(run.end_ids) else rng.choice(run.vocabulary)]

    def execute(output: Any, non_block: bool = False) -> Any:
        ids = list(output.num_scheduled_tokens)
        done: Future[Any] = Future()
        done.set_result(
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
                sampled_token_ids=[token(requests[request_id]) for request_id in ids],
            )
        )
        return done

    run.engine.engine_core.engine_core.model_executor.execute_model = execute
