"""meridian.toml from Python: lookup order, defaults, and how a mistake is named."""

from pathlib import Path

import meridian
import pytest


def test_python_defaults_are_the_native_ones() -> None:
    assert meridian.MeridianConfig.from_toml("") == meridian.MeridianConfig()


def test_lookup_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MERIDIAN_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)
    assert meridian.load_config() == meridian.MeridianConfig()

    def write(path: Path, budget: int) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"[scheduler]\noutput_tpot_budget_ms = {budget}\n")
        return path

    write(tmp_path / "home" / ".config" / "meridian" / "meridian.toml", 11)
    assert meridian.load_config().scheduler.output_tpot_budget_ms == 11
    write(tmp_path / "meridian.toml", 12)
    assert meridian.load_config().scheduler.output_tpot_budget_ms == 12
    monkeypatch.setenv("MERIDIAN_CONFIG", str(write(tmp_path / "elsewhere" / "m.toml", 13)))
    config = meridian.load_config()
    assert config.scheduler.output_tpot_budget_ms == 13
    assert config.base_dir == str(tmp_path / "elsewhere")
    assert meridian.load_config(write(tmp_path / "named.toml", 14)).scheduler.output_tpot_budget_ms == 14


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[scheduler]\nmax_defer_ms = 0", "scheduler.max_defer_ms: 0: must be above 0"),
        ("[scheduler]\nmax_defer = 1", "unknown field, did you mean `scheduler.max_defer_ms`?"),
        ("[scheduler", "line 1, column"),
        ("[policy.dispatch]\nmemory_mib = 'lots'", "policy.dispatch.memory_mib: invalid type"),
    ],
)
def test_mistakes_name_file_and_field(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "meridian.toml"
    path.write_text(text)
    with pytest.raises(meridian.ConfigError) as refused:
        meridian.load_config(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(meridian.ConfigError, match=r"absent\.toml: cannot be read"):
        meridian.load_config(tmp_path / "absent.toml")
