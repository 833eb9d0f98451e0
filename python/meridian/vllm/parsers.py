"""What vLLM's reasoning parsers say about a model's thinking and its tool calls.

vLLM's versions differ, and a parser may be anyone's: whatever one lacks or raises is a reason why it says nothing.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from typing import Any

# As in meridian-core: alternatives of a marker (`Markers`), and bytes of one (`Texts`).
MAX_ALTERNATIVES = 8
_MAX_BYTES = 256

# Texts that begin a tool call in vLLM's tool parsers, and those that end it where no rule of `call_ends` gives them.
CALLS: dict[str, tuple[str, ...] | None] = {
    "<tool_call>": None,
    "<tool_calls>": None,
    "<seed:tool_call>": None,
    "<minimax:tool_call>": None,
    "<longcat_tool_call>": None,
    "<dots_function_call>": None,
    "<ifm|tool_calls>": None,
    "<start_function_call>": ("<end_function_call>",),
    "<function_call>": (),
    "<function_calls>": None,
    "<|tool_call>": None,
    "<|tool_call|>": (),
    "<|tool_call_start|>": None,
    "<|tool_calls_section_begin|>": None,
    "<|tools_prefix|>": ("<|tools_suffix|>",),
    "<|action_start|>": None,
    "<|START_ACTION|>": ("<|END_ACTION|>",),
    "<|python_start|>": None,
    "<|python_tag|>": (),
    "<|content_invoke_tool_json|>": ("<|end_message|>",),
    "<\uff5ctool\u2581calls\u2581begin\uff5c>": None,
    "<\uff5ctool_calls_begin\uff5c>": None,
    "<\uff5cDSML\uff5cfunction_calls>": None,
    "<\uff5cDSML\uff5ctool_calls>": None,
    "[TOOL_CALLS]": (),
    "]<]minimax[>[<tool_call>": ("]<]minimax[>[</tool_call>",),
    "<|open|>tools<|sep|>": ("<|close|>tools<|sep|>",),
    # Harmony: `<|call|>` ends a call, `<|end|>` the text that announces one.
    "<|channel|>commentary": ("<|call|>", "<|end|>"),
    "<atem:function_calls>": None,
    "<|plamo:begin_tool_requests:plamo|>": ("<|plamo:end_tool_requests:plamo|>",),
}
# What begins a tool call in a configuration of vLLM's parser engine, the outermost first, and what ends it.
_CALL_TERMINALS = (
    ("TOOL_SECTION_START", "TOOL_SECTION_END"),
    ("TOOL_REQUESTS_START", "TOOL_REQUESTS_END"),
    ("TOOL_START", "TOOL_END"),
    ("TOOL_CALLS", ""),
)
# Parsers outside the parser engine for which a tool call inside reasoning ends it.
_CALL_ENDS_THINKING = ("k2_horizon", "openai_gptoss")


@dataclass(frozen=True)
class Parser:
    """What vLLM's reasoning parser says about a model's output."""

    name: str
    start: list[str] = field(default_factory=list)
    end: list[str] = field(default_factory=list)
    calls: list[tuple[str, list[str]]] = field(default_factory=list)
    call_ends_thinking: bool = False
    turns: frozenset[int] = frozenset()
    thinks: bool = True
    failure: str = ""


def parser_of(vllm_config: Any, tokenizer: Any) -> Parser | None:
    """What the engine's reasoning parser says; None without one."""
    outputs = getattr(vllm_config, "structured_outputs_config", None)
    reasoning = getattr(vllm_config, "reasoning_config", None)
    name = getattr(outputs, "reasoning_parser", "") or getattr(reasoning, "reasoning_parser", "")
    if not isinstance(name, str) or not name:
        return None
    try:
        return _ask(name, getattr(outputs, "reasoning_parser_plugin", "") or "", tokenizer)
    except Exception as error:
        shown = " ".join(f"{type(error).__name__}: {error}".split())
        return Parser(name, failure=shown if len(shown) <= 200 else f"{shown[:200]}...")


