"""The configuration, `meridian.toml`."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meridian._native import ConfigError, parse_config


@dataclass(frozen=True)
class SchedulerConfig:
    """`[scheduler]`: times in milliseconds."""

    output_tpot_budget_ms: float = 20.0
    think_tpot_budget_ms: float = 80.0
    think_batch_multiplier: float = 2.5
    max_defer_ms: float = 2000.0


@dataclass(frozen=True)
class DispatchConfig:
    """`[policy.dispatch]`: `source` is `native:NAME` or the path of a component."""

    source: str = "native:output-first"
    config: dict[str, Any] = field(default_factory=dict)
    deadline_ms: float = 2.0
    memory_mib: int = 64


@dataclass(frozen=True)
class PolicyConfig:
    """`[policy]`."""

    cache_dir: str = ""
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)


@dataclass(frozen=True)
class ModelConfig:
    """`[model]`: the texts that start and end thinking; both empty for a model that does not think."""

    think_start: str = "<think>"
    think_end: str = "</think>"


@dataclass(frozen=True)
class MeridianConfig:
    """The effective configuration. `base_dir` is what a relative component path is relative to."""

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    base_dir: str = "."

    @classmethod
    def from_toml(cls, text: str, base_dir: str = ".") -> MeridianConfig:
        """Parse and validate the text of a `meridian.toml`.

        Raises:
            ConfigError: names the dotted field, the value and what was expected.
        """
        parsed = json.loads(parse_config(text))
        policy = parsed["policy"]
        return cls(
            scheduler=SchedulerConfig(**parsed["scheduler"]),
            policy=PolicyConfig(cache_dir=policy["cache_dir"], dispatch=DispatchConfig(**policy["dispatch"])),
            model=ModelConfig(**parsed["model"]),
            base_dir=base_dir,
        )

    def to_json(self) -> str:
        """The configuration as the native engine reads it."""
        fields = asdict(self)
        del fields["base_dir"]
        return json.dumps(fields)


def load_config(path: str | os.PathLike[str] | None = None) -> MeridianConfig:
    """Load `path`, else `$MERIDIAN_CONFIG`, `./meridian.toml`, `~/.config/meridian/meridian.toml`, else the defaults.

    Raises:
        ConfigError: the file cannot be read or is not valid; names the file and the field.
    """
    named = path if path is not None else os.environ.get("MERIDIAN_CONFIG") or None
    if named is not None:
        return _load(Path(named))
    for candidate in (Path("meridian.toml"), Path.home() / ".config" / "meridian" / "meridian.toml"):
        if candidate.is_file():
            return _load(candidate)
    return MeridianConfig()


def _load(path: Path) -> MeridianConfig:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    try:
        return MeridianConfig.from_toml(text, base_dir=str(path.resolve().parent))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
