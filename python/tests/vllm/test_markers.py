"""Markers resolved with real tokenizers, as the scheduler does it when it starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from meridian import ConfigError, ModelConfig
from meridian.vllm.markers import TokenMarkers, resolve
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
    assert [len(markers.starts), len(markers.ends)] == [1, 2]
    assert all(len(ids) > 1 for ids in markers.starts + markers.ends)


def test_alternatives_of_several_tokens(qwen3: Tokenizer) -> None:
    markers = resolve(ModelConfig.of_family("granite"), qwen3)
    assert [len(markers.starts), len(markers.ends)] == [2, 2]
    assert qwen3.inner.decode(markers.starts[1]) == "Here's my thought process:"


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
        resolve(ModelConfig(), Deaf())
