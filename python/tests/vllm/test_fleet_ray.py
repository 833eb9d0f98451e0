"""Ray Serve LLM with two replicas on two nodes of a local cluster: its broadcast reaches the scheduler of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import vllm
from serving import TOKEN, configure

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 600
# Ray's packages are chosen for this one, and Ray 2.60 uses modules that others do not have.
pytestmark = [
    pytest.mark.whole_machine,
    # Ray is fetched for it, and the routes are those that `test_fleet_serve.py` asks.
    pytest.mark.exhaustive,
    pytest.mark.skipif(not vllm.__version__.startswith("0.32."), reason="Ray is there for vLLM 0.32 alone"),
]


@pytest.fixture(scope="module")
def said() -> Any:
    """What `ray_fleet.py` found."""
    made = subprocess.run([str(ROOT / "scripts" / "fetch.sh"), "ray"], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    # A short path, for its sockets.
    with tempfile.TemporaryDirectory(prefix="m", dir="/tmp") as name:
        folder = Path(name)
        (folder / "run").mkdir(mode=0o700)
        env = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "RAY_"))}
        env |= {
            "PYTHONPATH": made.stdout.strip(),
            "MERIDIAN_CONFIG": str(configure(folder)),
            "XDG_RUNTIME_DIR": str(folder / "run"),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(folder),
            # A slow machine is no dead node.
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(LIMIT_S),
            "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": str(LIMIT_S),
            "RAY_health_check_timeout_ms": str(1000 * LIMIT_S),
        }
        command = [sys.executable, str(ROOT / "python" / "tests" / "vllm" / "ray_fleet.py"), str(folder), TOKEN]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_each_node_has_an_engine(said: Any) -> None:
    assert said["nodes"] == 2
    assert len(said["before"]) == 2
    assert set(said["before"].values()) == {"balanced"}
    code, answer = said["completion"]
    assert code == 200, answer
    assert answer["usage"]["completion_tokens"] == 8


def test_a_broadcast_by_a_handle_changes_every_replica(said: Any) -> None:
    rows = [row for (row,) in said["by_handle"]]
    assert {str(row["pid"]) for row in rows} == set(said["before"])
    assert {row["answer"]["active"]["name"] for row in rows} == {"fcfs"}
    assert set(said["after_handle"].values()) == {"fcfs"}
    assert not said["token_in_logs"]


def test_rays_route_changes_every_replica(said: Any) -> None:
    code, answer = said["by_route"]
    assert code == 200, answer
    rows = [row for replica in answer["results"] for row in replica["worker_results"]]
    assert {str(row["pid"]) for row in rows} == set(said["before"])
    assert set(said["after_route"].values()) == {"srpt"}


def test_without_the_token_nothing_changes(said: Any) -> None:
    code, _ = said["with_a_wrong_token"]
    assert code >= 400
    assert said["after_refusal"] == said["after_route"]
