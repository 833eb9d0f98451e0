"""Every reasoning parser of the installed vLLM: whether Meridian follows the thinking that it parses.

    python -m meridian.vllm.bench.parsers

Each parser gets a small tokenizer that has the parser's own markers as tokens. Its texts, read from the parser itself
or from the code of those that name none, are compared with the markers that Meridian resolves.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.metadata
import json
import logging
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from meridian.config import ModelConfig
from meridian.vllm.markers import resolve

# Tokens that some parser looks for when it is made, or of which its markers consist.
_TOKENS = " ".join(
    (
        "<think> </think> <|START_THINKING|> <|END_THINKING|> <|START_ACTION|> <|END_ACTION|> <|CHATBOT_TOKEN|>",
        "<seed:think> </seed:think> <mm:think> </mm:think> <|channel> <channel|> <|turn> <|channel|> <|message|>",
        "<|start|> <|end|> <|return|> <|call|> <|open|> <|close|> <|sep|> <tool_call> </tool_call> <|tool_call>",
        "<tool_call|> <|tool_response> <tool_response|> <answer> </answer> <assistant> <ifm|think> </ifm|think>",
        "<ifm|tool_calls> </ifm|tool_calls> <|content_thinking|> <|end_message|> <|content_text|> <|message_model|>",
        "<|content_invoke_tool_json|> <response> </response> <|plamo:begin_think:plamo|> <|plamo:end_think:plamo|>",
        "<|plamo:tag|> <|eom|> <|eot|> [TOOL_CALLS] [ARGS] <minimax:tool_call> </minimax:tool_call> <seed:tool_call>",
        "</seed:tool_call> <|tool_calls_section_begin|> <|tool_calls_section_end|> <|im_start|> <|im_end|>",
    )
).split()
# Pieces of a marker that takes several tokens.
_PIECES = ["\u0120</", "</", "think", ">"]
# Parsers that name no text: what their code looks for.
_UNNAMED = {
    "granite": ("Here is my thought process:", "Here is my response:"),
    "hunyuan_a13b": ("<think>\n", "\n</think>\n<answer>\n"),
    "minimax_m2_append_think": ("<think>", "</think>"),
    **dict.fromkeys(("muse", "muse_glimmer", "musespark1x"), ("to=self<|message|>", "<|eom|>")),
    "openai_gptoss": ("<|channel|>analysis<|message|>", "<|end|>"),
}
_RESPONSE_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "content": {"content": "text"},
    },
}


@dataclass(frozen=True)
class Row:
    """A parser, and what Meridian makes of it.

    `followed`: the markers are the parser's. `does not think`: the parser says so. `refused`: a warning names the
    parser. `wrong`: none of these.
    """

    parser: str
    state: Literal["followed", "does not think", "refused", "wrong"]
    start: str = ""
    end: str = ""
    why: str = ""


def parsers() -> list[str]:
    """The names of vLLM's reasoning parsers."""
    from vllm.reasoning import ReasoningParserManager as Manager

    lazy: Any = getattr(Manager, "lazy_parsers", {})
    return sorted({*lazy, *Manager.reasoning_parsers})


def tokenizer_for(parser: str, *, without: tuple[str, ...] = ()) -> Any:
    """A tokenizer of bytes with the tokens that this parser looks for, unless they are `without`."""
    if parser == "mistral":
        with_tekken = mistral_tokenizer()
        if with_tekken is not None:
            return with_tekken
    pieces = _PIECES if parser == "olmo3" else []
    plain = [token for token in _TOKENS if parser != "olmo3" or "think" not in token]
    extra = ["[THINK]", "[/THINK]"] if parser == "mistral" else []
    made = byte_tokenizer([token for token in (*plain, *extra, *pieces) if token not in without])
    if parser in ("beam", "hf"):
        made.response_template = _RESPONSE_TEMPLATE
    return made


