"""No empty answers after budgets: the guard on logits, and the real engine (`budget_answers.py`)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import fresh
import pytest
import torch
import vllm

REQUESTS = 200


@pytest.mark.parametrize(
    ("options", "scheduler"),
    [
        ({"bias": 6}, "SyncMeridianScheduler"),
        ({"bias": 6, "scheduling": "async"}, "AsyncMeridianScheduler"),
        ({"speculate": True, "greedy": True}, "SyncMeridianScheduler"),
    ],
)
def test_no_answer_is_empty(options: dict[str, Any], scheduler: str) -> None:
    if "speculate" in options and vllm.__version__.startswith("0.30."):
        pytest.skip("vLLM 0.30 cannot speculate on a CPU: its kernels need Triton")
    found = fresh.measure("python.tests.vllm.budget_answers", requests=REQUESTS, **options)
    assert (found["empty"], found["missed"], found["gave_up"]) == (0, 0, False), found
    assert found["scheduler"] == scheduler
    assert found["requests"] == REQUESTS
    assert found["forced"]["hard-cap"] > 0


def test_stock_has_empty_answers_with_its_own_budget() -> None:
    assert fresh.measure("python.tests.vllm.budget_answers", requests=REQUESTS, bias=6, arm="budget")["empty"] > 0


def test_a_banned_token_is_impossible_unless_it_is_the_only_one() -> None:
    from meridian.vllm.answers import ban

    none = float("-inf")
    logits = torch.tensor([[1.0, 2.0, 3.0], [none, none, 3.0], [1.0, 2.0, 3.0]])
    ban(logits, {0: [2], 1: [2]})
    assert logits.tolist() == [[1.0, 2.0, none], [none, none, 3.0], [1.0, 2.0, 3.0]]


def test_stops_follow_their_request() -> None:
    from meridian.vllm.answers import AnswerGuard

    def params(ignore_eos: bool, stop: list[int], every: set[int]) -> Any:
        return SimpleNamespace(ignore_eos=ignore_eos, stop_token_ids=stop, all_stop_token_ids=every)

    guard = AnswerGuard([2])
    guard.add(0, params(False, [5], {2, 5, 6}))
    guard.add(1, params(True, [5], {2, 5}))
    guard.add(2, params(True, [], {2}))
    answering: tuple[list[int], list[tuple[int, int]]] = ([0, 1, 2], [(0, 7), (2, 7)])
    assert guard.banned(answering) == {0: [2, 5, 6, 7], 1: [5]}
    guard.move(0, 2, swaps=True)
    assert guard.banned(answering) == {1: [5], 2: [2, 5, 6, 7]}
    guard.move(2, 1, swaps=False)
    assert guard.banned(([4], []), {4: 1}) == {4: [2, 5, 6]}


def test_white_space_special_tokens_and_markers_show_nothing() -> None:
    from meridian.vllm.answers import blank_tokens
    from meridian.vllm.markers import TokenMarkers

    words = {"\u0120": 0, "\u010a\u010a": 1, "yes": 2, "<eos>": 3, "</think>": 4, ".": 5, "<0x0A>": 6, "<0x41>": 7}
    texts = [" ", "\n\n", "yes", "<eos>", "</think>", ".", "\n", "A"]
    tokenizer = SimpleNamespace(
        all_special_ids=[3], get_vocab=lambda: words, decode=lambda ids, skip_special_tokens: texts[ids[0]]
    )
    assert blank_tokens(tokenizer, TokenMarkers(starts=[[8, 9]], ends=[[4]])) == [0, 1, 3, 4, 6]


def test_the_last_output_says_how_the_thinking_went() -> None:
    from meridian.vllm.answers import report

    def request(name: str, extra: dict[str, Any]) -> Any:
        return SimpleNamespace(request_id=name, sampling_params=SimpleNamespace(extra_args=extra))

    def output(name: str, of_connector: Any = None) -> Any:
        return SimpleNamespace(request_id=name, finish_reason=1, kv_transfer_params=of_connector)

    asks = {"meridian_think_report": True}
    ended = [request("a", asks), request("b", {}), request("c", asks), request("d", {"meridian_think_report": 0})]
    outputs = [output("a"), output("b"), output("c", {"remote": 1}), output("d")]
    thinking: Any = SimpleNamespace(course=lambda name: (7, "hard-cap", 1, 0))
    report(thinking, ended, [SimpleNamespace(outputs=outputs)])
    told = {"meridian": {"think_tokens": 7, "think_end": "hard-cap", "reopened": 1}}
    assert [one.kv_transfer_params for one in outputs] == [told, None, {"remote": 1}, None]
