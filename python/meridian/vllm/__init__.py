"""Meridian inside vLLM. Only this part of the package imports vLLM.

vllm serve MODEL --scheduler-cls meridian.vllm.MeridianScheduler
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meridian.vllm.agents import SessionMiddleware
    from meridian.vllm.offload import PhaseAwareCachePolicy
    from meridian.vllm.processor import BudgetLogitsProcessor
    from meridian.vllm.refusals import RefusalMiddleware
    from meridian.vllm.scheduler import MeridianScheduler

__all__ = [
    "BudgetLogitsProcessor",
    "MeridianScheduler",
    "PhaseAwareCachePolicy",
    "RefusalMiddleware",
    "SessionMiddleware",
]
# Imported on first use: not every supported vLLM has their base classes, and the benchmark sets vLLM's environment
# before it imports vLLM.
_MODULES = {
    "BudgetLogitsProcessor": "processor",
    "MeridianScheduler": "scheduler",
    "PhaseAwareCachePolicy": "offload",
    "RefusalMiddleware": "refusals",
    "SessionMiddleware": "agents",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"meridian.vllm.{_MODULES[name]}"), name)
