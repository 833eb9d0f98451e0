"""The configuration, `meridian.toml`.

The dataclasses are written from the native tables; docs/src/configuration.md describes each field. Values are checked
where text is parsed and where an engine is made, not here.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import reprlib
from dataclasses import dataclass, field
from typing import Any, cast

from meridian import _native, _tables
from meridian._native import ConfigError

# Below vLLM's own logger, whose handlers and level it shares.
logger = logging.getLogger("vllm.meridian")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(_tables.ModelConfig):
    """`[model]`: the texts that start and end thinking and that begin a tool call, or lists of alternatives.

    `think_start` and `think_end` are both `"auto"` to take them from vLLM, and both empty for a model that does not
    think.

    The constructor fills in nothing for a `family`; `ModelConfig.of_family` does.
    """

    @classmethod
    def of_family(cls, name: str) -> ModelConfig:
        """The fields that a known model family supplies.

        Raises:
            ConfigError: there is no such family; names the known families.
        """
        return MeridianConfig.from_toml(f"[model]\nfamily = {json.dumps(name)}\n").model


@dataclass(frozen=True, kw_only=True)
class MeridianConfig(_tables.Tables):
    """The effective configuration. Relative component paths are relative to `base_dir`.

    An engine follows the changes of `config_file`, the file that the configuration was read from.

    Example:
        >>> config = MeridianConfig.from_toml("[scheduler]\\nmax_defer_ms = 500")
        >>> config.scheduler.max_defer_ms
        500.0
        >>> MeridianConfig(scheduler=SchedulerConfig(max_defer_ms=500.0)) == config
        True
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    base_dir: str = "."
    config_file: str | None = field(default=None, compare=False)

    @classmethod
    def from_toml(cls, text: str, base_dir: str = ".") -> MeridianConfig:
        """Parse and validate the text of a `meridian.toml`.

        Raises:
            ConfigError: names the dotted field, the value and what was expected.
        """
        return cls._from_json(_native.parse_config(text), base_dir)

    @classmethod
    def _from_json(cls, text: str, base_dir: str) -> MeridianConfig:
        return dataclasses.replace(_filled(cls(), json.loads(text)), base_dir=base_dir)

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
        names = [each.name for each in dataclasses.fields(self) if each.name not in ("base_dir", "config_file")]
        fields = {name: _plain(name, getattr(self, name)) for name in names}
        try:
            return json.dumps(fields, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"configuration: {error}") from error


def _filled(default: Any, table: dict[str, Any]) -> Any:
    """A copy of a table's dataclass with the values of `table`. A `null` is infinite: JSON has no such number."""
    values = {}
    for name, value in table.items():
        inner = getattr(default, name)
        values[name] = (
            _filled(inner, value) if dataclasses.is_dataclass(inner) else math.inf if value is None else value
        )
    return dataclasses.replace(default, **values)


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
    return dataclasses.replace(MeridianConfig._from_json(text, base_dir), config_file=file)
