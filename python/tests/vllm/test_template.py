"""What chat templates do with earlier reasoning, seen by rendering them with a real tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
from meridian.bench.model import model_dir
from meridian.vllm.template import strips_reasoning

# As Qwen3's: what stands before the end marker of an earlier turn is left out.
STRIPS = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- set content = m.content %}{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}{{ content + '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"""
KEEPS_CONTENT = "{%- for m in messages %}{{ m.role + m.content }}{%- endfor %}"
KEEPS_FIELD = """{%- for m in messages %}{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{%- endif %}
{{ m.content.split('</think>')[-1] }}{%- endfor %}"""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir())


@pytest.mark.parametrize(
    ("template", "strips"),
    [
        (STRIPS, True),
        (KEEPS_CONTENT, False),
        (KEEPS_FIELD, False),
        ("{{ raise_exception('no') }}", None),
        ("{{ 'always the same' }}", None),
        (None, None),
    ],
)
def test_a_template(tokenizer: Any, template: str | None, strips: bool | None) -> None:
    tokenizer.chat_template = template
    assert strips_reasoning(tokenizer, "<think>", "</think>") is strips


def test_no_tokenizer() -> None:
    assert strips_reasoning(None, "<think>", "</think>") is None
