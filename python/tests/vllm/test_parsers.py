"""Every reasoning parser of the installed vLLM: Meridian follows its thinking, or warns once and names it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from meridian import ModelConfig
from meridian.vllm.bench.parsers import (
    byte_tokenizer,
    configured,
    mistral_tokenizer,
    parsers,
    report,
    survey,
    tokenizer_for,
)
from meridian.vllm.markers import resolve, resolve_model

# What a custom parser may do wrong.
PLUGIN = """
from vllm.reasoning import ReasoningParser, ReasoningParserManager

@ReasoningParserManager.register_module(["of_a_plugin"])
class Own(ReasoningParser):
    reasoning_start_str, reasoning_end_str = "<own>", "</own>"
    def is_reasoning_end(self, input_ids): raise RuntimeError
    extract_content_ids = extract_reasoning = extract_reasoning_streaming = is_reasoning_end

@ReasoningParserManager.register_module(["silent"])
class Silent(Own):
    reasoning_start_str = reasoning_end_str = None

@ReasoningParserManager.register_module(["long"])
class Long(Own):
    reasoning_start_str = "<" * 300

@ReasoningParserManager.register_module(["broken"])
class Broken(Own):
    def __init__(self, *args, **options):
        raise RuntimeError("a reason\\nof two lines")
"""


@pytest.mark.parametrize("parser", parsers())
def test_a_parser_with_its_own_tokens(
    parser: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tokenizer_for(parser)
    config = configured(parser)
    capfd.readouterr()
    with caplog.at_level(logging.INFO, logger="vllm.meridian"):
        markers = resolve(ModelConfig(), tokenizer, config)
    assert "".join(capfd.readouterr()) == ""
    (line,) = [record for record in caplog.records if record.name == "vllm.meridian"]
    assert (line.levelno, parser in line.getMessage()) == (logging.INFO, True)
    row = survey(parser, tokenizer)
    assert row.state in ("followed", "does not think"), row
    # What the scheduler resolved, a sampler resolves in the same way.
    again = resolve(markers.model, tokenizer, config, quiet=True)
    assert (again, again.model) == (markers, markers.model)
    assert resolve_model(ModelConfig(), tokenizer, config) == markers.model
    for side in (markers.starts, markers.ends, markers.calls):
        assert len(side) <= 8
    assert not markers.boundaries & {ids[0] for ids in (*markers.starts, *markers.ends) if len(ids) == 1}


@pytest.mark.parametrize("parser", parsers())
def test_a_parser_without_its_tokens(parser: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing raises: the markers are plain text, or a line says why thinking cannot be followed."""
    with caplog.at_level(logging.INFO, logger="vllm.meridian"):
        markers = resolve(ModelConfig(), byte_tokenizer([]), configured(parser))
    (line,) = [record for record in caplog.records if record.name == "vllm.meridian"]
    assert (line.levelno == logging.WARNING) is bool(markers.problem)
    assert f"reasoning parser {parser}" in line.getMessage()
    assert "\n" not in line.getMessage()
    assert not (markers.problem and markers.starts)


def test_the_parsers_that_pass_thinking_through() -> None:
    """`deepseek_v3` thinks where a request's template options say so, if the tokenizer has the tokens."""
    with_tokens = resolve(ModelConfig(), byte_tokenizer(["<think>", "</think>"]), configured("deepseek_v3"))
    assert (with_tokens.model.think_start, with_tokens.problem) == ("<think>", "")
    without = resolve(ModelConfig(), byte_tokenizer([]), configured("deepseek_v3"))
    assert (without.starts, without.model.think_start, without.problem) == ([], "", "")


def test_a_model_of_hunyuan_with_a_suffix_in_its_markers() -> None:
    tokenizer = byte_tokenizer([f"<{name}:6124c78e>" for name in ("think", "/think", "tool_calls", "/tool_calls")])
    vocabulary = tokenizer.get_vocab()
    if "hy_v4" not in parsers():
        pytest.skip("this vLLM has no hy_v4")
    markers = resolve(ModelConfig(), tokenizer, configured("hy_v4"))
    assert markers.starts == [[vocabulary["<think:6124c78e>"]]]
    assert markers.calls == [([vocabulary["<tool_calls:6124c78e>"]], [vocabulary["</tool_calls:6124c78e>"]])]


@pytest.fixture
def plugin(tmp_path: Any) -> Any:
    """The configuration of a parser in a file, and that the names are gone afterwards."""
    from vllm.reasoning import ReasoningParserManager as Manager

    path = tmp_path / f"{tmp_path.name.replace('-', '_')}.py"
    path.write_text(PLUGIN)

    def config(parser: str) -> Any:
        made = configured(parser)
        made.structured_outputs_config.reasoning_parser_plugin = str(path)
        return made

    yield config
    lazy: dict[str, Any] = getattr(Manager, "lazy_parsers", {})
    for name in ("of_a_plugin", "silent", "long", "broken"):
        lazy.pop(name, None)
        Manager.reasoning_parsers.pop(name, None)


def test_a_parser_of_a_plugin(plugin: Any, caplog: pytest.LogCaptureFixture) -> None:
    markers = resolve(ModelConfig(), byte_tokenizer(["<own>", "</own>"]), plugin("of_a_plugin"))
    assert (markers.model.think_start, markers.model.think_end) == ("<own>", "</own>")
    assert (markers.source, markers.problem) == ("reasoning parser of_a_plugin", "")
    # The model of a parser that names none may have the usual ones. That is a guess.
    silent = resolve(ModelConfig(), byte_tokenizer(["<think>", "</think>"]), plugin("silent"))
    assert (silent.model.think_start, silent.source, silent.problem) == ("<think>", "default", "")
    (line,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "reasoning parser silent: names no texts that start and end thinking" in line.getMessage()


@pytest.mark.parametrize(
    ("parser", "why"),
    [
        ("silent", "names no texts that start and end thinking"),
        ("long", "a marker of 300 bytes, expected at most 256"),
        ("broken", "RuntimeError: a reason of two lines"),
        ("unknown", "KeyError: "),
    ],
)
def test_a_parser_that_cannot_be_followed(plugin: Any, parser: str, why: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="vllm.meridian"):
        markers = resolve(ModelConfig(), byte_tokenizer([]), plugin(parser))
    (line,) = [record for record in caplog.records if record.name == "vllm.meridian"]
    expected = f"meridian: thinking cannot be followed: reasoning parser {parser}: {why}"
    assert (line.levelno, line.getMessage()[: len(expected)]) == (logging.WARNING, expected)
    assert "\n" not in line.getMessage()
    assert (markers.starts, markers.ends, markers.model.think_start) == ([], [], "")


def test_the_report_counts_every_parser() -> None:
    found = report()
    wrong = [row for row in found["rows"] if row["state"] == "wrong"]
    assert (found["parsers"], found["right"], wrong) == (len(parsers()), len(parsers()), [])
    assert mistral_tokenizer() is not None
