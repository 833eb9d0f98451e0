"""Markers resolved with real tokenizers, as the scheduler does it when it starts."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from meridian import ConfigError, ModelConfig
from meridian.vllm.bench.parsers import byte_tokenizer, configured, mistral_tokenizer
from meridian.vllm.markers import TokenMarkers, around_end, last_turn, resolve, resolve_model
from tokenizers import Tokenizer as HfTokenizer


class Tokenizer:
    """A tokenizer.json with the call that vLLM's tokenizers have."""

    def __init__(self, folder: Path) -> None:
        self.inner = HfTokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self.inner.encode(text, add_special_tokens=add_special_tokens).ids


@pytest.fixture(scope="module")
def qwen3(tokenizers: Path) -> Tokenizer:
    return Tokenizer(tokenizers / "qwen3")


def test_a_family_that_is_the_models(qwen3: Tokenizer) -> None:
    markers = resolve(ModelConfig.of_family("qwen3"), qwen3)
    assert (markers.starts, markers.ends) == ([[151667]], [[151668]])
    assert 198 in markers.padding
    assert markers.tool_calls == [[151657]]


def test_a_family_that_is_not_the_models_is_refused_with_both_lists_of_ids(qwen3: Tokenizer) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(ModelConfig.of_family("deepseek-v4"), qwen3)
    assert str(refused.value) == (
        'model.family: "deepseek-v4": "<think>": the model\'s tokenizer gives [151667], expected [128821]: '
        "the model is not of this family"
    )


def test_expected_ids_belong_to_the_familys_own_texts(qwen3: Tokenizer) -> None:
    model = ModelConfig(family="deepseek-v4", think_start="<t>", think_end=["</t>", "<end>"])
    markers = resolve(model, qwen3)
    assert [qwen3.inner.decode(ids) for ids in (*markers.starts[:1], *markers.ends[:2])] == ["<t>", "</t>", "<end>"]
    assert all(len(ids) > 1 for ids in markers.starts + markers.ends)


def test_alternatives_of_several_tokens(qwen3: Tokenizer) -> None:
    markers = resolve(ModelConfig.of_family("granite"), qwen3)
    texts = [[qwen3.inner.decode(ids) for ids in side] for side in (markers.starts, markers.ends)]
    assert texts[0][:2] == ["Here is my thought process:", "Here's my thought process:"]
    assert texts[1][:2] == ["Here is my response:", "Here's my response:"]
    # The tokenizer joins the colon with line breaks behind it, and the first word with a space before it.
    assert {"Here is my response:\n\n", " Here is my response:"} <= set(texts[1])
    assert all(len(side) <= 8 for side in texts)
    written = qwen3.encode("So it is 4. Here is my response:\n\nFour.", add_special_tokens=False)
    assert any(ids == written[at : at + len(ids)] for ids in markers.ends for at in range(len(written)))


def test_a_tool_call_of_the_configuration(qwen3: Tokenizer) -> None:
    markers = resolve(ModelConfig(tool_call=["<tool_call>", "[TOOL_CALLS]"]), qwen3)
    assert [markers.tool_calls[0], qwen3.inner.decode(markers.tool_calls[1])] == [[151657], "[TOOL_CALLS]"]
    assert resolve(ModelConfig(tool_call="<tool_call>"), qwen3).tool_calls == [[151657]]
    assert resolve(ModelConfig.of_family("granite"), qwen3).tool_calls == []


def test_a_model_that_does_not_think(qwen3: Tokenizer) -> None:
    assert resolve(ModelConfig(think_start="", think_end=""), qwen3) == TokenMarkers()
    assert resolve(ModelConfig(think_start=[], think_end=[], tool_call="<tool_call>"), qwen3) == TokenMarkers()


def test_a_marker_without_tokens_is_refused() -> None:
    class Deaf:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return []

    with pytest.raises(ConfigError, match=r'model: "<think>": the model\'s tokenizer gives no token'):
        resolve(ModelConfig(think_start="<think>", think_end="</think>"), Deaf())
    assert resolve(ModelConfig(), Deaf()).problem.startswith("no reasoning parser")


