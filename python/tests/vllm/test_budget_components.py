"""DEER as a native policy, as a component in Rust and in C: the real engine ends the same thoughts at the same tokens.

The rule is DEER's: a probe more confident of its answer than the threshold ends thinking. The requests are sampled
greedily, so that only a decision can change a thought.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROBLEMS = 40
# The reasoner's certain answers are about as certain as this: a slightly different rule ends some thoughts a line away.
CONFIDENCE = 0.9995
# Probes at every line; neither targets nor a busy machine decide anything.
SETTINGS = {
    "scheduler.output_tpot_budget_ms": "1e9",
    "scheduler.think_tpot_budget_ms": "1e9",
    "scheduler.min_think_tokens": "0",
    "scheduler.max_think_tokens": "1000000",
    "entropy.probe_at": "newline",
    "entropy.eat_probe_interval_tokens": "1",
    "entropy.probe_newline": "false",
    "entropy.probe_suffix": "ans",
    "entropy.rpdi_threshold": "inf",
    "policy.budget.deadline_ms": "1000",
    "policy.budget.config.confidence": str(CONFIDENCE),
}
SOURCES = ("native:deer", "Rust", "C")


def component_in_c(folder: Path) -> Path:
    """Build `checks/engine/deer.c` in a folder as `meridian policy new` makes it."""
    command = f'. "$({ROOT}/scripts/fetch.sh wasm32)"; exec {ROOT}/target/release/meridian "$@"'

    def meridian(*args: str) -> None:
        run = subprocess.run(("bash", "-c", command, "bash", *args), cwd=folder, capture_output=True, text=True)
        assert run.returncode == 0, f"{args}: {run.stdout}{run.stderr}"

    meridian("policy", "new", "deer-c", "--lang", "c", "--slot", "budget")
    shutil.copyfile(ROOT / "checks" / "engine" / "deer.c", folder / "deer-c" / "policy.c")
    meridian("policy", "build", "deer-c", "--out", ".")
    return folder / "deer-c.wasm"


@pytest.fixture(scope="module")
def found(policies: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each of the three did with the same problems."""
    folder = tmp_path_factory.mktemp("components")
    files = {"native:deer": "native:deer", "Rust": str(policies / "deer.wasm"), "C": str(component_in_c(folder))}
    out = {}
    for number, name in enumerate(SOURCES):
        path = folder / f"{number}.json"
        settings = {**SETTINGS, "policy.budget.source": files[name]}
        args = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        model = ("--model", str(ROOT / "models" / "arith-reasoner"), "--temperature", "0", "--out", str(path))
        run = subprocess.run(
            [sys.executable, "-m", "meridian.vllm.bench.early_exit_run", *model, "--problems", str(PROBLEMS), *args],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        assert run.returncode == 0, run.stderr[-3000:]
        out[name] = json.loads(path.read_text())
    return out


@pytest.mark.parametrize("language", ["Rust", "C"])
def test_a_component_ends_the_thoughts_that_the_native_rule_ends(
    found: dict[str, dict[str, Any]], language: str
) -> None:
    native, component = (found[name]["passes"][0] for name in ("native:deer", language))
    assert component["think_tokens"] == native["think_tokens"]
    assert component["right"] == native["right"]
    assert component["counters"] == native["counters"]


@pytest.mark.parametrize("source", SOURCES)
def test_the_rule_decides_without_a_fault(found: dict[str, dict[str, Any]], source: str) -> None:
    counters = found[source]["passes"][0]["counters"]
    # A thought may also end by itself, before its answer is certain.
    assert counters["forced"]["policy"] > PROBLEMS / 2
    assert sum(count for reason, count in counters["forced"].items() if reason != "policy") == 0
    assert counters["missed"] == 0
    assert counters["probes"]["done"] > PROBLEMS
    assert not any(found[source]["faults"].values())
