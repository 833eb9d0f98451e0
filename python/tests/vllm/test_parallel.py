"""Budgets where an engine is several processes, on several machines."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from checks.engine import parallel

ROOT = Path(__file__).resolve().parents[3]
COMPONENT = ROOT / "target" / "policies" / "fair-share.wasm"
RANKS, STAGES = (form for form in parallel.FORMS if form.startswith(("tensor", "pipeline")))


def can_make_machines() -> bool:
    """Whether this user may make network namespaces, which needs root."""
    machines = parallel.Machines.__new__(parallel.Machines)
    try:
        machines.__init__()  # type: ignore[misc]
    except (OSError, subprocess.CalledProcessError):
        return False
    finally:
        machines.close()
    return True


# What crosses between processes is tested by test_budget_channel.py.
@pytest.mark.exhaustive
@pytest.mark.parametrize("form", [RANKS, STAGES])
def test_every_process_that_samples_gets_its_orders(form: str) -> None:
    if form == RANKS and can_make_machines():
        # Two ranks as well, and not beside each other.
        form = parallel.MACHINES
    found = parallel.measure(str(COMPONENT), form, requests=32, swaps=2)
    assert (found["served"], found["missed"], found["failures"]) == (32, 0, 0)
    assert found["ordered"] > 0
    # Of those with a budget and of those that an order has ended.
    assert found["same_answers"] == found["answers"] == 20 + 8
    assert (found["swapped"], found["engines"], found["gave_up"]) == (2, 1, 0)
