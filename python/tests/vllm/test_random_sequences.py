"""Random sequences against stock vLLM: its scheduler, its KV cache manager, its encoder cache, and no model.

A failure names the feature and the seed; `stock` and `decided` of random_sequences.py repeat it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm
from meridian.vllm.bench.model import model_dir
from random_drive import Arrival, Drive
from random_engine import BLOCK_TOKENS, FEATURES, Feature, Limits, make_scheduler
from random_sequences import (
    FCFS,
    PASSED_OVER,
    POLICIES,
    STARVED,
    STARVED_ARRIVALS,
    TWO_ADAPTERS,
    TWO_ADAPTERS_ARRIVALS,
    Policy,
    decided,
    decided_by,
    first_difference,
    passed_over,
    scripted,
    stock,
)

# Of each feature: against stock, and under each policy.
PAIRS, DECIDED = 10, 3
# Requests that are overdue together take turns: three steps of the most tokens that an engine here has.
TURNS_MS = 3 * (3.0 + 0.25 * 160)
HOSTILE_POLICIES = [policy for policy in POLICIES if policy.source == "native:pascal"]


@pytest.fixture(scope="module")
def model() -> str:
    """The text model whose configuration the schedulers are made with."""
    return str(model_dir())


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """vLLM says the same about each of hundreds of schedulers."""
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


@functools.cache
def stalled_by_stock(feature: Feature, seed: int, model: str) -> float:
    return stock(feature, seed, model).stalled_ms


def broken(violations: list[str], feature: Feature) -> list[str]:
    """Those that count. Streaming sessions may hold all KV blocks while they wait (docs/src/install.md). In vLLM 0.30
    stock itself stalls so within these seeds."""
    may_stall = feature.name == "sessions" and vllm.__version__.startswith("0.30.")
    return [violation for violation in violations if not (may_stall and "not over" in violation)]


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_fcfs_does_what_stock_does_in_every_step(feature: Feature, model: str, hostile: Path) -> None:
    for seed in range(PAIRS):
        reference = stock(feature, seed, model)
        assert broken(reference.violations, feature) == []
        ours = decided(FCFS, feature, seed, model, hostile)
        assert broken(ours.violations, feature) == []
        assert first_difference(ours, reference) is None


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_under_every_policy_the_limits_of_vllm_hold(
    feature: Feature, policy: Policy, model: str, hostile: Path
) -> None:
    for seed in range(DECIDED):
        ours = decided(policy, feature, seed, model, hostile)
        assert broken(ours.violations, feature) == []
        assert ours.stalled_ms <= stalled_by_stock(feature, seed, model) + policy.max_defer_ms + TURNS_MS


@pytest.mark.parametrize("policy", HOSTILE_POLICIES, ids=lambda policy: policy.name)
def test_an_answer_does_not_wait_for_a_prompt_that_has_no_blocks(policy: Policy, model: str) -> None:
    reference, _ = scripted(STARVED, STARVED_ARRIVALS, model)
    ours, idle_plans = scripted(STARVED, STARVED_ARRIVALS, model, policy)
    assert ours.violations == []
    assert ours.empty_steps == 0
    assert ours.over_ms["0"] <= 1.01 * reference.over_ms["0"]
    assert idle_plans > 0, "the policy is named for what the host changed"


# A prompt of 2,000 blocks beside 50 short requests, in 2,048 blocks: it comes first, or last.
SHORT = Limits(seqs=64, tokens=256, blocks=2049, adapters=1, encoder=0, long_prefill=0, model_len=33_000)
LONG = Arrival(1, 2000 * BLOCK_TOKENS, 8)


@pytest.mark.parametrize("source", ["balanced", "output-first", "srpt"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_long_prompt_beside_short_requests_keeps_its_blocks(model: str, source: str, is_first: bool) -> None:
    others = tuple(Arrival(1, 10 + i, 400) for i in range(50))
    arrivals = (LONG, *others) if is_first else (*others, LONG)
    long = "0" if is_first else "50"
    reference, _ = scripted(SHORT, arrivals, model)
    ours, _ = scripted(SHORT, arrivals, model, Policy(source, f"native:{source}"))
    assert ours.violations == []
    assert ours.empty_steps == 0
    assert ours.requests[long].num_preemptions == 0
    # The others admit short requests first, and serve decodes first.
    assert source != "balanced" or ours.over_ms[long] <= 1.1 * reference.over_ms[long]


@pytest.mark.parametrize("growth_blocks", [0.0, 8.0])
def test_an_urgent_request_does_not_wait_for_the_growth_of_others(model: str, growth_blocks: float) -> None:
    """The blocks just suffice for an urgent request beside one that is not."""
    from vllm import SamplingParams

    feature = Feature("scripted", priority=True, caching=False)
    limits = Limits(seqs=4, tokens=200, blocks=12, adapters=1, encoder=0, long_prefill=0)
    drive = Drive(make_scheduler(feature, limits, model), feature, limits, 0)
    drive.left = 0
    prompt = list(range(10, 10 + 5 * BLOCK_TOKENS))
    with decided_by(Policy("grows", "native:balanced", growth_blocks=growth_blocks), drive, Path()):
        for name, priority, step in (("0", 5, {"0"}), ("1", 0, {"0", "1"})):
            request = drive._request(name, prompt, SamplingParams(max_tokens=4), priority=priority)
            drive.requests[name], drive.tokens[name] = request, []
            drive.scheduler.add_request(request)
            drive.step()
            assert set(dict(drive.trace[0 if priority else -2][0])) == step


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_adapters_of_requests_that_are_left_out_count(policy: Policy, model: str, hostile: Path) -> None:
    ours, _ = scripted(TWO_ADAPTERS, TWO_ADAPTERS_ARRIVALS, model, policy, hostile)
    assert ours.violations == []
    assert set(ours.over_ms) == {"0", "1", "2"}


DEFER_MS = 200.0


@pytest.mark.parametrize("source", ["balanced", "output-first", "qoe", "srpt"])
def test_an_adapter_without_a_place_gets_one(source: str, model: str) -> None:
    lone = PASSED_OVER["an adapter without a place"]
    reference_ms, _ = passed_over(lone, model)
    ours_ms, violations = passed_over(lone, model, Policy(source, f"native:{source}", max_defer_ms=DEFER_MS))
    assert violations == []
    assert ours_ms <= DEFER_MS + 1000.0 < reference_ms, "stock serves it when no other comes any more"


def test_whole_prompts_behind_those_that_vllm_passes_over_get_their_tokens(model: str) -> None:
    """A budget that is lowered for the first waiting ones, which have no place, is too small for the others."""
    passed = (Arrival(12, 60, 4, adapter=2),) * 6
    others = tuple(Arrival(12 + i // 4, 100, 20, adapter=1) for i in range(8))
    arrivals = (*(Arrival(1, 10, 90, adapter=1),) * 4, *passed, *others)
    limits = Limits(seqs=16, tokens=160, blocks=400, adapters=1, encoder=0, long_prefill=0)
    policy = Policy("lowers", "native:output-first", max_defer_ms=1e6)
    stocks, _ = scripted(limits, arrivals, model, chunked_prefill=False)
    ours, _ = scripted(limits, arrivals, model, policy, chunked_prefill=False)
    assert ours.violations == []
    own, reference = (sum(drive.over_ms[str(10 + i)] for i in range(8)) for drive in (ours, stocks))
    assert own <= 1.02 * reference


def test_a_request_that_has_the_step_to_itself_is_not_kept_waiting(model: str) -> None:
    """vLLM's `test_preempt_during_execution`: the first request is in flight, and the blocks just suffice."""
    from vllm import SamplingParams

    feature = Feature("scripted", pipeline=2, caching=False)
    limits = Limits(seqs=4, tokens=100, blocks=11, adapters=1, encoder=0, long_prefill=0)
    drive = Drive(make_scheduler(feature, limits, model), feature, limits, 0)
    drive.left = 0
    prompt = list(range(10, 10 + 5 * BLOCK_TOKENS))
    with decided_by(POLICIES[0], drive, Path()):
        for name in ("0", "1"):
            drive.scheduler.add_request(drive._request(name, prompt, SamplingParams(max_tokens=4)))
            assert drive.scheduler.schedule().num_scheduled_tokens == {name: len(prompt)}


