"""Components in the budget slot of the real engine, and swaps of it, by `bench/vllm/budget_slot.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fresh
import pytest

ROOT = Path(__file__).resolve().parents[3]
CASES = ("fixed", "equal", "lowered", "loaded", "rolled_back", "questions", "clients")


@pytest.fixture(scope="module")
def found(policies: Path) -> dict[str, Any]:
    """What the script found."""
    script = ROOT / "bench" / "vllm" / "budget_slot.py"
    done = fresh.run(script, "--policies", str(policies))
    assert done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_thinking_ends_where_the_policy_in_force_says(found: dict[str, Any], case: str) -> None:
    assert found[case]["found"] == found[case]["expected"]


def test_no_component_faults_and_no_token_is_missed(found: dict[str, Any]) -> None:
    assert (found["faults"], found["missed"], found["gave_up"]) == (0, 0, False)
    assert found["swaps"] > 10
