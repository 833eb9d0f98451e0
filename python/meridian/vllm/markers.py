"""Thinking markers: their texts from the configuration or from vLLM, resolved with the model's own tokenizer."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

from meridian import _native
from meridian._native import ConfigError
from meridian.config import ModelConfig
from meridian.vllm.parsers import CALLS, MAX_ALTERNATIVES, Parser, call_ends, parser_of

if TYPE_CHECKING:
    from vllm.config import ModelConfig as VllmModelConfig

logger = logging.getLogger("vllm.meridian")

AUTO = "auto"
# Templates and models put these around the markers.
_WHITESPACE = (" ", "\n", "\n\n", "\n\n\n", " \n", "\r\n", "\t")
# The texts of most models, tried when vLLM names none.
_THINK = ("<think>", "</think>")
# As in meridian-core (`Markers`): tokens of a marker.
_MAX_TOKENS = 64


class Tokenizer(Protocol):
    """The tokenizer methods that Meridian needs."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`."""
        ...


@dataclass(frozen=True)
class TokenMarkers:
    """Token sequences that mark thinking and tool calls in a model's output and in its prompts."""

    starts: list[list[int]] = field(default_factory=list)
    """Sequences that start thinking; none for a model that does not think, or whose thinking cannot be followed."""
    ends: list[list[int]] = field(default_factory=list)
    """Sequences that end thinking. The first one is forced when `forced` is empty."""
    padding: list[int] = field(default_factory=list)
    """Whitespace tokens that may surround the markers."""
    tool_calls: list[list[int]] = field(default_factory=list)
    """Sequences of `model.tool_call`: what begins a tool call where the chat template keeps its turn's reasoning."""
    calls: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """What begins a tool call, and what ends it: empty if that is not known. A beginning with several ends has several
    pairs."""
    call_ends_thinking: bool = False
    """Whether a tool call inside thinking ends the thinking."""
    forced: list[int] = field(default_factory=list)
    """The tokens that end thinking early, `model.force_phrase` included; empty for the first of `ends`."""
    boundaries: frozenset[int] = frozenset()
    """Tokens of which the last one in a prompt begins its last turn; see `last_turn`."""
    source: str = field(default="", compare=False)
    """What named the markers, such as `--reasoning-config` or `reasoning parser qwen3`."""
    problem: str = field(default="", compare=False)
    """Why thinking cannot be followed, in one line; empty if it can."""
    model: ModelConfig = field(default_factory=ModelConfig, compare=False)
    """The configuration with texts in place of `"auto"`."""


def resolve(
    model: ModelConfig, tokenizer: Tokenizer | None, vllm_config: Any = None, *, quiet: bool = False
) -> TokenMarkers:
    """Token sequences of the markers; none without a tokenizer or a marker. With `quiet`, nothing is logged.

    Raises:
        ConfigError: the tokenizer gives no token for a text of the configuration, or other tokens than those of the
            configured family.
    """
    found = _find(model, tokenizer, vllm_config)
    markers = TokenMarkers(source=found.source, problem=found.problem, model=found.model)
    if found.starts and tokenizer is not None:
        markers = _encoded(markers, found, _Encoder(tokenizer), vllm_config)
    if not quiet:
        _log(markers, found.doubt)
    return markers


def resolve_model(model: ModelConfig, tokenizer: Tokenizer | None, vllm_config: Any = None) -> ModelConfig:
    """The configuration with texts in place of each `"auto"` about markers; nothing is logged. A model whose thinking
    cannot be followed gets empty texts, or `<think>` and `</think>` as plain text without a parser.

    The operator's texts or family come first. Without them, the sources are vLLM's `--reasoning-config`, the reasoning
    parser, a model family that lists this parser, and `<think>` if the tokenizer has such tokens.

    Raises:
        ConfigError: `model.family` is unknown; nothing of vLLM's raises.
    """
    return _find(model, tokenizer, vllm_config).model


def last_turn(prompt: Sequence[int], boundaries: frozenset[int]) -> list[int]:
    """The tokens of a prompt from its last boundary token on, with it; the whole prompt if it has none."""
    size, end = 32, len(prompt)
    while end > 0:
        begin = max(0, end - size)
        part = prompt[begin:end]
        if not boundaries.isdisjoint(part):
            at = next(at for at in range(len(part) - 1, -1, -1) if part[at] in boundaries)
            return list(prompt[begin + at :])
        end, size = begin, size * 8
    return list(prompt)


