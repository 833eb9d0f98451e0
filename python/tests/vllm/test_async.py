"""Asynchronous scheduling, which vLLM turns off on CPU: the real `AsyncScheduler` with a model runner that is made up.

Step n + 1 is scheduled before the output of step n is known, as the engine does on a GPU.
"""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from harness import Engine
from test_start import configure, make

END_OF_THINKING_AFTER = 5


def model_output(output: Any, generated: dict[str, int], end: int) -> Any:
    """Tokens for every request whose prompt is computed: 5 of thinking, the end marker, then output."""
    from vllm.v1.outputs import ModelRunnerOutput

    ids = list(output.num_scheduled_tokens)
    sampled = []
    for request_id in ids:
        if request_id in output.finishing_prefill:
            generated[request_id] = generated.get(request_id, 0) + 1
            sampled.append([end if generated[request_id] == END_OF_THINKING_AFTER else 100])
        else:
            sampled.append([])
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
        sampled_token_ids=sampled,
    )


@pytest.mark.parametrize("source", ["native:output-first", "output-first.wasm"])
def test_async_scheduling_with_preemption(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, policies: Path, source: str
) -> None:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    path = source if source.startswith("native:") else str(policies / source)
    configure(monkeypatch, tmp_path, f'[policy.dispatch]\nsource = "{path}"\n')
    scheduler = make(engine, async_scheduling=True)
    end = engine.run.end_ids[0]
    rng = random.Random(1)
    requests = {}
    for i in range(24):
        prompt = [rng.randint(20, 900) for _ in range(rng.randint(20, 200))] + list(engine.run.template.tail)
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        params.update_from_generation_config({}, 2)
        hasher = engine.run.engine.engine_core.engine_core.request_block_hasher
        request = Request(f"r{i}", prompt, params, None, block_hasher=hasher)
        requests[request.request_id] = request
        scheduler.add_request(request)
    generated: dict[str, int] = {}
    in_flight: deque[tuple[Any, Any]] = deque()
    finished: set[str] = set()
    for _ in range(4000):
        if scheduler.has_unfinished_requests() and len(in_flight) < 2:
            output = scheduler.schedule()
            output.finishing_prefill = {
                request_id for request_id in output.num_scheduled_tokens if not requests[request_id].is_prefill_chunk
            }
            in_flight.append((output, model_output(output, generated, end)))
            if len(in_flight) < 2:
                continue
        if not in_flight:
            break
        for client in scheduler.update_from_output(*in_flight.popleft()).values():
            for done in client.outputs:
                if done.finish_reason is None:
                    expected = (
                        "think" if requests[done.request_id].num_output_tokens < END_OF_THINKING_AFTER else "output"
                    )
                    if requests[done.request_id].num_preemptions == 0:
                        assert scheduler._meridian.phase(done.request_id) == expected
                else:
                    finished.add(done.request_id)
    assert finished == set(requests)
    assert scheduler._meridian is not None, "Meridian gave up"
    stats = scheduler.meridian_stats()
    assert stats["requests"] == 0
    assert stats["decided_by_policy"] == stats["decisions"] > 40
    assert sum(stats["preemptions"].values()) > 0
