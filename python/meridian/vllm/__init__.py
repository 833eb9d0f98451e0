"""Meridian inside vLLM. The only part of the package that imports vLLM.

vllm serve MODEL --scheduler-cls meridian.vllm.MeridianScheduler
"""

from meridian.vllm.scheduler import MeridianScheduler

__all__ = ["MeridianScheduler"]