def reasoning_config(start: str, end: str, parser: str = "", ids: list[int] | None = None) -> Any:
    """vLLM's `--reasoning-config`, as `VllmConfig` holds it."""
    config = configured(parser)
    config.reasoning_config = SimpleNamespace(
        reasoning_parser=parser, reasoning_start_str=start, reasoning_end_str=end, reasoning_end_token_ids=ids
    )
    return config


HARMONY = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"]
FINAL = "<|start|>assistant<|channel|>final<|message|>"


def test_the_operator_comes_first() -> None:
    tokenizer = byte_tokenizer(["<think>", "</think>", "<t>", "</t>"])
    own = ModelConfig(think_start="<t>", think_end="</t>")
    config = reasoning_config("<think>", "</think>", "qwen3")
    assert resolve_model(own, tokenizer, config).think_end == "</t>"
    assert resolve(own, tokenizer, config).source == "meridian.toml"
    family = ModelConfig(family="seed-oss")
    assert resolve_model(family, tokenizer, config).think_start == "<seed:think>"
    assert resolve(family, tokenizer, config).source == "model.family seed-oss"


def test_a_reasoning_config_with_a_phrase_before_the_parsers_end() -> None:
    tokenizer = byte_tokenizer(["<think>", "</think>"])
    phrase = "I must answer now.</think>"
    for parser in ("", "qwen3"):
        config = reasoning_config("<think>", phrase, parser)
        model = resolve_model(ModelConfig(), tokenizer, config)
        assert (model.think_start, model.think_end, model.force_phrase) == ("<think>", "</think>", phrase)
        markers = resolve(ModelConfig(), tokenizer, config)
        assert (markers.source, tokenizer.decode(markers.forced)) == ("--reasoning-config", phrase)
    own = resolve_model(ModelConfig(force_phrase="Stop.</think>"), tokenizer, reasoning_config("<think>", phrase))
    assert own.force_phrase == "Stop.</think>"


def test_the_tokens_that_vllm_forces_are_forced() -> None:
    """Where a tokenizer joins the phrase with the marker, the ids are vLLM's and not those of two texts."""
    tokenizer = byte_tokenizer(["<think>", "</think>", "now."])
    (end,) = tokenizer.encode("</think>")
    phrase = "now.</think>"
    for ids, expected in (
        ([1, 2, end], [1, 2, end]),
        ([1, 2], tokenizer.encode(phrase)),
        (None, tokenizer.encode(phrase)),
    ):
        assert resolve(ModelConfig(), tokenizer, reasoning_config("<think>", phrase, "qwen3", ids)).forced == expected


def test_a_reasoning_config_with_markers_of_its_own() -> None:
    tokenizer = byte_tokenizer(["<think>", "</think>"])
    model = resolve_model(ModelConfig(), tokenizer, reasoning_config("[[T]]", "[[/T]]"))
    assert (model.think_start, model.think_end, model.force_phrase) == ("[[T]]", "[[/T]]", "")
    model = resolve_model(ModelConfig(), tokenizer, reasoning_config("", "enough", "qwen3"))
    assert (model.think_start, model.think_end, model.force_phrase) == ("<think>", ["</think>", "enough"], "enough")
    # vLLM ignores one text alone.
    assert resolve(ModelConfig(), tokenizer, reasoning_config("[[T]]", "")).source == "default"


def test_no_parser_and_no_tokens(caplog: pytest.LogCaptureFixture) -> None:
    """A client's budget can still end thinking that the model writes as text; the operator sees why it may not."""
    tokenizer = byte_tokenizer([])
    with caplog.at_level(logging.INFO, logger="vllm.meridian"):
        markers = resolve(ModelConfig(), tokenizer)
        assert resolve(ModelConfig(), tokenizer, quiet=True) == markers
    assert [tokenizer.decode(ids) for ids in (markers.starts[0], markers.ends[0])] == ["<think>", "</think>"]
    (line,) = caplog.records
    assert line.levelno == logging.WARNING
    assert line.getMessage().startswith("meridian: thinking cannot be followed: no reasoning parser, and the tokenizer")


