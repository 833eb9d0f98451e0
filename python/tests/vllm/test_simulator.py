"""The simulator schedules as stock vLLM does, step by step. Every request is there from the start, so that time decides
nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from harness import KV_BLOCK_TOKENS, KV_BLOCKS, Engine, requests
from meridian.vllm.bench.probe import SchedulerProbe
from meridian.vllm.bench.request import TraceRequest
from meridian.vllm.bench.run import Options, document_of, drive

OPTIONS = Options(
    model=Path(),
    kv_blocks=KV_BLOCKS,
    block_size=KV_BLOCK_TOKENS,
    max_num_seqs=16,
    max_num_batched_tokens=256,
    max_model_len=1024,
    dtype="float32",
    realtime=False,
)


@pytest.fixture
def unwrapped(engine: Engine) -> Iterator[None]:
    """An empty prefix cache before, and no probe on the scheduler after."""
    engine.run.engine.reset_prefix_cache()
    engine.run.seen.clear()
    engine.run.by_name.clear()
    yield
    for name in ("schedule", "_preempt_request"):
        engine.scheduler.__dict__.pop(name, None)


def calibrate(recorded: Path) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "meridian", "--json", "bench", "calibrate", str(recorded))
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.usefixtures("unwrapped")
@pytest.mark.parametrize("longest", [120, 700])
def test_the_simulator_has_the_same_steps(engine: Engine, tmp_path: Path, longest: int) -> None:
    # Long prompts come in pieces; together the requests need more KV than there is.
    trace = [replace(r, prompt_tokens=r.prompt_tokens * longest // 120) for r in requests(24, seed=longest)]
    probe = SchedulerProbe(engine.scheduler, engine.run.seen)
    with engine.using(None):
        observed, makespan_s = drive(engine.run, trace, probe, OPTIONS)
    document = document_of(engine.run, OPTIONS, observed, probe, makespan_s)
    assert sum(document["counts"]["preemptions"].values()) > 0
    recorded = tmp_path / "run.json"
    recorded.write_text(json.dumps(document))
    done = calibrate(recorded)
    assert done.returncode == 0, done.stderr
    (errors,) = json.loads(done.stdout)["errors"]
    assert errors["steps"] == len(probe.step_s) > 100
    assert errors["same_steps"] == errors["steps"]


def test_a_run_that_was_not_recorded_so_is_refused(tmp_path: Path) -> None:
    recorded = tmp_path / "run.json"
    recorded.write_text(json.dumps({"rows": [TraceRequest(0.0, 1, 1, 1).__dict__]}))
    done = calibrate(recorded)
    assert done.returncode == 2
    assert "run.json: expected a run that `meridian bench vllm --out DIR` wrote" in json.loads(done.stdout)["error"]
