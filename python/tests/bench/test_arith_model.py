"""The stored model's tokenizer and chat template agree with the module that makes its problems."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from meridian.vllm.bench import arith

MODEL = Path(__file__).parents[3] / "models" / "arith-reasoner"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(MODEL)


def test_the_template_opens_thinking(tokenizer: Any) -> None:
    (chain,) = arith.problems(1, 1)
    turns = [{"role": "user", "content": chain.text}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == " ".join(chain.prompt)
    assert tokenizer(text).input_ids == tokenizer.convert_tokens_to_ids(chain.prompt)


def test_the_template_leaves_earlier_reasoning_out(tokenizer: Any) -> None:
    answer = "7 + 5 = 12 \n so 12 \n </think> ans 12"
    turns = [
        {"role": "user", "content": "7 + 5"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "2 * 3"},
    ]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<bos> 7 + 5 ? ans 12 <eos> 2 * 3 ? <think>"


def test_a_thought_survives_encoding_and_decoding(tokenizer: Any) -> None:
    (chain,) = arith.problems(2, 1)
    words = [*arith.thought(random.Random(1), chain), *arith.PROBE, str(chain.answer)]
    ids = tokenizer(" ".join(words)).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == words
    assert tokenizer.decode(ids, skip_special_tokens=True) == " ".join(words)
    assert arith.answer_of(tokenizer.decode(ids)) == chain.answer


def test_the_probe_is_two_tokens(tokenizer: Any) -> None:
    assert tokenizer(" ".join(arith.PROBE)).input_ids == [37, 30]


def test_the_weights_are_small_and_heads_suit_the_cpu() -> None:
    config = json.loads((MODEL / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["head_dim"] == 32
    assert (MODEL / "model.safetensors").stat().st_size < 8_000_000
