"""Area `repair`: what hostile components, clients and files cost, what the scheduler survives, and random sequences
against stock vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from areas import repair_admin, repair_budget, repair_cli, repair_engine, repair_random, repair_wasm
from areas.common import Figure


def parts(pairs: int) -> dict[str, Callable[[], Iterator[Figure]]]:
    """Parts of the area by name."""
    return {
        **repair_wasm.parts(pairs),
        **repair_admin.parts(pairs),
        **repair_cli.parts(pairs),
        "budget-slot": repair_budget.slot,
        "budget-cost": repair_budget.cost,
        "drain": repair_budget.drain,
        "defects": repair_engine.defects,
        "stock": repair_engine.stock,
        "priority": repair_engine.priority,
        "random": repair_random.random_sequences,
    }
