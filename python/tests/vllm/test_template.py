"""What chat templates do with earlier reasoning, seen by rendering them with a real tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
from meridian import _native
from meridian.vllm.bench.model import model_dir
from meridian.vllm.template import reasoning_in_template

STRIPS = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- set content = m.content %}{%- if '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
{{- content + '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"""
# As Qwen3's: what was thought since the last question stays.
LOOP = """{%- set ns = namespace(last=0) %}{%- for m in messages %}
{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}{%- if loop.index0 > ns.last %}{{ m.content }}
{%- else %}{{ m.content.split('</think>')[-1] }}{%- endif %}{%- for c in m.tool_calls or [] %}MARK{{ c.function.name }}
{%- endfor %}{%- endfor %}"""
KEEPS_CONTENT = "{%- for m in messages %}{{ m.role + m.content }}{%- endfor %}"
KEEPS_FIELD = """{%- for m in messages %}
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{%- endif %}
{{ m.content.split('</think>')[-1] }}{%- endfor %}"""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir())


@pytest.mark.parametrize(
    ("template", "strips", "tool_calls"),
    [
        (STRIPS, True, []),
        (LOOP.replace("MARK", "<tool_call>"), True, ["<tool_call>"]),
        (LOOP.replace("MARK", "[calls]"), False, []),
        (KEEPS_CONTENT, False, []),
        (KEEPS_FIELD, False, []),
        ("{{ raise_exception('no') }}", False, []),
        ("{{ 'always the same' }}", False, []),
        (None, False, []),
    ],
)
def test_a_template(tokenizer: Any, template: str | None, strips: bool, tool_calls: list[str]) -> None:
    tokenizer.chat_template = template
    known = _native.tool_call_texts()
    assert "<tool_call>" in known
    found = reasoning_in_template(tokenizer, "<think>", "</think>", tool_calls=known)
    assert (found.strips, found.tool_calls) == (strips, tool_calls)


def test_no_tokenizer() -> None:
    assert not reasoning_in_template(None, "<think>", "</think>", tool_calls=[]).strips


def test_what_is_set_stays(tokenizer: Any) -> None:
    """An operator's own words are not lost where the template shows no tool loop."""
    from meridian import MeridianConfig, ModelConfig
    from meridian.vllm.parts import with_template

    tokenizer.chat_template = STRIPS
    # As `resolve_model` returns it.
    model = ModelConfig(think_start="<think>", think_end="</think>", tool_call=["[calls]"])
    config = with_template(MeridianConfig(model=model), tokenizer)
    assert (config.model.strips_reasoning, config.model.tool_call) == (True, ["[calls]"])
    said = MeridianConfig(model=ModelConfig(strips_reasoning=False))
    assert with_template(said, tokenizer) is said