def test_no_parser_and_the_markers_of_two_families(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="vllm.meridian"):
        markers = resolve(ModelConfig(), byte_tokenizer(["<think>", "</think>", *HARMONY]))
        resolve(ModelConfig(), byte_tokenizer(["<think>", "</think>"]))
    assert (len(markers.starts), markers.problem) == (1, "")
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "the tokenizer also has the markers of gpt-oss" in caplog.records[0].getMessage()


def test_real_tokenizers_leave_no_doubt(tokenizers: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="vllm.meridian"):
        for name in ("qwen3", "deepseek-v4"):
            assert resolve(ModelConfig(), Tokenizer(tokenizers / name)).source == "default"
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]


def test_no_tokenizer(caplog: pytest.LogCaptureFixture) -> None:
    for model in (ModelConfig(), ModelConfig.of_family("qwen3")):
        assert resolve(model, None).problem == "the engine has no tokenizer, so all is output"
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert resolve_model(ModelConfig(force_phrase="x"), None).think_end == ""
    assert resolve(ModelConfig(think_start="", think_end=""), None).problem == ""


def test_markers_of_one_family_bring_its_other_facts() -> None:
    """Without its name, so without the check of ids."""
    tokenizer = byte_tokenizer(HARMONY)
    model = ModelConfig(think_start="<|channel|>analysis<|message|>", think_end=FINAL)
    markers = resolve(model, tokenizer)
    assert markers.model.think_end == ["<|end|>", FINAL]
    assert tokenizer.decode(markers.forced) == f"<|end|>{FINAL}"
    pairs = [tuple(map(tokenizer.decode, pair)) for pair in markers.calls]
    assert pairs == [("<|channel|>commentary", "<|call|>"), ("<|channel|>commentary", "<|end|>")]
    again = resolve(markers.model, tokenizer)
    assert (again, again.model) == (markers, markers.model)
    own = ModelConfig(
        think_start="<|channel|>analysis<|message|>", think_end=FINAL, force_phrase=FINAL, tool_call="<x>"
    )
    assert (resolve_model(own, tokenizer).force_phrase, resolve_model(own, tokenizer).tool_call) == (FINAL, "<x>")
    assert resolve_model(ModelConfig(think_start="<think>", think_end="</think>"), tokenizer).tool_call == ""


def test_what_ends_a_tool_call() -> None:
    tokenizer = byte_tokenizer(["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|tool_call>"])

    def calls(model: ModelConfig, parser: str = "") -> list[tuple[str, str]]:
        found = resolve(model, tokenizer, configured(parser)).calls
        return [(tokenizer.decode(begin), tokenizer.decode(end)) for begin, end in found]

    assert calls(ModelConfig(tool_call=["<seed:tool_call>", "[calls]"])) == [
        ("<seed:tool_call>", "</seed:tool_call>"),
        ("[calls]", ""),
    ]
    for begin, end in (
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ("<|tool_call>", "<tool_call|>"),
        ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"),
        ("<\uff5cDSML\uff5ctool_calls>", "</\uff5cDSML\uff5ctool_calls>"),
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        ("<|START_ACTION|>", "<|END_ACTION|>"),
        ("[TOOL_CALLS]", ""),
    ):
        assert calls(ModelConfig(tool_call=begin)) == [(begin, end)]
    assert calls(ModelConfig(), "qwen3") == [("<tool_call>", "</tool_call>")]
    # Without a word from anyone: what the tokenizer has a token for.
    assert set(calls(ModelConfig())) == {
        ("<tool_call>", "</tool_call>"),
        ("<|tool_call>", "<tool_call|>"),
        ("[TOOL_CALLS]", ""),
    }
    assert resolve(ModelConfig(), tokenizer, configured("qwen3")).tool_calls == []


