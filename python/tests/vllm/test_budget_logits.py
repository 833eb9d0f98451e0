"""What the processor makes of logits: forced rows, guarded rows, entropies; everything else stays as it was."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
import torch
from test_budget_rows import END, EOS, NO_LIMIT, START, VOCABULARY, Wire, make_sampler, planned

ROWS = 6


def logits_of(seed: int = 0) -> torch.Tensor:
    """Rows as a model gives them."""
    return torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4


def take(sampler: Any, row: int, extra: dict[str, Any] | None, **params: Any) -> list[int]:
    """A thinking request takes a row; returns its list of tokens."""
    from vllm import SamplingParams

    outputs: list[int] = []
    sampler.add(row, SamplingParams(extra_args=extra, **params), [200, START], outputs)
    return outputs


def test_forced_rows_are_one_hot_and_others_are_untouched_bit_for_bit() -> None:
    sampler = make_sampler(Wire())
    take(sampler, 1, {"meridian_think_budget": 0})
    take(sampler, 4, {"meridian_think_budget": 0}, temperature=0.0)
    take(sampler, 2, {"meridian_think_budget": 5}, ignore_eos=True)
    take(sampler, 3, None)
    logits = logits_of()
    logits[3, 5], logits[5, 6] = float("nan"), float("-inf")
    before = logits.clone()
    sampler.apply(logits, None)
    for row in (1, 4):
        assert torch.equal(logits[row].softmax(-1), torch.eye(VOCABULARY)[END])
        assert torch.equal(logits[row].log_softmax(-1).exp(), torch.eye(VOCABULARY)[END])
    for row in (0, 2, 3, 5):
        assert torch.equal(logits[row].view(torch.int32), before[row].view(torch.int32))


@pytest.mark.parametrize("extra", [{"meridian_think_budget": 0}, planned(1, 0, [])], ids=["client", "scheduler"])
def test_a_forced_token_that_a_mask_forbids_waits(extra: dict[str, Any]) -> None:
    sampler = make_sampler(Wire())
    outputs = take(sampler, 0, extra, temperature=0.7)
    logits = logits_of()
    logits[0] = float("-inf")
    logits[0, 40] = 1.0
    before = logits.clone()
    sampler.apply(logits, None)
    assert torch.equal(logits, before)
    outputs.append(40)
    logits = logits_of()
    sampler.apply(logits, None)
    assert torch.equal(logits[0].softmax(-1), torch.eye(VOCABULARY)[END]), "as soon as the mask permits it"


@pytest.mark.parametrize(("bias", "is_forced"), [(-100.0, False), (-101.0, False), (-99.0, True), (100.0, True)])
def test_a_token_that_the_clients_bias_bans_is_not_forced(bias: float, is_forced: bool) -> None:
    """vLLM adds the bias to the logits before: a banned token is not impossible there."""
    sampler = make_sampler(Wire())
    take(sampler, 1, {"meridian_think_budget": 0}, logit_bias={END: bias})
    take(sampler, 2, {"meridian_think_budget": 0}, logit_bias={END + 1: -100.0})
    logits = logits_of()
    logits[1, END] += bias
    before = logits.clone()
    sampler.apply(logits, None)
    assert torch.equal(logits[1], before[1]) is not is_forced
    assert torch.equal(logits[2].softmax(-1), torch.eye(VOCABULARY)[END])


def test_force_leaves_a_row_alone_in_which_its_token_is_impossible() -> None:
    from meridian.vllm.processor import force

    logits = logits_of()
    logits[2, END] = float("-inf")
    logits[4, 100:] = float("-inf")
    before = logits.clone()
    force(logits, [], [])
    force(logits, [2, 4, 5], [END, 60, END])
    others = torch.tensor([0, 1, 2, 3])
    assert torch.equal(logits[others], before[others])
    for row, token in ((4, 60), (5, END)):
        assert torch.equal(logits[row].softmax(-1), torch.eye(VOCABULARY)[token])


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        ({}, False),
        ({"stop": ["so"]}, True),
        ({"stop": "so"}, True),
        ({"stop": ["other"]}, False),
        ({"stop": ["x\nI"]}, True),  # begins before the phrase
        ({"stop": ["think>\n\n42"]}, True),  # ends behind it
        ({"stop": ["I now"]}, False),
        ({"stop_token_ids": [END]}, True),
        ({"stop_token_ids": [EOS, 200]}, False),
        ({"logit_bias": {ord("s"): -100}}, True),
        ({"logit_bias": {ord("s"): -99, EOS: -100}}, False),
        ({"allowed_token_ids": [END, ord("o")]}, True),
    ],
)
def test_a_client_that_gets_no_phrase(stops: dict[str, Any], expected: bool) -> None:
    from meridian.vllm.processor import has_no_phrase
    from vllm import SamplingParams

    phrase = "\nI stop, so</think>\n"
    assert has_no_phrase(SamplingParams(**stops), phrase, [ord("s"), ord("o"), END]) is expected
    assert not has_no_phrase(SamplingParams(**stops), "", [])


@pytest.mark.parametrize(("stop", "first"), [(["ok"], END), (["other"], ord("o"))])
def test_a_phrase_with_a_stop_of_the_client_inside_is_left_out(stop: list[str], first: int) -> None:
    sampler = make_sampler(Wire(), force_phrase="ok</think>")
    take(sampler, 0, {"meridian_think_budget": 0}, stop=stop, detokenize=True)
    logits = logits_of()
    sampler.apply(logits, None)
    assert int(logits[0].argmax()) == first
    assert torch.equal(logits[0].softmax(-1), torch.eye(VOCABULARY)[first])


@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.0])
@pytest.mark.parametrize("eos_logit", [-30.0, 0.0, 9.0, 40.0, float("-inf")])
@pytest.mark.parametrize("end_logit", [-3.0, 12.0])
def test_the_guard_conserves_probability(temperature: float, eos_logit: float, end_logit: float) -> None:
    sampler = make_sampler(Wire(), eos_guard=True)
    take(sampler, 2, {"meridian_think_budget": 50}, temperature=temperature)
    logits = logits_of()
    logits[2, EOS], logits[2, END] = eos_logit, end_logit
    before = (logits[2].double() / temperature).softmax(-1)
    sampler.apply(logits, None)
    after = (logits[2].double() / temperature).softmax(-1)
    assert after[EOS] == 0.0
    assert not after.isnan().any()
    assert float(after[END]) == pytest.approx(float(before[EOS] + before[END]), abs=1e-6)
    others = [token for token in range(VOCABULARY) if token not in (EOS, END)]
    assert torch.allclose(after[others], before[others], rtol=0, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("eos_logit", [-30.0, 40.0, float("-inf")])
def test_the_guard_leaves_a_row_whose_end_marker_the_client_forbids(temperature: float, eos_logit: float) -> None:
    sampler = make_sampler(Wire(), eos_guard=True)
    for row in (2, 3):
        take(sampler, row, {"meridian_think_budget": 50}, temperature=temperature)
    logits = logits_of()
    logits[2:4, EOS] = eos_logit
    logits[2, END] = float("-inf")
    before = logits.clone()
    take(sampler, 4, {"meridian_think_budget": 50}, temperature=temperature, logit_bias={END: -100.0})
    sampler.apply(logits, None)
    assert torch.equal(logits[2], before[2])
    assert torch.equal(logits[4], before[4]), "by a bias"
    assert logits[3, EOS] == float("-inf"), "the other row is guarded"


@pytest.mark.parametrize(
    ("eos_logit", "end_logit", "expected"),
    [(90.0, -5.0, END), (-5.0, 90.0, END), (-5.0, -5.0, 77), (49.9, 49.9, 77), (float("-inf"), float("-inf"), 77)],
)
def test_a_guarded_greedy_row_picks_what_it_would_have_picked(
    eos_logit: float, end_logit: float, expected: int
) -> None:
    """An end of sequence becomes the end marker; two that are less likely than another do not win together."""
    sampler = make_sampler(Wire(), eos_guard=True)
    take(sampler, 0, {"meridian_think_budget": 50}, temperature=0.0)
    logits = logits_of()
    logits[0, 77], logits[0, EOS], logits[0, END] = 50.0, eos_logit, end_logit
    sampler.apply(logits, None)
    assert int(logits[0].argmax()) == expected
    assert logits[0, EOS] == float("-inf")


def test_rows_that_are_not_guarded() -> None:
    sampler = make_sampler(Wire(), eos_guard=True)
    answers = take(sampler, 0, {"meridian_think_budget": 50})
    answers += [130, 131, END, 132]
    take(sampler, 1, {"meridian_think_budget": 50}, ignore_eos=True)
    take(sampler, 2, None)
    logits = logits_of()
    before = logits.clone()
    sampler.apply(logits, None)
    assert torch.equal(logits, before)
    unguarded = make_sampler(Wire())
    take(unguarded, 0, {"meridian_think_budget": 50})
    unguarded.apply(logits, None)
    assert torch.equal(logits, before)


def test_a_moved_row_keeps_its_temperature() -> None:
    sampler = make_sampler(Wire(), eos_guard=True)
    take(sampler, 0, {"meridian_think_budget": 50}, temperature=0.0)
    take(sampler, 1, {"meridian_think_budget": 50}, temperature=1.0)
    take(sampler, 5, {"meridian_think_budget": 50}, temperature=0.5)
    sampler.move(0, 1, swaps=True)
    sampler.move(5, 3, swaps=False)
    logits = torch.zeros(ROWS, VOCABULARY)
    sampler.apply(logits, None)
    expected = {0: math.log(2), 1: 0.0, 3: 0.5 * math.log(2), 5: 0.0}
    assert {row: float(logits[row, END]) for row in expected} == pytest.approx(expected, abs=1e-6)


def test_entropies_are_of_the_distribution_before_it_is_changed() -> None:
    wire = Wire()
    sampler = make_sampler(wire, eos_guard=True)
    take(sampler, 1, planned(7, NO_LIMIT, [], measured=True))
    take(sampler, 3, planned(8, 0, [], measured=True))
    sampler.add(4, _probe_params(9, at=40), [200, START], [])
    logits = logits_of()
    before = logits.double()
    sampler.apply(logits, None)
    (report,) = wire.reports
    records = [report[i : i + 22] for i in range(0, len(report), 22)]
    # A row that is forced has no entropy of its own to tell.
    assert [(record[0], int.from_bytes(record[1:9], "little")) for record in records] == [(0, 7), (2, 9)]
    assert int.from_bytes(records[1][9:13], "little") == 40, "a probe is known by the token that it was due at"
    for record, row in zip(records, (1, 4), strict=True):
        nats = torch.frombuffer(bytearray(record[13:17]), dtype=torch.float32)
        assert float(nats) == pytest.approx(_nats(before[row]), abs=1e-4)
    confidences = [struct.unpack("<f", record[18:22])[0] for record in records]
    assert math.isnan(confidences[0]), "only probes have one"
    assert confidences[1] == pytest.approx(float(before[4].softmax(-1).max()), abs=1e-5)
    assert torch.equal(logits[4].double(), before[4]), "a probe is only looked at"


def _probe_params(key: int, at: int) -> Any:
    from meridian.vllm.xargs import Row
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=1, extra_args={"meridian_row": Row(probe=key, at=at)})


def _nats(row: torch.Tensor) -> float:
    return float(torch.special.entr(row.double().softmax(-1)).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("vocabulary", [1, 2, 255, 4096, 151_936])
@pytest.mark.parametrize("layout", ["whole", "strided", "transposed"])
def test_entropies_are_those_of_64_bits(dtype: torch.dtype, vocabulary: int, layout: str) -> None:
    from meridian.vllm.reports import Reports

    generator = torch.Generator().manual_seed(vocabulary)
    made = (torch.randn(5, vocabulary, generator=generator) * 6).to(dtype)
    if layout == "strided":
        wide = torch.full((5, vocabulary + 13), 1e4).to(dtype)
        wide[:, :vocabulary] = made
        logits = wide[:, :vocabulary]
    else:
        logits = made.T.contiguous().T if layout == "transposed" else made
    if vocabulary > 2:
        logits[1, vocabulary // 2 :] = float("-inf")
        logits[2] = float("-inf")
        logits[2, 1] = 3.0
    rows = [4, 1, 2, 2]
    expected = [_nats(logits[row]) for row in rows]
    pending = Reports(Wire().tell).measure(logits, rows)
    assert pending.entropies() == pytest.approx(expected, abs=1e-4)
    is_native = dtype != torch.float64 and (layout != "transposed" or vocabulary == 1)
    assert pending.backend.startswith("cpu-" if is_native else "torch")