def around_end(tokenizer: Tokenizer, text: str, end_texts: str | list[str]) -> list[int]:
    """Tokens of a text that contains an end marker. The marker and the text around it are encoded separately, because a
    tokenizer could join them."""
    if not text:
        return []
    encoder = _Encoder(tokenizer)
    marker = next((end for end in _texts(end_texts) if end in text), "")
    if not marker:
        return encoder.plain(text)
    before, _, behind = text.partition(marker)
    apart = [encoder.plain(part) if part else [] for part in (before, behind)]
    return [*apart[0], *encoder.tokens(marker), *apart[1]]


def engine_tokenizer(model_config: VllmModelConfig) -> Tokenizer | None:
    """The served model's tokenizer; None with `skip_tokenizer_init`."""
    if model_config.skip_tokenizer_init:
        return None
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(model_config=model_config)


# Texts.


@dataclass(frozen=True)
class _Found:
    """Texts, and where they are from."""

    model: ModelConfig
    source: str
    problem: str = ""
    parser: Parser | None = None
    family: dict[str, Any] | None = None
    given: bool = False
    """The operator gave the texts in `[model]`."""
    doubt: str = ""
    """Why the default texts may be another model's."""

    @property
    def starts(self) -> list[str]:
        """Texts that start thinking."""
        return _texts(self.model.think_start)


_SET = "set think_start and think_end in [model] of meridian.toml"


def _find(model: ModelConfig, tokenizer: Tokenizer | None, vllm_config: Any) -> _Found:
    """The configuration without `"auto"`, and what supplied its texts."""
    is_auto = AUTO in (model.think_start, model.think_end)
    if tokenizer is None:
        if is_auto:
            model = replace(model, think_start="", think_end="", force_phrase="")
        problem = "the engine has no tokenizer, so all is output" if is_auto or _texts(model.think_start) else ""
        return _Found(_settled(model, None), "default" if is_auto else "meridian.toml", problem)
    parser = parser_of(vllm_config, tokenizer)
    if not is_auto:
        source = f"model.family {model.family}" if model.family else "meridian.toml"
        found = _Found(model, source, parser=parser, given=True)
    elif model.family:
        family = json.loads(_native.model_family(model.family))
        found = _Found(_with_texts(model, family), f"model.family {model.family}", parser=parser, given=True)
    else:
        found = _of_vllm(model, _Encoder(tokenizer), parser, getattr(vllm_config, "reasoning_config", None))
    family = _family_of(found)
    if family is not None and not found.model.family:
        found = replace(found, model=_with_facts(found.model, family))
    if is_auto and not found.starts:
        # The operator's phrase has no marker to hold.
        found = replace(found, model=replace(found.model, force_phrase=""))
    return replace(found, model=_settled(found.model, parser), family=family)


def _of_vllm(model: ModelConfig, encoder: _Encoder, parser: Parser | None, reasoning: Any) -> _Found:
    """The texts that vLLM's own configuration gives, else those of most models."""
    start, end = (str(getattr(reasoning, f"reasoning_{side}_str", "") or "") for side in ("start", "end"))
    named = parser is not None and bool(parser.start and parser.end)
    if (start or end) and ((start and end) or named):
        return _Found(_of_reasoning_config(model, encoder, parser, start, end), "--reasoning-config", parser=parser)
    if parser is not None:
        source = f"reasoning parser {parser.name}"
        if named:
            texts = replace(model, think_start=_one(parser.start), think_end=_one(parser.end))
            return _Found(texts, source, parser=parser)
        family = _family_for(parser.name)
        if family is not None and not parser.failure:
            return _Found(_with_texts(model, family), source, parser=parser)
        if not parser.thinks:
            return _Found(replace(model, think_start="", think_end=""), source, parser=parser)
    why = "" if parser is None else parser.failure or "names no texts that start and end thinking"
    has_tokens = all(encoder.is_token(text) for text in _THINK)
    missing = f'the tokenizer has no tokens "{_THINK[0]}" and "{_THINK[1]}"'
    texts = replace(model, think_start=_THINK[0], think_end=_THINK[1])
    if parser is None and not has_tokens:
        return _Found(texts, "default", f"no reasoning parser, and {missing}: set --reasoning-parser, or {_SET}")
    if parser is None:
        return _Found(texts, "default", doubt=_doubt(encoder))
    if has_tokens:
        return _Found(texts, "default", parser=parser, doubt=f"reasoning parser {parser.name}: {why}")
    problem = f"reasoning parser {parser.name}: {why}, and {missing}: {_SET}"
    nothing = replace(model, think_start="", think_end="")
    return _Found(nothing, f"reasoning parser {parser.name}", problem, parser)


