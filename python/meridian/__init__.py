"""Programmable scheduling of reasoning models on vLLM.

`PolicyEngine` is the host engine without vLLM, for tests and notebooks. `meridian.vllm.MeridianScheduler` is the same
engine inside vLLM. Only `meridian.vllm` imports vLLM.
"""

from meridian._native import ConfigError, PolicyError, __version__
from meridian._tables import (
    AdminConfig,
    DisaggConfig,
    EntropyConfig,
    KvMemoryConfig,
    PolicyConfig,
    SchedulerConfig,
    SlotConfig,
    TelemetryConfig,
)
from meridian.config import MeridianConfig, ModelConfig, load_config
from meridian.engine import (
    EngineLoad,
    EvictionCandidate,
    EvictionRanking,
    PolicyEngine,
    Stats,
    StepPlan,
    ThinkingRequest,
)

__all__ = [
    "AdminConfig",
    "ConfigError",
    "DisaggConfig",
    "EngineLoad",
    "EntropyConfig",
    "EvictionCandidate",
    "EvictionRanking",
    "KvMemoryConfig",
    "MeridianConfig",
    "ModelConfig",
    "PolicyConfig",
    "PolicyEngine",
    "PolicyError",
    "SchedulerConfig",
    "SlotConfig",
    "Stats",
    "StepPlan",
    "TelemetryConfig",
    "ThinkingRequest",
    "__version__",
    "load_config",
]
