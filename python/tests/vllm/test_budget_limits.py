"""Requests for which a limit of thinking could not hold, where they enter vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from meridian.config import MeridianConfig

TURN, START, END, WORD = 1, 600, 601, 40
THINKS, ANSWERS = [TURN, START], [TURN, START, END]
OPERATORS = (
    "[scheduler]\nmin_think_tokens = 0\nmax_think_tokens = 8\n[scheduler.reasoning_effort]\nlow.max_think_tokens = 4\n"
)
OWN = {"meridian_think_budget": 5}
LOW = {"meridian_reasoning_effort": "low"}


def limits(toml: str = "", *, plans: bool = True) -> Any:
    """The limits of an engine with this configuration."""
    from meridian.vllm.limits import Limits
    from meridian.vllm.markers import TokenMarkers

    config = MeridianConfig.from_toml(toml)
    markers = TokenMarkers(starts=[[START]], ends=[[END]], boundaries=frozenset({TURN}))
    return Limits(config, markers, plans=plans)


def params(**fields: Any) -> Any:
    """Sampling parameters as the input processor leaves them: bad words are tokens."""
    from vllm import SamplingParams

    words = fields.pop("words", None)
    made = SamplingParams(**{"max_tokens": 48, **fields})
    if words:
        made.bad_words, made._bad_words_token_ids = ["x"], words
    return made


FORBIDS: dict[str, dict[str, Any]] = {
    "allowed_token_ids": {"allowed_token_ids": [WORD, START]},
    "logit_bias": {"logit_bias": {END: -100.0}},
    "bad_words": {"words": [[END]]},
}


@pytest.mark.parametrize("field", FORBIDS)
@pytest.mark.parametrize(
    ("toml", "extra", "limit"),
    [
        ("", OWN, "5 tokens (meridian_think_budget)"),
        (OPERATORS, {}, "8 tokens (scheduler.max_think_tokens)"),
        (OPERATORS, OWN, "5 tokens (meridian_think_budget)"),
        (OPERATORS, LOW, "4 tokens (reasoning_effort)"),
    ],
)
def test_a_mask_that_forbids_the_end_is_refused(field: str, toml: str, extra: dict[str, Any], limit: str) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError) as refused:
        limits(toml).check(params(extra_args=extra, **FORBIDS[field]), THINKS)
    assert refused.value.parameter == field
    assert str(refused.value).startswith(f"{field}: forbids ")
    assert f"ends the thinking at {limit}: expected to permit it" in str(refused.value)


@pytest.mark.parametrize(
    ("toml", "prompt", "fields"),
    [
        pytest.param("", THINKS, FORBIDS["bad_words"], id="nothing set"),
        pytest.param("", THINKS, FORBIDS["bad_words"] | {"extra_args": LOW}, id="an effort without a row"),
        pytest.param(OPERATORS, THINKS, FORBIDS["logit_bias"] | {"max_tokens": 8}, id="a limit that is not reached"),
        pytest.param(OPERATORS, ANSWERS, {"allowed_token_ids": [WORD]}, id="no thinking"),
        pytest.param(OPERATORS, THINKS, {"allowed_token_ids": [WORD, END]}, id="the end is allowed"),
        pytest.param(OPERATORS, THINKS, {"logit_bias": {END: -99.0, WORD: -100.0}}, id="a bias that is no ban"),
        pytest.param(OPERATORS, THINKS, {"words": [[WORD, END], [WORD]]}, id="forbidden after a word only"),
        pytest.param(OPERATORS, THINKS, {"structured_outputs": None}, id="no mask"),
    ],
)
def test_other_masks_are_taken(toml: str, prompt: list[int], fields: dict[str, Any]) -> None:
    limits(toml).check(params(**fields), prompt)


def test_without_the_scheduler_the_operators_limit_does_not_act() -> None:
    from vllm.exceptions import VLLMValidationError

    without = limits(OPERATORS, plans=False)
    without.check(params(extra_args=LOW, **FORBIDS["bad_words"]), THINKS)
    with pytest.raises(VLLMValidationError, match="meridian_think_budget"):
        without.check(params(extra_args=OWN, **FORBIDS["bad_words"]), THINKS)


def test_a_mask_may_open_thinking_after_a_prompt_without_it() -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="bad_words"):
        limits(OPERATORS).check(params(**FORBIDS["bad_words"]), ANSWERS)


def test_a_bad_word_inside_a_long_marker_forbids_it() -> None:
    from meridian.vllm.xargs import forbidding

    assert forbidding(params(words=[[7, 8]]), [6, 7, 8]) == "bad_words"
    assert forbidding(params(words=[[8, 9]]), [6, 7, 8]) is None
    assert forbidding(params(words=[[5, 6]]), [6, 7, 8]) is None


class Serving:
    """A server's class with what `limits` wraps, and an engine with these limits behind it."""

    def __init__(self, own: Any, thought: tuple[int, ...] = ()) -> None:
        self.engine_client = SimpleNamespace(input_processor=SimpleNamespace(meridian_limits=own))
        self._thought = thought
        self.budgets: list[Any] = []

    def beam_search(self, prompt: Any, request_id: str, params: Any) -> str:
        """As vLLM's."""
        del prompt, request_id, params
        return "beams"

    async def _generate_with_builtin_tools(
        self, request_id: str, sampling_params: Any, context: Any
    ) -> AsyncIterator[Any]:
        """One request of the engine for each number of think tokens, each in two outputs."""
        del request_id
        for tokens in self._thought:
            self.budgets.append((sampling_params.extra_args or {}).get("meridian_think_budget"))
            for part in (tokens // 2, tokens - tokens // 2):
                context.num_reasoning_tokens += part
                yield context


def wrapped(method: str) -> type[Serving]:
    """The class with that method wrapped, as `install` does it."""
    from meridian.vllm import limits as module

    made = type("Wrapped", (Serving,), {method: vars(Serving)[method]})
    wrap = next(wrap for _, own, wrap in module._PLACES.values() if own == method)
    module._wrap("Wrapped", method, wrap, SimpleNamespace(Wrapped=made))  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize(
    ("toml", "asked", "max_tokens", "field"),
    [
        (OPERATORS, {}, 9, "use_beam_search: true: thinking cannot be ended at 8 tokens (scheduler.max_think_tokens)"),
        (OPERATORS, LOW, 5, "use_beam_search: true: thinking cannot be ended at 4 tokens (reasoning_effort)"),
        ("", OWN, 3, "meridian_think_budget: 5: has no effect with use_beam_search"),
        ("", {"meridian_interrupt": "x" * 200}, 3, "meridian_interrupt: 'xxx"),
        (OPERATORS, {}, 8, None),
        (OPERATORS, LOW, 4, None),
        ("", LOW, 24, None),
        ("", {"script": "of another"}, 24, None),
    ],
)
def test_a_beam_search_with_a_limit_is_refused(
    toml: str, asked: dict[str, Any], max_tokens: int, field: str | None
) -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import BeamSearchParams

    beams: Any = BeamSearchParams(beam_width=2, max_tokens=max_tokens)
    vars(beams)["meridian_asked"] = asked
    serving = wrapped("beam_search")(limits(toml))
    if field is None:
        assert serving.beam_search([1], request_id="a", params=beams) == "beams"
        return
    with pytest.raises(VLLMValidationError) as refused:
        serving.beam_search([1], "a", params=beams)
    assert str(refused.value).startswith(field)
    assert "expected" in str(refused.value)


def test_a_search_of_an_engine_without_limits_is_vllms() -> None:
    from vllm.sampling_params import BeamSearchParams

    serving = wrapped("beam_search")(None)
    assert serving.beam_search([1], "a", BeamSearchParams(beam_width=2, max_tokens=99)) == "beams"


@pytest.mark.parametrize(
    ("toml", "extra", "budgets"),
    [
        (OPERATORS, None, [None, 5, 0, 0]),
        (OPERATORS, {"meridian_think_budget": 4}, [4, 1, 0, 0]),
        (OPERATORS, LOW, [None, 1, 0, 0]),
        ("", {"meridian_think_budget": 20}, [20, 17, 9, 8]),
        ("", None, [None, None, None, None]),
    ],
)
def test_the_tools_of_a_server_share_one_limit(toml: str, extra: dict[str, Any] | None, budgets: list[Any]) -> None:
    from vllm import SamplingParams

    serving = wrapped("_generate_with_builtin_tools")(limits(toml), (3, 8, 1, 2))
    context = SimpleNamespace(num_reasoning_tokens=0)

    async def outputs() -> int:
        return len(
            [x async for x in serving._generate_with_builtin_tools("a", SamplingParams(extra_args=extra), context)]
        )

    assert asyncio.run(outputs()) == 8
    assert serving.budgets == budgets


def test_every_place_of_vllm_is_there_and_wrapped_once() -> None:
    from importlib import import_module

    from meridian.vllm import limits as module

    for _ in range(2):
        module.install()
        for name, (kind, method, _) in module._PLACES.items():
            made = getattr(getattr(import_module(name), kind), method)
            assert not hasattr(made.meridian, "meridian"), name


def test_the_protocols_hand_the_options_of_a_beam_search_on() -> None:
    from meridian.vllm import limits as module
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    module.install()
    messages = [{"role": "user", "content": "x"}]
    body = {"model": "m", "messages": messages, "reasoning_effort": "low", "vllm_xargs": {"a": 1}}
    request: Any = ChatCompletionRequest.model_validate(body)
    assert vars(request.to_beam_search_params(4, {}))["meridian_asked"] == {"meridian_reasoning_effort": "low", "a": 1}