def byte_tokenizer(tokens: list[str]) -> Any:
    """A tokenizer with a token for each byte, and these."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model: Any = models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[])
    inner: Any = Tokenizer(model)
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_tokens([AddedToken(token, special=False, normalized=False) for token in tokens])
    special = ["<|eos|>", *(token for token in ("<|im_start|>", "<|im_end|>") if token in tokens)]
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|eos|>", additional_special_tokens=special[1:])


def mistral_tokenizer() -> Any | None:
    """A small tokenizer in Mistral's own format; None without its library."""
    try:
        from mistral_common.tokens.tokenizers.base import SpecialTokens
        from vllm.tokenizers.mistral import MistralTokenizer
    except ImportError:
        return None
    # An enumeration, which pyright does not see.
    tokens: Any = SpecialTokens
    names = [str(token.value) for token in tokens]
    special = [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)]
    vocab = [
        {"rank": byte, "token_bytes": base64.b64encode(bytes([byte])).decode(), "token_str": None}
        for byte in range(256)
    ]
    config = {
        "pattern": r"[^\s]+|\s+",
        "num_vocab_tokens": 256,
        "default_vocab_size": 256 + len(special),
        "default_num_special_tokens": len(special),
        "version": "v13",
    }
    text = json.dumps({"config": config, "vocab": vocab, "special_tokens": special, "version": 1, "type": "Tekken"})
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tekken.json").write_text(text)
        return MistralTokenizer.from_pretrained(folder)


def configured(parser: str) -> Any:
    """What Meridian reads of vLLM's configuration, with this reasoning parser."""
    outputs = SimpleNamespace(reasoning_parser=parser, reasoning_parser_plugin="")
    return SimpleNamespace(structured_outputs_config=outputs, reasoning_config=None)


def texts_of(parser: str, tokenizer: Any) -> tuple[str, str] | None:
    """The texts that the parser itself names, or that its code looks for; None if it parses no thinking."""
    from vllm.reasoning import ReasoningParserManager

    kind = ReasoningParserManager.get_reasoning_parser(parser)
    for options in ({}, {"chat_template_kwargs": {"thinking": True, "enable_thinking": True}}):
        made: Any = kind(tokenizer, **options)
        start, end = (_named(made, side) for side in ("start", "end"))
        if start and end:
            return start, end
    return _UNNAMED.get(parser)


def _named(parser: Any, side: str) -> str:
    """vLLM before 0.32 has no common name for them."""
    names = (f"reasoning_{side}_str", f"{side}_token", f"think_{side}_token")
    texts = (getattr(parser, name, None) for name in names)
    return next((text for text in texts if isinstance(text, str) and text), "")


def survey(parser: str, tokenizer: Any) -> Row:
    """What Meridian makes of a parser with this tokenizer."""
    lines: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = lines.append  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.meridian")
    level, logger.level = logger.level, logging.INFO
    # vLLM 0.30 logs to standard output.
    spreads, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        markers = resolve(ModelConfig(), tokenizer, configured(parser))
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = level, spreads
    warnings = [line.getMessage() for line in lines if line.levelno >= logging.WARNING]
    if warnings or markers.problem:
        named = len(warnings) == 1 and f"reasoning parser {parser}" in warnings[0]
        return Row(parser, "refused" if named else "wrong", why="; ".join(warnings) or markers.problem)
    try:
        expected = texts_of(parser, tokenizer)
    except Exception as error:
        return Row(parser, "wrong", why=f"{type(error).__name__}: {error}")
    if expected is None and not markers.starts:
        return Row(parser, "does not think", why=markers.source)
    start, end = ([_decoded(tokenizer, ids) for ids in side] for side in (markers.starts, markers.ends))
    if expected is not None and expected[0] in start and expected[1] == end[0]:
        return Row(parser, "followed", start[0], end[0], markers.source)
    return Row(parser, "wrong", " or ".join(start), " or ".join(end), f"the parser's: {expected}")


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    """The text of a marker. Some tokenizers leave out the name of a special token."""
    names = {token: text for text, token in tokenizer.get_vocab().items()}
    return names[ids[0]] if len(ids) == 1 else tokenizer.decode(ids)


def report() -> dict[str, Any]:
    """The survey of every parser, each with a tokenizer that has its markers."""
    rows: list[Row] = []
    for parser in parsers():
        try:
            rows.append(survey(parser, tokenizer_for(parser)))
        except Exception as error:
            rows.append(Row(parser, "wrong", why=f"{type(error).__name__}: {error}"))
    states = [row.state for row in rows]
    return {
        "vllm": importlib.metadata.version("vllm").split("+")[0],
        "parsers": len(rows),
        "right": len(rows) - states.count("wrong"),
        "followed": states.count("followed"),
        "rows": [asdict(row) for row in rows],
    }


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        found = report()
    print(json.dumps(found, ensure_ascii=False, indent=1))
