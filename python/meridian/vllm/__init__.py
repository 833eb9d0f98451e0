"""Meridian inside vLLM. The only part of the package that imports vLLM.

vllm serve MODEL --scheduler-cls meridian.vllm.MeridianScheduler
"""

from typing import TYPE_CHECKING, Any

from meridian.vllm.scheduler import MeridianScheduler

if TYPE_CHECKING:
    from meridian.vllm.budget import BudgetLogitsProcessor
    from meridian.vllm.offload import PhaseAwareCachePolicy

__all__ = ["BudgetLogitsProcessor", "MeridianScheduler", "PhaseAwareCachePolicy"]


def __getattr__(name: str) -> Any:
    # Not every supported vLLM has what it derives from, and few engines offload.
    if name == "PhaseAwareCachePolicy":
        from meridian.vllm.offload import PhaseAwareCachePolicy

        return PhaseAwareCachePolicy
    if name == "BudgetLogitsProcessor":
        from meridian.vllm.budget import BudgetLogitsProcessor

        return BudgetLogitsProcessor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
