"""Components in the budget slot of the real engine, and swaps of it, by `budget_slot.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fresh
import pytest

CASES = ("fixed", "equal", "lowered", "loaded", "rolled_back", "questions", "clients")


@pytest.fixture(scope="module")
def found(policies: Path) -> dict[str, Any]:
    """What each case found."""
    return fresh.measure("python.tests.vllm.budget_slot", policies=policies)


@pytest.mark.parametrize("case", CASES)
def test_thinking_ends_where_the_policy_in_force_says(found: dict[str, Any], case: str) -> None:
    assert found[case]["found"] == found[case]["expected"]


def test_no_component_faults_and_no_token_is_missed(found: dict[str, Any]) -> None:
    assert (found["faults"], found["missed"], found["gave_up"]) == (0, 0, False)
    assert found["swaps"] > 10