def _ask(name: str, plugin: str, tokenizer: Any) -> Parser:
    from vllm.reasoning import ReasoningParserManager

    try:
        kind = ReasoningParserManager.get_reasoning_parser(name)
    except KeyError:
        # As vLLM does it, v1/structured_output/__init__.py.
        if len(plugin) <= 3:
            raise
        ReasoningParserManager.import_reasoning_parser(plugin)
        kind = ReasoningParserManager.get_reasoning_parser(name)
    parser = kind(tokenizer)
    start, end = _named(parser)
    if not start or not end:
        # Some parsers follow thinking only in requests whose template options enable it.
        with contextlib.suppress(Exception):
            enabled = {"thinking": True, "enable_thinking": True}
            thinking = kind(tokenizer, chat_template_kwargs=enabled)
            if all(texts := _named(thinking)):
                parser, (start, end) = thinking, texts
    too_long = next((text for text in start + end if len(text.encode()) > _MAX_BYTES), None)
    if too_long is not None:
        return Parser(name, failure=f"a marker of {len(too_long.encode())} bytes, expected at most {_MAX_BYTES}")
    calls, call_ends_thinking = _calls_of(parser)
    return Parser(
        name,
        start,
        end,
        calls=calls,
        call_ends_thinking=call_ends_thinking or name in _CALL_ENDS_THINKING,
        turns=_turns_of(parser),
        thinks=bool(start and end) or not _has_ended(parser),
    )


def _named(parser: Any) -> tuple[list[str], list[str]]:
    """The texts that a parser names for the start and the end of thinking."""

    def of(side: str) -> list[str]:
        literals = getattr(_field(parser, "thinking"), {"start": "open_literals", "end": "close_literals"}[side], None)
        names = (f"reasoning_{side}_str", f"{side}_token", f"think_{side}_token")
        texts = [*(getattr(parser, name, None) for name in names), *(literals or [])]
        named = list(dict.fromkeys(text for text in texts if isinstance(text, str) and text))
        # Only `response_template` has alternatives; the other names are older spellings of the same text.
        return named[:MAX_ALTERNATIVES] if literals else named[:1]

    return of("start"), of("end")


def _field(parser: Any, name: str) -> Any:
    """A field of the `response_template` that the parser `hf` reads."""
    fields = getattr(getattr(parser, "response_template", None), "fields", None)
    return fields.get(name) if isinstance(fields, dict) else None


def _has_ended(parser: Any) -> bool:
    """Whether reasoning is over before the first token: the parser's model does not think."""
    try:
        return parser.is_reasoning_end([]) is True
    except Exception:
        return False


def _calls_of(parser: Any) -> tuple[list[tuple[str, list[str]]], bool]:
    """Texts that begin and end a tool call, and whether one ends reasoning, as the parser's engine is configured."""
    own = getattr(parser, "_TOOL_CALLS_START", None)
    if isinstance(own, str):
        return [(own, call_ends(own))], False
    tools = _field(parser, "tool_calls")
    if getattr(tools, "open_literals", None):
        return [(text, list(tools.close_literals or [])) for text in tools.open_literals], False
    config = getattr(getattr(parser, "_parser_engine", None), "parser_engine_config", None)
    terminals: Any = getattr(config, "terminals", {})

    def literals(terminal: str) -> list[str]:
        value = terminals.get(terminal, ())
        return [value] if isinstance(value, str) else [text for text in value if isinstance(text, str)]

    pairs = next(((literals(begin), literals(end)) for begin, end in _CALL_TERMINALS if begin in terminals), ([], []))
    ends_thinking = any(
        state.name == "REASONING" and terminal.startswith("TOOL") and "REASONING_END" in [e.name for e in change.events]
        for (state, terminal), change in getattr(config, "transitions", {}).items()
    )
    return [(begin, pairs[1] or call_ends(begin)) for begin in pairs[0]], ends_thinking


def _turns_of(parser: Any) -> frozenset[int]:
    """Tokens at which the parser takes a turn to begin."""
    config = getattr(getattr(parser, "_parser_engine", None), "parser_engine_config", None)
    vocab = parser.model_tokenizer.get_vocab()
    tokens = [vocab.get(text) for text in getattr(config, "turn_boundary_tokens", ())]
    tokens += [getattr(parser, name, None) for name in ("_start_of_assistant_message_token_id", "chatbot_token_id")]
    return frozenset(token for token in tokens if isinstance(token, int))


def call_ends(begin: str) -> list[str]:
    """Texts that end a tool call which begins with this text; none if that is not known."""
    known = CALLS.get(begin)
    if known is not None:
        return list(known)
    if named := re.fullmatch(r"(<.+[_\u2581])(?:begin|start)([|\uff5c]>)", begin):
        return [f"{named[1]}end{named[2]}"]
    if re.fullmatch(r"<\|\w+>", begin):
        return [f"<{begin[2:-1]}|>"]
    if re.fullmatch(r"<[^|/<>][^<>]*>", begin):
        return [f"</{begin[1:]}"]
    return []
