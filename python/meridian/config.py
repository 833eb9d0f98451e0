"""The configuration, `meridian.toml`.

The dataclasses mirror the native tables, field by field; docs/src/configuration.md describes each field. Values are
checked where text is parsed and where an engine is made, not here.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import reprlib
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from meridian import _native
from meridian._native import ConfigError

# Below vLLM's own logger, whose handlers and level it shares.
logger = logging.getLogger("vllm.meridian")


@dataclass(frozen=True)
class EffortThresholds:
    """A row of `[scheduler.reasoning_effort]`."""

    max_think_tokens: int | Literal["unchanged"] = "unchanged"
    min_think_tokens: int | Literal["unchanged"] = "unchanged"


@dataclass(frozen=True)
class ReasoningEfforts:
    """`[scheduler.reasoning_effort]`: the thresholds of each `reasoning_effort` of a client."""

    none: EffortThresholds = EffortThresholds()
    minimal: EffortThresholds = EffortThresholds()
    low: EffortThresholds = EffortThresholds()
    medium: EffortThresholds = EffortThresholds()
    high: EffortThresholds = EffortThresholds()
    xhigh: EffortThresholds = EffortThresholds()
    max: EffortThresholds = EffortThresholds()

    @classmethod
    def _from_tables(cls, tables: dict[str, dict[str, Any]]) -> ReasoningEfforts:
        return cls(**{name: EffortThresholds(**row) for name, row in tables.items()})


@dataclass(frozen=True)
class SchedulerConfig:
    """`[scheduler]`: times in milliseconds. The constructor fills in nothing for `thinking`; `from_toml` does."""

    output_tpot_budget_ms: float = 20.0
    think_tpot_budget_ms: float = 80.0
    think_batch_multiplier: float = 2.5
    thinking: Literal["stock", "guarded"] = "stock"
    min_think_tokens: int = 512
    max_think_tokens: int = 16777216
    answer_reserve_tokens: int = 0
    end_loops: bool = False
    max_defer_ms: float = 2000.0
    preempt_for_waiting: bool = False
    reasoning_effort: ReasoningEfforts = ReasoningEfforts()


@dataclass(frozen=True)
class EntropyConfig:
    """`[entropy]`: the signals that show when thinking has converged."""

    enabled: bool = True
    ema_alpha: float = 0.1
    eat_variance_threshold: float = 0.0009765625
    eat_max_bits: float = 0.5
    eat_probe_interval_tokens: int = 32
    min_probes: int = 4
    rpdi_window: int = 512
    rpdi_threshold: float = math.inf
    probe_at: Literal["interval", "newline"] = "interval"
    probe_newline: bool = False
    probe_suffix: str = ""


@dataclass(frozen=True)
class KvMemoryConfig:
    """`[kv_memory]`."""

    enabled: bool = True
    evict_dead_thinking: bool | Literal["auto"] = "auto"
    growth_blocks: float = 8.0


@dataclass(frozen=True)
class DisaggConfig:
    """`[disagg]`: for Rust engines with KV memory of their own; vLLM has its own, and refuses `enabled`."""

    enabled: bool = False
    fabric: Literal["none", "tcp", "nixl", "mooncake"] = "none"
    offload_threshold_blocks: int = 4
    policy: Literal["threshold", "expected-time"] = "threshold"


@dataclass(frozen=True)
class SlotConfig:
    """`[policy.dispatch]`, `[policy.eviction]`, `[policy.budget]`.

    `source` is `native:NAME`, the path of a component, or `oci://HOST/NAME@sha256:DIGEST`.
    """

    source: str
    config: dict[str, Any] = field(default_factory=dict)
    deadline_ms: float = 2.0
    memory_mib: int = 64
    mode: Literal["active", "shadow"] = "active"


@dataclass(frozen=True)
class PolicyConfig:
    """`[policy]`."""

    watch: bool = True
    max_strikes: int = 3
    strike_window_s: int = 60
    cache_dir: str = ""
    record_dir: str = ""
    record_max_mib: int = 256
    trusted_keys: list[str] = field(default_factory=list)
    dispatch: SlotConfig = field(default_factory=lambda: SlotConfig("native:balanced"))
    eviction: SlotConfig = field(default_factory=lambda: SlotConfig("native:tiered-lru"))
    budget: SlotConfig = field(default_factory=lambda: SlotConfig("native:eat-rpdi", deadline_ms=5.0))


@dataclass(frozen=True)
class TelemetryConfig:
    """`[telemetry]`: an empty address turns its service off."""

    prometheus: str = "127.0.0.1:9464"
    tenants: int = 16
    otlp_endpoint: str = ""
    otlp_ca_file: str = ""
    service_name: str = "meridian"


@dataclass(frozen=True)
class AdminConfig:
    """`[admin]`: an empty `listen` turns the interface off."""

    listen: str = "127.0.0.1:9465"
    token_file: str = ""
    tls_cert_file: str = ""
    tls_key_file: str = ""
    audit_log: str = ""
    audit_log_max_mib: int = 16


@dataclass(frozen=True)
class ModelConfig:
    """`[model]`: the texts that start and end thinking and that begin a tool call, or lists of alternatives.

    `think_start` and `think_end` are both `"auto"` to take them from vLLM, and both empty for a model that does not
    think.

    The constructor fills in nothing for a `family`; `ModelConfig.of_family` does.
    """

    family: str = ""
    think_start: str | list[str] = "auto"
    think_end: str | list[str] = "auto"
    resumes: bool = True
    strips_reasoning: bool | Literal["auto"] = "auto"
    tool_call: str | list[str] = ""
    tool_call_ends_thinking: bool | Literal["auto"] = "auto"
    force_phrase: str = ""
    interrupt: str | list[str] = ""
    eos_guard: bool = False
    min_answer_tokens: int = 0
    stop_strings: Literal["everywhere", "answer"] = "everywhere"

    @classmethod
    def of_family(cls, name: str) -> ModelConfig:
        """The fields that a known model family supplies.

        Raises:
            ConfigError: there is no such family; names the known families.
        """
        return MeridianConfig.from_toml(f"[model]\nfamily = {json.dumps(name)}\n").model


@dataclass(frozen=True)
class MeridianConfig:
    """The effective configuration. Relative component paths are relative to `base_dir`.

    Example:
        >>> config = MeridianConfig.from_toml("[scheduler]\\nmax_defer_ms = 500")
        >>> config.scheduler.max_defer_ms
        500.0
        >>> MeridianConfig(scheduler=SchedulerConfig(max_defer_ms=500.0)) == config
        True
    """

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    entropy: EntropyConfig = field(default_factory=EntropyConfig)
    kv_memory: KvMemoryConfig = field(default_factory=KvMemoryConfig)
    disagg: DisaggConfig = field(default_factory=DisaggConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    admin: AdminConfig = field(default_factory=AdminConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    base_dir: str = "."

    @classmethod
    def from_toml(cls, text: str, base_dir: str = ".") -> MeridianConfig:
        """Parse and validate the text of a `meridian.toml`.

        Raises:
            ConfigError: names the dotted field, the value and what was expected.
        """
        return cls._from_json(_native.parse_config(text), base_dir)

    @classmethod
    def _from_json(cls, text: str, base_dir: str) -> MeridianConfig:
        tables = json.loads(text)
        if tables["entropy"]["rpdi_threshold"] is None:
            # JSON has no infinity.
            tables["entropy"]["rpdi_threshold"] = math.inf
        policy: dict[str, Any] = tables["policy"]
        for name in ("dispatch", "eviction", "budget"):
            policy[name] = SlotConfig(**policy[name])
        scheduler: dict[str, Any] = tables["scheduler"]
        scheduler["reasoning_effort"] = ReasoningEfforts._from_tables(scheduler["reasoning_effort"])
        return cls(
            scheduler=SchedulerConfig(**scheduler),
            entropy=EntropyConfig(**tables["entropy"]),
            kv_memory=KvMemoryConfig(**tables["kv_memory"]),
            disagg=DisaggConfig(**tables["disagg"]),
            policy=PolicyConfig(**policy),
            telemetry=TelemetryConfig(**tables["telemetry"]),
            admin=AdminConfig(**tables["admin"]),
            model=ModelConfig(**tables["model"]),
            base_dir=base_dir,
        )

    @classmethod
    def from_native(cls, text: str, base_dir: str) -> MeridianConfig:
        """The effective configuration of a native engine."""
        return cls._from_json(text, base_dir)

    def to_json(self) -> str:
        """The configuration as the native engine reads it.

        JSON has no non-finite numbers, so they become the texts `NaN`, `Infinity` and `-Infinity`. The engine refuses
        them and names the field, unless the field may be infinite.

        Raises:
            ConfigError: a field has a value that JSON cannot hold, or is nested too deeply.
        """
        names = [each.name for each in dataclasses.fields(self) if each.name != "base_dir"]
        fields = {name: _plain(name, getattr(self, name)) for name in names}
        try:
            return json.dumps(fields, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"configuration: {error}") from error


# A value that contains itself is nested without end.
_MOST_NESTED = 64


def _plain(path: str, value: object, depth: int = 0) -> Any:
    """The value in the types of JSON; errors name it by `path`."""
    if depth > _MOST_NESTED:
        short = path if len(path) <= 80 else f"{path[:80]}..."
        raise ConfigError(f"{short}: nested more than {_MOST_NESTED} deep, expected less")
    if isinstance(value, float) and not math.isfinite(value):
        if any(path.startswith(f"policy.{slot}.config.") for slot in ("dispatch", "eviction", "budget")):
            raise ConfigError(f"{path}: {value}: must be finite")
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, str | int | float):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in dataclasses.fields(value)]
        return {name: _plain(f"{path}.{name}", getattr(value, name), depth + 1) for name in names}
    if isinstance(value, dict):
        items = cast("dict[object, object]", value).items()
        return {key: _plain(f"{path}.{key}", inner, depth + 1) for key, inner in items}
    if isinstance(value, list | tuple):
        items = enumerate(cast("list[object]", value))
        return [_plain(f"{path}[{index}]", inner, depth + 1) for index, inner in items]
    shown = reprlib.repr(value)
    raise ConfigError(f"{path}: {shown}: must be a string, a number, a boolean, a list or a dict")


def load_config(path: str | os.PathLike[str] | None = None) -> MeridianConfig:
    """Load `path`, else `$MERIDIAN_CONFIG`, `./meridian.toml`, `~/.config/meridian/meridian.toml`, else the defaults.

    The log names each valid field that does not do what it seems to.

    Raises:
        ConfigError: the file cannot be read or is not valid; names the file and the field.
    """
    text, base_dir, file, warnings = _native.load_config(None if path is None else os.fspath(path))
    for warning in warnings if file is not None else []:
        logger.info("meridian: %s: %s", file, warning)
    return MeridianConfig._from_json(text, base_dir)