def _of_reasoning_config(
    model: ModelConfig, encoder: _Encoder, parser: Parser | None, start: str, end: str
) -> ModelConfig:
    """The texts of vLLM's `--reasoning-config`, whose end may hold a phrase before the marker.

    The natural end is the parser's or its family's. Without one, it is the token in the end that closes the start.
    """
    starts, ends = [start], [end]
    natural: list[str] = []
    if parser is not None:
        family = _family_for(parser.name) if not parser.end else None
        of_family = [marker["text"] for marker in family["end"]] if family is not None else []
        natural = parser.end or [text for text in of_family if text in end]
        starts = [start] if start else parser.start
    closing = f"</{start[1:]}"
    if not natural and start.startswith("<") and closing in end and encoder.is_token(closing):
        natural = [closing]
    if natural and end and end not in natural:
        model = replace(model, force_phrase=model.force_phrase or end)
        ends = natural if any(text in end for text in natural) else [*natural, end]
    elif natural:
        ends = _union([end] if end else [], natural)
    return replace(model, think_start=_one(starts), think_end=_one(ends))


def _with_texts(model: ModelConfig, family: dict[str, Any]) -> ModelConfig:
    """The model with the family's texts, and its other facts where the configuration is silent."""
    start, end = ([marker["text"] for marker in family[side]] for side in ("start", "end"))
    return _with_facts(replace(model, think_start=_one(start), think_end=_one(end)), family)


def _with_facts(model: ModelConfig, family: dict[str, Any]) -> ModelConfig:
    """The model with the family's alternatives, phrase and tool calls, where the configuration is silent."""
    start = [marker["text"] for marker in family["start"]]
    end = [marker["text"] for marker in family["end"]]
    return replace(
        model,
        think_start=_one(_union(start, _texts(model.think_start))),
        think_end=_one(_union(end, _texts(model.think_end))),
        force_phrase=model.force_phrase or family["force_phrase"],
        tool_call=model.tool_call or _one(family["tool_call"]),
    )


def _settled(model: ModelConfig, parser: Parser | None) -> ModelConfig:
    """The model with a decision about tool calls inside thinking."""
    if model.tool_call_ends_thinking != AUTO:
        return model
    return replace(model, tool_call_ends_thinking=parser is not None and parser.call_ends_thinking)


@functools.cache
def _families() -> list[dict[str, Any]]:
    """Every known model family."""
    return json.loads(_native.model_families())


def _family_of(found: _Found) -> dict[str, Any] | None:
    """The family that the configuration names, or the only one with its markers."""
    if found.model.family:
        return json.loads(_native.model_family(found.model.family))
    start, end = _texts(found.model.think_start), _texts(found.model.think_end)

    def has(family: dict[str, Any]) -> bool:
        texts = [{marker["text"] for marker in family[side]} for side in ("start", "end")]
        return texts[0].issuperset(start) and texts[1].issuperset(end)

    having = [family for family in _families() if start and end and has(family)]
    return having[0] if len(having) == 1 else None


def _doubt(encoder: _Encoder) -> str:
    """Families other than those of `<think>` whose markers the tokenizer has, too."""

    def has(family: dict[str, Any]) -> bool:
        texts = [marker["text"] for marker in family["start"] + family["end"]]
        tokens = [token for text in texts for token in re.findall(r"<[^<>\s]+>|\[/?[A-Z]+\]", text)]
        return bool(tokens) and not set(texts) <= set(_THINK) and all(encoder.is_token(token) for token in tokens)

    names = [family["name"] for family in _families() if has(family)]
    return f"no reasoning parser, and the tokenizer also has the markers of {', '.join(names)}" if names else ""


