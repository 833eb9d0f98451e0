# Written by `MERIDIAN_BLESS=1 cargo test --release -p meridian-core --test all python_tables` from the native tables.
"""The tables of `meridian.toml`. docs/src/configuration.md describes each field."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class AdminConfig:
    """`[admin]`."""

    audit_log: str = ""
    audit_log_max_mib: int = 16
    listen: str = "127.0.0.1:9465"
    tls_cert_file: str = ""
    tls_key_file: str = ""
    token_file: str = ""


@dataclass(frozen=True, kw_only=True)
class DisaggConfig:
    """`[disagg]`."""

    enabled: bool = False
    fabric: Literal["none", "tcp", "nixl", "mooncake"] = "none"
    offload_threshold_blocks: int = 4
    policy: Literal["threshold", "expected-time"] = "threshold"


@dataclass(frozen=True, kw_only=True)
class EntropyConfig:
    """`[entropy]`."""

    eat_max_bits: float = 0.5
    eat_probe_interval_tokens: int = 32
    eat_variance_threshold: float = 0.0009765625
    ema_alpha: float = 0.1
    enabled: bool = True
    min_probes: int = 4
    probe_at: Literal["interval", "newline"] = "interval"
    probe_newline: bool = False
    probe_suffix: str = ""
    rpdi_threshold: float = math.inf
    rpdi_window: int = 512


@dataclass(frozen=True, kw_only=True)
class KvMemoryConfig:
    """`[kv_memory]`."""

    enabled: bool = True
    evict_dead_thinking: bool | Literal["auto"] = "auto"
    growth_blocks: float = 8.0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """`[model]`."""

    eos_guard: bool = False
    family: str = ""
    force_phrase: str = ""
    interrupt: str | list[str] = ""
    min_answer_tokens: int = 0
    resumes: bool = True
    stop_strings: Literal["everywhere", "answer"] = "everywhere"
    strips_reasoning: bool | Literal["auto"] = "auto"
    think_end: str | list[str] = "auto"
    think_start: str | list[str] = "auto"
    tool_call: str | list[str] = ""
    tool_call_ends_thinking: bool | Literal["auto"] = "auto"


@dataclass(frozen=True)
class SlotConfig:
    """`[policy.dispatch]`, `[policy.eviction]` and `[policy.budget]`."""

    source: str
    config: dict[str, Any] = field(default_factory=dict)
    deadline_ms: float = 2.0
    memory_mib: int = 64
    mode: Literal["active", "shadow"] = "active"


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """`[policy]`."""

    budget: SlotConfig = field(default_factory=lambda: SlotConfig("native:eat-rpdi", deadline_ms=5.0))
    cache_dir: str = ""
    dispatch: SlotConfig = field(default_factory=lambda: SlotConfig("native:balanced"))
    eviction: SlotConfig = field(default_factory=lambda: SlotConfig("native:tiered-lru"))
    max_strikes: int = 3
    record_dir: str = ""
    record_max_mib: int = 256
    strike_window_s: int = 60
    trusted_keys: list[str] = field(default_factory=list)
    watch: bool = True


@dataclass(frozen=True, kw_only=True)
class EffortThresholds:
    """The thresholds of requests with one `reasoning_effort`. A client's own `meridian_*` options win over them."""

    max_think_tokens: int | Literal["unchanged"] = "unchanged"
    min_think_tokens: int | Literal["unchanged"] = "unchanged"


@dataclass(frozen=True, kw_only=True)
class ReasoningEfforts:
    """The thresholds of each `reasoning_effort` that a client of the OpenAI API may name."""

    high: EffortThresholds = field(default_factory=EffortThresholds)
    low: EffortThresholds = field(default_factory=EffortThresholds)
    max: EffortThresholds = field(default_factory=EffortThresholds)
    medium: EffortThresholds = field(default_factory=EffortThresholds)
    minimal: EffortThresholds = field(default_factory=EffortThresholds)
    none: EffortThresholds = field(default_factory=EffortThresholds)
    xhigh: EffortThresholds = field(default_factory=EffortThresholds)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """`[scheduler]`."""

    answer_reserve_tokens: int = 0
    end_loops: bool = False
    max_defer_ms: float = 2000.0
    max_think_tokens: int = 16777216
    min_think_tokens: int = 512
    output_tpot_budget_ms: float = 20.0
    preempt_for_waiting: bool = False
    reasoning_effort: ReasoningEfforts = field(default_factory=ReasoningEfforts)
    session_wait_ms: float = 540000.0
    think_batch_multiplier: float = 2.5
    think_tpot_budget_ms: float = 80.0
    thinking: Literal["stock", "guarded"] = "stock"


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """`[telemetry]`."""

    otlp_ca_file: str = ""
    otlp_endpoint: str = ""
    prometheus: str = "127.0.0.1:9464"
    service_name: str = "meridian"
    tenants: int = 16


@dataclass(frozen=True, kw_only=True)
class Tables:
    """The contents of `meridian.toml`. Every field has a default; an unknown field is an error with a suggestion."""

    admin: AdminConfig = field(default_factory=AdminConfig)
    disagg: DisaggConfig = field(default_factory=DisaggConfig)
    entropy: EntropyConfig = field(default_factory=EntropyConfig)
    kv_memory: KvMemoryConfig = field(default_factory=KvMemoryConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    service_levels: dict[str, Any] = field(default_factory=dict)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
