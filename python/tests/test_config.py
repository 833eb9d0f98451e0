"""meridian.toml from Python: lookup order, defaults, and how a mistake is named."""

import dataclasses
import json
import logging
import math
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import meridian
import pytest
from meridian import _native


def test_python_defaults_are_the_native_ones() -> None:
    assert meridian.MeridianConfig.from_toml("") == meridian.MeridianConfig()


def names(table: Any) -> dict[str, Any]:
    """The fields of a dataclass, tables within tables."""
    inner = {field.name: getattr(table, field.name) for field in fields(table)}
    return {name: names(value) if is_dataclass(value) else None for name, value in inner.items()}


def test_python_fields_are_the_native_ones() -> None:
    def native(table: dict[str, Any]) -> dict[str, Any]:
        return {
            name: native(value) if isinstance(value, dict) and name not in ("config", "service_levels") else None
            for name, value in table.items()
        }

    ours = names(meridian.MeridianConfig())
    del ours["base_dir"], ours["config_file"]
    assert ours == native(json.loads(_native.parse_config("")))


def test_every_table_comes_through() -> None:
    text = """
        [scheduler]
        max_think_tokens = 1000
        [entropy]
        eat_max_bits = 1.0
        rpdi_threshold = 3.0
        [kv_memory]
        evict_dead_thinking = false
        growth_blocks = 2
        [policy]
        trusted_keys = ["RWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3"]
        [policy.budget]
        mode = "shadow"
        [telemetry]
        prometheus = ""
        [admin]
        listen = "unix:/run/meridian.sock"
        [model]
        think_start = ["<a>", "<b>"]
        think_end = "</a>"
    """
    config = meridian.MeridianConfig.from_toml(text)
    assert config.scheduler.max_think_tokens == 1000
    assert (config.entropy.eat_max_bits, config.entropy.rpdi_threshold) == (1.0, 3.0)
    assert config.kv_memory == meridian.KvMemoryConfig(evict_dead_thinking=False, growth_blocks=2.0)
    assert config.policy.budget == meridian.SlotConfig("native:eat-rpdi", deadline_ms=5.0, mode="shadow")
    component = meridian.MeridianConfig.from_toml('[policy.budget]\nsource = "p.wasm"\nconfig = { a = [1] }')
    assert component.policy.budget == meridian.SlotConfig("p.wasm", config={"a": [1]}, deadline_ms=5.0)
    assert config.model.think_start == ["<a>", "<b>"]
    again = meridian.PolicyEngine(config)
    assert again.stats()["policy"] == "balanced"
    assert json.loads(config.to_json()) == json.loads(_native.parse_config(text))


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"max_defer_ms": "x"}, 'scheduler.max_defer_ms: invalid type: string "x", expected f32'),
        ({"max_defer_ms": math.nan}, "scheduler.max_defer_ms: NaN: must be above 0"),
        ({"max_defer_ms": math.inf}, "scheduler.max_defer_ms: inf: must be finite in 32 bits"),
        ({"max_defer_ms": None}, "scheduler.max_defer_ms: invalid type: null, expected a value"),
        ({"max_think_tokens": 2**64 - 1}, "scheduler.max_think_tokens: 18446744073709551615: must fit"),
    ],
)
def test_mistakes_made_in_python_name_the_field(table: dict[str, Any], expected: str) -> None:
    config = meridian.MeridianConfig(scheduler=meridian.SchedulerConfig(**table))
    with pytest.raises(meridian.ConfigError) as refused:
        meridian.PolicyEngine(config)
    assert str(refused.value).startswith(expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"x": math.nan}, "policy.dispatch.config.x: nan: must be finite"),
        ({"x": [1, {"y": -math.inf}]}, "policy.dispatch.config.x[1].y: -inf: must be finite"),
        ({"x": {1}}, "policy.dispatch.config.x: {1}: must be a string, a number"),
        ({"x": None}, "policy.dispatch.config.x: invalid type: null"),
    ],
)
def test_options_that_json_cannot_hold_are_refused(options: dict[str, Any], expected: str) -> None:
    slot = meridian.SlotConfig("policy.wasm", config=options)
    with pytest.raises(meridian.ConfigError) as refused:
        meridian.PolicyEngine(meridian.MeridianConfig(policy=meridian.PolicyConfig(dispatch=slot)))
    assert str(refused.value).startswith(expected)


def _cyclic() -> dict[str, Any]:
    options: dict[str, Any] = {}
    options["again"] = [options]
    return options


def _deep() -> list[Any]:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    return nested


@pytest.mark.parametrize("options", [_cyclic(), {"x": _deep()}])
def test_what_contains_itself_or_is_nested_too_deep_is_refused_by_its_field(options: dict[str, Any]) -> None:
    slot = meridian.SlotConfig("policy.wasm", config=options)
    for name in ("dispatch", "eviction", "budget"):
        config = meridian.MeridianConfig(policy=dataclasses.replace(meridian.PolicyConfig(), **{name: slot}))
        with pytest.raises(
            meridian.ConfigError, match=rf"^policy\.{name}\.config\..{{,100}}: nested more than 64 deep"
        ):
            config.to_json()
    model = meridian.ModelConfig(think_start=_deep())
    with pytest.raises(meridian.ConfigError, match=r"^model\.think_start\[0\].*: nested more than 64 deep"):
        meridian.MeridianConfig(model=model).to_json()