def _family_for(parser: str) -> dict[str, Any] | None:
    """The family that lists this parser of vLLM."""
    return next((family for family in _families() if parser in family["parsers"]), None)


# Tokens.


class _Encoder:
    """A tokenizer that knows its own vocabulary: some encode a marker as plain text although a token has its name."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._vocabulary: dict[Any, int] = {}
        with contextlib.suppress(Exception):
            self._vocabulary = cast("Any", tokenizer).get_vocab()

    def plain(self, text: str) -> list[int]:
        """Tokens of any text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def tokens(self, text: str) -> list[int]:
        """Tokens of a marker, or of a text."""
        token = self._vocabulary.get(text)
        return [token] if isinstance(token, int) else self.plain(text)

    def is_token(self, text: str) -> bool:
        """Whether the text is one token of its own."""
        return len(self.tokens(text)) == 1

    def joined(self, text: str) -> list[list[int]]:
        """Other tokens of a marker of several: a tokenizer may join its first or last with the whitespace beside it."""
        kept = [self.tokens(text)]
        if len(kept[0]) <= 1:
            return []
        for before in ("", " ", "\n"):
            for behind in ("", "\n", "\n\n"):
                ids = _cut(self.plain(before + text + behind), self.plain(before), self.plain(behind))
                if 1 <= len(ids) <= _MAX_TOKENS and not any(_contains(ids, known) for known in kept):
                    kept.append(ids)
        return kept[1:]

    def specials(self) -> set[int]:
        """Tokens that the tokenizer calls special."""
        tokenizer: Any = self.tokenizer
        found: set[int] = set()
        with contextlib.suppress(Exception):
            found.update(getattr(tokenizer, "all_special_ids", ()))
        with contextlib.suppress(Exception):
            added = getattr(tokenizer, "added_tokens_decoder", {})
            found.update(token for token, about in added.items() if getattr(about, "special", False))
        return found


def _encoded(markers: TokenMarkers, found: _Found, encoder: _Encoder, vllm_config: Any) -> TokenMarkers:
    """The markers with token sequences in place of texts."""
    model = found.model
    expected = _expected_ids(found)

    def marker(text: str) -> list[int]:
        ids = encoder.tokens(text)
        shown = json.dumps(text, ensure_ascii=False)
        if not ids:
            raise ConfigError(f"model: {shown}: the model's tokenizer gives no token")
        if ids != expected.get(text, ids):
            raise ConfigError(
                f'model.family: "{model.family}": {shown}: the model\'s tokenizer gives {ids}, expected '
                f"{expected[text]}: the model is not of this family"
            )
        return ids

    texts = [_texts(model.think_start), _texts(model.think_end)]
    if not found.given and not all(1 <= len(encoder.tokens(text)) <= _MAX_TOKENS for side in texts for text in side):
        problem = f"{found.source}: a marker takes no token or more than {_MAX_TOKENS}: {_SET}"
        return replace(markers, problem=found.problem or problem)
    starts, ends = (
        _union([marker(text) for text in side], [ids for text in side for ids in encoder.joined(text)])
        for side in texts
    )
    calls = _call_pairs(found, encoder)
    inside = {token for sequence in [*starts, *(ids for pair in calls for ids in pair)] for token in sequence}
    inside.update(ids[0] for ids in ends if len(ids) == 1)
    turns = found.parser.turns if found.parser is not None else frozenset()
    return replace(
        markers,
        starts=starts[:MAX_ALTERNATIVES],
        ends=ends[:MAX_ALTERNATIVES],
        padding=sorted({ids[0] for ids in map(encoder.plain, _WHITESPACE) if len(ids) == 1}),
        tool_calls=[marker(text) for text in _texts(model.tool_call)],
        calls=calls,
        call_ends_thinking=model.tool_call_ends_thinking is True,
        forced=_forced(model, ends, encoder, getattr(vllm_config, "reasoning_config", None)),
        boundaries=frozenset(encoder.specials() | turns) - inside,
    )