def test_a_request_that_a_connector_loads_is_not_kept_waiting(model: str) -> None:
    """vLLM's `test_cannot_schedule_after_recv`: the blocks suffice for what is loaded, and for no growth beside it."""
    from vllm import SamplingParams
    from vllm.v1.request import RequestStatus

    feature = Feature("scripted", connector=True, caching=False)
    limits = Limits(seqs=4, tokens=100, blocks=6, adapters=1, encoder=0, long_prefill=0)
    drive = Drive(make_scheduler(feature, limits, model), feature, limits, 0)
    drive.left = 0
    matched: dict[str, tuple[int, bool]] = {"0": (0, False), "1": (2 * BLOCK_TOKENS, True)}
    drive.scheduler.connector.get_num_new_matched_tokens = lambda request, computed: matched[request.request_id]
    requests: list[Any] = []
    with decided_by(POLICIES[0], drive, Path()):
        for name, tokens in (("0", 2 * BLOCK_TOKENS), ("1", 2 * BLOCK_TOKENS)):
            requests.append(drive._request(name, list(range(10, 10 + tokens)), SamplingParams(max_tokens=9)))
            drive.requests[name], drive.tokens[name] = requests[-1], []
            drive.scheduler.add_request(requests[-1])
            drive.step()
        assert requests[1].status == RequestStatus.WAITING_FOR_REMOTE_KVS
        drive.run()
        assert drive.violations == []


def test_a_scripted_drive_is_the_same_with_fcfs(model: str) -> None:
    arrivals = (Arrival(1, 10, 20), Arrival(3, 40, 5), Arrival(3, 60, 9))
    reference, _ = scripted(STARVED, arrivals, model)
    ours, _ = scripted(STARVED, arrivals, model, FCFS)
    assert first_difference(ours, reference) is None
