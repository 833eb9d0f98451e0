"""`reasoning_effort` of a client, and the operator's table; `thinking_token_budget` stays with vLLM."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from meridian import ConfigError, MeridianConfig

TABLE = """
[telemetry]
prometheus = ""
[scheduler]
max_think_tokens = 4096
[scheduler.reasoning_effort]
low.max_think_tokens = 16
low.min_think_tokens = 4
high.max_think_tokens = 4096
"""


def budget(extra: dict[str, Any]) -> tuple[int | None, ...]:
    """Most and least think tokens of a request."""
    from meridian.vllm.effort import for_request
    from meridian.vllm.xargs import read_budget

    efforts = MeridianConfig.from_toml(TABLE).scheduler.reasoning_effort
    found = for_request(read_budget(extra), extra, efforts)
    return found.max_think_tokens, found.min_think_tokens


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({}, (None, None)),
        ({"meridian_reasoning_effort": "low"}, (16, 4)),
        ({"meridian_reasoning_effort": "high"}, (4096, None)),
        ({"meridian_reasoning_effort": "medium"}, (None, None)),
        ({"meridian_reasoning_effort": "low", "meridian_think_budget": 99}, (99, 4)),
        ({"meridian_reasoning_effort": "low", "meridian_min_think_tokens": 1}, (16, 1)),
    ],
)
def test_a_clients_own_options_win_over_its_effort(extra: dict[str, Any], expected: tuple[int | None, ...]) -> None:
    assert budget(extra) == expected


def test_vllms_own_budget_stays_with_vllm() -> None:
    from meridian.vllm.thinking import ThinkHook
    from meridian.vllm.xargs import RequestBudget
    from vllm import SamplingParams

    hook: Any = object.__new__(ThinkHook)
    hook._efforts = MeridianConfig.from_toml(TABLE).scheduler.reasoning_effort
    hook._phrase, hook._forced, hook._interrupts = "", [], []
    request: Any = SimpleNamespace(request_id="a", sampling_params=SamplingParams(thinking_token_budget=8))
    asked = hook.asked(request)
    assert asked.client == RequestBudget()
    assert asked.has_mask, "vLLM may force another token than Meridian"
    hook.follow(request, asked, {"key": 1})
    assert request.sampling_params.thinking_token_budget == 8


@pytest.mark.parametrize("value", ["lo", "", 1, None, True, ["low"], "__class__", "_from_tables"])
def test_an_effort_that_no_client_may_name_is_refused(value: Any) -> None:
    from meridian.vllm.effort import for_request
    from meridian.vllm.xargs import RequestBudget, read_budget

    extra = {"meridian_reasoning_effort": value}
    with pytest.raises(ValueError, match=r"^meridian_reasoning_effort: .*: expected one of none, minimal, low, medium"):
        read_budget(extra)
    # A request that bypassed the front end.
    efforts = MeridianConfig.from_toml(TABLE).scheduler.reasoning_effort
    assert for_request(RequestBudget(), extra, efforts) == RequestBudget()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("lo.max_think_tokens = 5", "did you mean `scheduler.reasoning_effort.low"),
        ("low.max_tokens = 5", "scheduler.reasoning_effort.low.max_tokens: unknown field"),
        ("low.max_think_tokens = -1", 'low.max_think_tokens: -1: must be "unchanged" or in 0..=16777216'),
        ("low.max_think_tokens = 'few'", 'low.max_think_tokens: "few": must be "unchanged" or in 0..=16777216'),
        ("low = 5", "scheduler.reasoning_effort.low: invalid type: integer, expected a table"),
        ("low.max_think_tokens = 40000", "40000: must be at most scheduler.max_think_tokens, 32768"),
        (
            "low = { max_think_tokens = 5, min_think_tokens = 6 }",
            "low.min_think_tokens: 6: must be at most the effort's max_think_tokens, 5",
        ),
    ],
)
def test_a_bad_table_is_refused_at_load(text: str, error: str) -> None:
    with pytest.raises(ConfigError) as refused:
        MeridianConfig.from_toml(f"[scheduler]\nmax_think_tokens = 32768\n[scheduler.reasoning_effort]\n{text}\n")
    assert error in str(refused.value)


def test_the_table_survives_its_way_through_python() -> None:
    config = MeridianConfig.from_toml(TABLE)
    assert config.scheduler.reasoning_effort.low.max_think_tokens == 16
    assert config.scheduler.reasoning_effort.medium.max_think_tokens == "unchanged"
    from meridian import _native

    again = MeridianConfig.from_native(_native.parse_config(TABLE), ".")
    assert again.scheduler == config.scheduler


CONVERTS = """
import sys
from meridian.vllm.effort import install
{before}
install()
install()
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
messages = [{{"role": "user", "content": "x"}}]
for more in ({{}}, {{"reasoning_effort": "low"}}, {{"reasoning_effort": "low", "vllm_xargs": {{"a": 1}}}},
             {{"reasoning_effort": "low", "vllm_xargs": {{"meridian_reasoning_effort": "high"}}}}):
    request = ChatCompletionRequest(model="m", messages=messages, **more)
    print(request.to_sampling_params(10, {{}}).extra_args)
request = ResponsesRequest(model="m", input="x", reasoning={{"effort": "medium"}})
print(request.to_sampling_params(10, {{}}).extra_args)
"""


@pytest.mark.parametrize("before", ["", "import vllm.entrypoints.openai.chat_completion.protocol"])
def test_the_effort_of_the_api_reaches_the_engine(before: str) -> None:
    script = CONVERTS.format(before=before)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [eval(line) for line in done.stdout.splitlines()[-5:]] == [
        None,
        {"meridian_reasoning_effort": "low"},
        {"a": 1, "meridian_reasoning_effort": "low"},
        {"meridian_reasoning_effort": "high"},
        {"meridian_reasoning_effort": "medium"},
    ]