def _forced(model: ModelConfig, ends: list[list[int]], encoder: _Encoder, reasoning: Any) -> list[int]:
    """The tokens of `model.force_phrase`; vLLM's own if the phrase is the end of its `--reasoning-config`."""
    if model.force_phrase and model.force_phrase == getattr(reasoning, "reasoning_end_str", ""):
        ids = getattr(reasoning, "reasoning_end_token_ids", None)
        if ids and any(_contains(list(ids), end) for end in ends):
            return list(ids)
    return around_end(encoder.tokenizer, model.force_phrase, model.think_end)


def _call_pairs(found: _Found, encoder: _Encoder) -> list[tuple[list[int], list[int]]]:
    """What begins a tool call and what ends it: as configured, as the parser says, as the family does, or any known
    beginning that is a token of its own."""
    family = found.family or (found.parser and _family_for(found.parser.name)) or {"tool_call": []}
    calls = [(text, call_ends(text)) for text in _texts(found.model.tool_call)]
    calls = calls or (found.parser.calls if found.parser is not None else [])
    calls = calls or [(text, call_ends(text)) for text in family["tool_call"]]
    if not calls:
        # Hunyuan's tokenizers have a suffix in each marker: `<think:6124c78e>`.
        suffixes = {match[1] for text in found.starts if (match := re.fullmatch(r"<\w+(:\w+)>", text))}
        suffixed = [f"<tool_calls{suffix}>" for suffix in suffixes] + [f"<tool_call{suffix}>" for suffix in suffixes]
        known = _union([*suffixed, *CALLS], _native.tool_call_texts())
        calls = [(text, call_ends(text)) for text in known if encoder.is_token(text)]
    pairs: list[tuple[list[int], list[int]]] = []
    for begin, ends in calls:
        begins = [encoder.tokens(begin), *encoder.joined(begin)]
        closes = [ids for text in ends for ids in (encoder.tokens(text), *encoder.joined(text))] or [[]]
        pairs += [(ids, close) for ids in begins for close in closes]
    usable = [pair for pair in pairs if 1 <= len(pair[0]) <= _MAX_TOKENS and len(pair[1]) <= _MAX_TOKENS]
    return _union(usable, [])[:MAX_ALTERNATIVES]


def _expected_ids(found: _Found) -> dict[str, list[int]]:
    """Marker text -> token ids, where those of the family that the configuration names are known."""
    if not found.model.family or found.family is None:
        return {}
    return {marker["text"]: marker["ids"] for marker in found.family["start"] + found.family["end"] if marker["ids"]}


def _log(markers: TokenMarkers, doubt: str) -> None:
    """One line about the markers."""
    if markers.problem:
        logger.warning("meridian: thinking cannot be followed: %s", markers.problem)
    elif doubt:
        taken = f"thinking is taken to be between {_THINK[0]} and {_THINK[1]}"
        logger.warning("meridian: %s, which may be wrong: %s: %s", taken, doubt, _SET)
    elif not markers.starts:
        logger.info("meridian: the model does not think (%s)", markers.source)
    else:
        texts = (markers.model.think_start, markers.model.think_end)
        shown = " and ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        logger.info("meridian: thinking is between %s (%s)", shown, markers.source)


def _texts(texts: str | list[str]) -> list[str]:
    """The alternatives of a marker."""
    return [text for text in ([texts] if isinstance(texts, str) else texts) if text]


def _one(texts: Iterable[str]) -> str | list[str]:
    """Alternatives as the configuration holds them: a text, or a list of several."""
    listed = list(texts)
    return listed[0] if len(listed) == 1 else listed or ""


def _union(first: list[Any], second: Iterable[Any]) -> list[Any]:
    """Both lists in their order, without repetitions."""
    joined: list[Any] = []
    for each in (*first, *second):
        if each not in joined:
            joined.append(each)
    return joined


def _contains(tokens: list[int], part: list[int]) -> bool:
    """Whether the tokens hold the part, one behind the other."""
    return any(tokens[at : at + len(part)] == part for at in range(len(tokens) - len(part) + 1))


def _cut(tokens: list[int], before: list[int], behind: list[int]) -> list[int]:
    """The tokens without those of the text before and behind them."""

    def shared(some: Iterable[int], others: Iterable[int]) -> int:
        pairs = zip(some, others, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    tokens = tokens[shared(tokens, before) :]
    return tokens[: len(tokens) - shared(reversed(tokens), reversed(behind))]