def test_whether_a_tool_call_ends_thinking() -> None:
    tokenizer = byte_tokenizer(["<think>", "</think>", "<tool_call>"])
    expected = {"qwen3": True, "kimi_k2": True, "deepseek_r1": False, "": False}
    for parser, ends in expected.items():
        config = configured(parser)
        assert resolve(ModelConfig(), tokenizer, config).call_ends_thinking is ends
        assert resolve_model(ModelConfig(), tokenizer, config).tool_call_ends_thinking is ends
        assert resolve(ModelConfig(tool_call_ends_thinking=not ends), tokenizer, config).call_ends_thinking is not ends


def test_a_token_that_the_tokenizer_encodes_as_text() -> None:
    """Mistral's tokenizers give the marker of a user's text other tokens than the model writes."""
    tokenizer = mistral_tokenizer()
    if tokenizer is None:
        pytest.fail("mistral_common is missing: vLLM's lock file has it")
    vocabulary = tokenizer.get_vocab()
    assert len(tokenizer.encode("[THINK]", add_special_tokens=False)) > 1
    markers = resolve(ModelConfig(), tokenizer, configured("mistral"))
    assert (markers.starts, markers.ends) == ([[vocabulary["[THINK]"]]], [[vocabulary["[/THINK]"]]])
    assert markers.calls == [([vocabulary["[TOOL_CALLS]"]], [])]
    assert vocabulary["[/INST]"] in markers.boundaries
    assert not {vocabulary[text] for text in ("[THINK]", "[/THINK]", "[TOOL_CALLS]")} & markers.boundaries
    forced = around_end(tokenizer, "ok[/THINK]", "[/THINK]")
    assert forced == [*tokenizer.encode("ok", add_special_tokens=False), vocabulary["[/THINK]"]]


def test_what_bounds_a_turn() -> None:
    tokenizer = byte_tokenizer([*HARMONY, "<|im_start|>", "<|im_end|>"])
    vocabulary = tokenizer.get_vocab()
    assert resolve(ModelConfig(), tokenizer).boundaries == {
        vocabulary[text] for text in ("<|eos|>", "<|im_start|>", "<|im_end|>")
    }
    # Ends of one token are no boundary, nor are the tokens of starts and tool calls.
    tokenizer.add_special_tokens({"additional_special_tokens": HARMONY})
    markers = resolve(ModelConfig(), tokenizer, configured("openai_gptoss"))
    names = {tokenizer.decode([token]) for token in markers.boundaries}
    assert names >= {"<|start|>", "<|return|>"}
    assert not names & {"<|end|>", "<|message|>", "<|channel|>", "<|call|>"}
    # What the parser takes for one is.
    plain = byte_tokenizer(["<|channel>", "<channel|>", "<|turn>", "<|tool_response>"])
    bounds = resolve(ModelConfig(), plain, configured("gemma4")).boundaries
    assert {plain.get_vocab()[text] for text in ("<|turn>", "<|tool_response>")} <= bounds


def test_the_last_turn_of_any_prompt() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        length = rng.choice([0, 1, 2, 31, 32, 33, 100, 300, 3000])
        prompt = [rng.randrange(50) for _ in range(length)]
        boundaries = frozenset(rng.sample(range(60), rng.choice([0, 0, 1, 2])))
        found = last_turn(prompt, boundaries)
        last = max((at for at, token in enumerate(prompt) if token in boundaries), default=0)
        assert found == prompt[last:]
        assert last_turn(tuple(prompt), boundaries) == found


def test_the_last_turn_of_a_long_prompt_costs_its_own_length() -> None:
    class Counting(list[int]):
        read = 0

        def __getitem__(self, at: Any) -> Any:
            got = super().__getitem__(at)
            Counting.read += len(got) if isinstance(got, list) else 1
            return got

    prompt = Counting([1] * 100_000)
    prompt[-20] = 7
    assert len(last_turn(prompt, frozenset({7}))) == 20
    assert Counting.read < 200
