"""Meridian inside vLLM. The only part of the package that imports vLLM.

vllm serve MODEL --scheduler-cls meridian.vllm.MeridianScheduler
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meridian.vllm.budget import BudgetLogitsProcessor
    from meridian.vllm.offload import PhaseAwareCachePolicy
    from meridian.vllm.scheduler import MeridianScheduler

__all__ = ["BudgetLogitsProcessor", "MeridianScheduler", "PhaseAwareCachePolicy"]
# Imported when they are asked for: not every supported vLLM has what they derive from, and the benchmark sets vLLM's
# environment before it is imported.
_MODULES = {
    "BudgetLogitsProcessor": "budget",
    "MeridianScheduler": "scheduler",
    "PhaseAwareCachePolicy": "offload",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"meridian.vllm.{_MODULES[name]}"), name)