def test_keys_and_numbers_that_json_cannot_hold_are_refused() -> None:
    for options in ({(1, 2): 3}, {"x": 10**5000}):
        slot = meridian.SlotConfig("policy.wasm", config=options)  # pyright: ignore[reportArgumentType]
        with pytest.raises(meridian.ConfigError, match=r"^configuration: "):
            meridian.MeridianConfig(policy=meridian.PolicyConfig(dispatch=slot)).to_json()


def test_options_in_a_file_have_no_dates_and_no_nan() -> None:
    for value, expected in (("nan", "NaN: must be finite"), ("1979-05-27", "1979-05-27: must not be a date")):
        with pytest.raises(meridian.ConfigError) as refused:
            meridian.MeridianConfig.from_toml(f"[policy.dispatch.config]\nx = {value}")
        assert str(refused.value).startswith(f"policy.dispatch.config.x: {expected}")


def test_a_family_supplies_the_markers() -> None:
    model = meridian.ModelConfig.of_family("seed-oss")
    assert meridian.ModelConfig.of_family("qwen3").strips_reasoning is True
    assert (meridian.ModelConfig.of_family("qwen3").tool_call, model.tool_call) == ("<tool_call>", "")
    assert model.strips_reasoning == meridian.ModelConfig().strips_reasoning == "auto"
    assert (model.family, model.think_start, model.think_end) == ("seed-oss", "<seed:think>", "</seed:think>")
    with pytest.raises(
        meridian.ConfigError, match=r'model\.family: "qwen4": unknown model family, did you mean "qwen3"'
    ):
        meridian.ModelConfig.of_family("qwen4")


def test_what_cannot_do_what_it_seems_to_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "meridian.toml"
    path.write_text("[entropy]\nenabled = true\n")
    with caplog.at_level(logging.INFO, logger="vllm.meridian"):
        meridian.load_config(path)
        assert caplog.records == [], "nothing of it asks for probes"
        path.write_text("[entropy]\neat_variance_threshold = 0.1\n")
        meridian.load_config(path)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f'meridian: {path}: entropy.probe_suffix: "": nothing is probed without it')


def test_guarded_thinking_sets_what_the_file_does_not() -> None:
    stock, guarded = (
        meridian.MeridianConfig.from_toml(f"[scheduler]\nthinking = '{thinking}'\n")
        for thinking in ("stock", "guarded")
    )

    def guards(config: meridian.MeridianConfig) -> tuple[object, ...]:
        scheduler, model = config.scheduler, config.model
        return (
            scheduler.max_think_tokens,
            scheduler.end_loops,
            scheduler.answer_reserve_tokens,
            config.entropy.rpdi_threshold,
            model.eos_guard,
            model.min_answer_tokens,
        )

    assert stock == meridian.MeridianConfig()
    assert guards(stock) == (16777216, False, 0, math.inf, False, 0)
    assert guards(guarded) == (32768, True, 32, 2.0, True, 1)
    own = "[scheduler]\nthinking = 'guarded'\nmax_think_tokens = 9\nmin_think_tokens = 0\n[model]\neos_guard = false\n"
    assert guards(meridian.MeridianConfig.from_toml(own)) == (9, True, 32, 2.0, False, 1)
    # Its constructor fills in nothing.
    made = meridian.MeridianConfig(scheduler=meridian.SchedulerConfig(thinking="guarded"))
    assert guards(made) == guards(stock)


def test_fields_of_a_later_version_are_refused_as_such() -> None:
    with pytest.raises(meridian.ConfigError, match=r": not in this version, expected no such field$"):
        meridian.MeridianConfig.from_toml("[kv_memory]\ncapacity_bytes = 4096")


def test_disaggregation_is_refused_where_vllm_owns_the_blocks() -> None:
    config = meridian.MeridianConfig.from_toml("[disagg]\nenabled = true\nfabric = 'tcp'")
    assert (config.disagg.fabric, config.disagg.offload_threshold_blocks) == ("tcp", 4)
    with pytest.raises(meridian.ConfigError, match=r"^disagg.enabled: true: .*, expected false$"):
        meridian.PolicyEngine(config)


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
    assert config.config_file == str(tmp_path / "elsewhere" / "m.toml")
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


def test_unfit_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(meridian.ConfigError, match="is a folder, expected a TOML file"):
        meridian.load_config(tmp_path)
    path = tmp_path / "meridian.toml"
    path.write_bytes(b"\xff")
    with pytest.raises(meridian.ConfigError, match=r"meridian\.toml: is not UTF-8 text"):
        meridian.load_config(str(path))
