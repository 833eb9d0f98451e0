"""Speculative decoding: vLLM's own rejection sampler with Meridian's processor generates the tokens that it would
without drafts, whatever the drafts are."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from test_budget_rows import END, EOS, NO_LIMIT, OWN, START, VOCABULARY, Wire, limit_order, make_sampler, planned

ROUNDS = 60
ROWS, MOST_DRAFTS, TOKENS = 5, 5, 24


class Model:
    """Logits that depend on all tokens so far. Now and then an end of sequence, an end marker or another letter of a
    phrase is the likeliest token."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Logits of the next token, [vocabulary]."""
        rng = random.Random(f"{self._seed} {tokens}")
        logits = torch.full((VOCABULARY,), -20.0)
        logits[rng.choice(OWN)] = 5.0
        if rng.random() < 0.12:
            logits[rng.choice((EOS, END, ord("a"), ord("b")))] = 9.0
        # Sometimes nearly as likely as the other.
        logits[rng.choice((EOS, END))] = 4.0
        return logits


def sampling_metadata(rows: int, processor: Any) -> Any:
    """vLLM's metadata of a greedy batch."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    none = torch.empty(0)
    return SamplingMetadata(
        temperature=None,
        all_greedy=True,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        output_token_ids=[[] for _ in range(rows)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors([processor]),
    )


def processor_of(sampler: Any) -> Any:
    """A processor with this sampler, as an engine that speculates makes it."""
    from meridian.vllm.processor import BudgetLogitsProcessor

    processor = object.__new__(BudgetLogitsProcessor)
    processor._sampler, processor._slots, processor._drafted = sampler, None, None
    return processor


@pytest.fixture(scope="module")
def rejection_sampler() -> Any:
    """vLLM's own, with the wrappers."""
    from meridian.vllm import speculation
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler

    if vllm.__version__.startswith("0.30."):
        pytest.skip("vLLM 0.30 cannot speculate on a CPU: its kernels need Triton")
    kernels_for_cpu()
    speculation._wrap_rejection_sampler()
    return RejectionSampler(Sampler())


def kernels_for_cpu() -> None:
    """vLLM's own kernels for a CPU, as its worker registers them."""
    from vllm.platforms import current_platform

    platform: Any = current_platform
    platform.import_kernels()
    if hasattr(platform, "register_triton_kernel_overrides"):
        platform.register_triton_kernel_overrides()
        return
    # Before vLLM 0.32, the model runner does it.
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    runner: Any = object.__new__(CPUModelRunner)
    runner._postprocess_triton()


def arrivals(rng: random.Random) -> list[dict[str, Any]]:
    """Requests with limits, interrupts, both or neither, some of them measured."""
    made = []
    for key in range(ROWS):
        limit = rng.choice((NO_LIMIT, rng.randint(0, 12)))
        interrupts = [[rng.choice(OWN)] for _ in range(rng.choice((0, 0, 20)))]
        made.append(planned(key, limit, interrupts, measured=rng.random() < 0.5))
    return made


def enter(sampler: Any, arriving: list[dict[str, Any]]) -> list[list[int]]:
    """All take their rows; returns their lists of tokens."""
    from vllm import SamplingParams

    outputs: list[list[int]] = [[] for _ in arriving]
    for row, (extra, tokens) in enumerate(zip(arriving, outputs, strict=True)):
        sampler.add(row, SamplingParams(temperature=0.0, extra_args=extra), [200, START], tokens)
    return outputs


def guarded(phrase: str, marker: str) -> dict[str, Any]:
    """`[model]` with this phrase and end marker, where ends of sequence and answers are guarded."""
    texts = {"force_phrase": phrase, "think_start": "<think>", "think_end": marker}
    return {**texts, "eos_guard": True, "min_answer_tokens": 1}


def one_by_one(model: Model, arriving: list[dict[str, Any]], orders: list[bytes], phrase: str, marker: str) -> Any:
    """The tokens of each request without drafts."""
    wire = Wire()
    sampler = make_sampler(wire, **guarded(phrase, marker))
    outputs = enter(sampler, arriving)
    wire.orders = list(orders)
    for _ in range(TOKENS):
        sampler.receive()
        logits = torch.stack([model.logits([row, *tokens]) for row, tokens in enumerate(outputs)])
        sampler.apply(logits, None)
        for tokens, token in zip(outputs, logits.argmax(dim=1).tolist(), strict=True):
            tokens.append(token)
    return outputs


def drafts_for(rng: random.Random, tokens: list[int], truth: list[int]) -> list[int]:
    """Drafts that are right for a while, then anything."""
    count, right = rng.randint(0, MOST_DRAFTS), rng.randint(0, MOST_DRAFTS)
    follow = truth[len(tokens) : len(tokens) + count]
    return [token if at < right else rng.choice((END, EOS, -1, rng.choice(OWN))) for at, token in enumerate(follow)]


@pytest.mark.parametrize(("phrase", "marker"), [("", "</think>"), ("ab</think>", "</think>"), ("cabac", "abac")])
def test_drafts_change_no_token(rejection_sampler: Any, phrase: str, marker: str) -> None:
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    forced = accepted = 0
    for seed in range(ROUNDS):
        rng = random.Random(seed)
        model, arriving = Model(seed), arrivals(rng)
        orders = [limit_order(rng.randrange(ROWS), rng.randint(0, 20), rng.randint(0, 15)) for _ in range(2)]
        truth = one_by_one(model, arriving, orders, phrase, marker)
        wire = Wire()
        sampler = make_sampler(wire, **guarded(phrase, marker))
        outputs = enter(sampler, arriving)
        processor = processor_of(sampler)
        wire.orders = list(orders)
        while min(map(len, outputs)) < TOKENS:
            processor.update_state(None)
            drafts = [drafts_for(rng, tokens, of) for tokens, of in zip(outputs, truth, strict=True)]
            rows = [
                model.logits([row, *outputs[row], *of[:at]])
                for row, of in enumerate(drafts)
                for at in range(len(of) + 1)
            ]
            metadata = SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu"))
            ends = torch.tensor([len(of) + 1 for of in drafts]).cumsum(0)
            metadata.bonus_logits_indices = ends - 1
            is_bonus = torch.zeros(len(rows), dtype=torch.bool)
            is_bonus[ends - 1] = True
            metadata.target_logits_indices = torch.arange(len(rows))[~is_bonus]
            metadata.draft_token_ids = torch.tensor([token for of in drafts for token in of], dtype=torch.int32)
            metadata.max_spec_len = max(map(len, drafts))
            if metadata.max_spec_len == 0:
                logits = processor.apply(torch.stack(rows))
                sampled = logits.argmax(dim=1, keepdim=True)
            else:
                found = rejection_sampler(metadata, None, torch.stack(rows), sampling_metadata(ROWS, processor))
                sampled = found.sampled_token_ids
            for tokens, of in zip(outputs, sampled.tolist(), strict=True):
                new = [token for token in of if token != -1]
                accepted += len(new) - 1
                tokens += new
        assert processor._sampler is not None, "it gave up"
        assert [tokens[:TOKENS] for tokens in outputs] == truth
        forced += sum(END in tokens or marker == "abac" for tokens in truth)
    assert forced > ROUNDS
    assert accepted > 5 * ROUNDS


def expanded(
    values: torch.Tensor, ends: torch.Tensor, count: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """vLLM's `expand_batch_to_tokens`. Its kernel for CPUs fills a copy, so that stock vLLM 0.32 divides the logits of
    sampled requests with drafts by uninitialised memory."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    assert int(ends[-1]) == count
    return torch.where(values == replace_from, replace_to, values).repeat_interleave(counts)


@pytest.mark.parametrize("has_probabilities", [False, True])
def test_sampled_requests_end_at_the_token_too(
    rejection_sampler: Any, monkeypatch: pytest.MonkeyPatch, has_probabilities: bool
) -> None:
    """N-grams propose tokens without probabilities, a draft model with them."""
    from vllm.v1.sample import rejection_sampler as vllms
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    monkeypatch.setattr(vllms, "expand_batch_to_tokens", expanded)

    generator = torch.Generator().manual_seed(0)
    limits, phrase = [0, 3, 7, 11, 16], [ord("a"), ord("b"), END]
    sampler = make_sampler(Wire(), force_phrase="ab</think>")
    outputs = enter(sampler, [planned(key, limit, []) for key, limit in enumerate(limits)])
    processor = processor_of(sampler)
    while min(map(len, outputs)) < 24:
        processor.update_state(None)
        counts = torch.randint(0, MOST_DRAFTS, (ROWS,), generator=generator).tolist()
        counts[0] = max(counts[0], 1)
        probabilities = torch.rand(sum(counts), VOCABULARY, generator=generator).softmax(dim=1)
        probabilities[:, [START, END, EOS]] = 0.0
        probabilities /= probabilities.sum(dim=1, keepdim=True)
        proposed = probabilities.multinomial(1, generator=generator).flatten().tolist()
        drafts = [[proposed.pop(0) for _ in range(count)] for count in counts]
        metadata = SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu"))
        ends = torch.tensor([count + 1 for count in counts]).cumsum(0)
        rows = int(ends[-1])
        metadata.bonus_logits_indices = ends - 1
        metadata.target_logits_indices = torch.tensor([row for row in range(rows) if row + 1 not in ends])
        logits = torch.rand(rows, VOCABULARY, generator=generator)
        # A mask of the client would be an infinity, and would keep the end from being forced.
        logits[:, [START, END, EOS]] = -1e4
        sampled = sampling_metadata(ROWS, processor)
        sampled = replace(sampled, temperature=torch.ones(ROWS), all_greedy=False, all_random=True)
        given = probabilities if has_probabilities else None
        found = rejection_sampler(metadata, given, logits, sampled).sampled_token_ids.tolist()
        for tokens, of in zip(outputs, found, strict=True):
            tokens += [token for token in of if token != -1]
        assert processor._sampler is not None, "it gave up"
    assert [tokens[limit : limit + 3] for tokens, limit in zip(outputs, limits, strict=True)] == [phrase] * ROWS
    assert all(END not in tokens[:limit] for tokens, limit in zip(outputs, limits, strict=True))


def test_entropies_of_drafts_are_reported_by_their_token(rejection_sampler: Any) -> None:
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    wire = Wire()
    sampler = make_sampler(wire, eos_guard=True)
    enter(sampler, [planned(7, NO_LIMIT, [], measured=True), planned(8, 1, [], measured=True)])
    logits = torch.randn(5, VOCABULARY)
    metadata = SpecDecodeMetadata.make_dummy([[140, 141], [142]], torch.device("cpu"))
    metadata.target_logits_indices = torch.tensor([0, 1, 3])
    metadata.bonus_logits_indices = torch.tensor([2, 4])
    rejection_sampler(metadata, None, logits.clone(), sampling_metadata(2, processor_of(sampler)))
    (report,) = wire.reports
    records = [report[i : i + 22] for i in range(0, len(report), 22)]
    told = [(int.from_bytes(r[1:9], "little"), int.from_bytes(r[9:13], "little")) for r in records]
    # The second request's limit forces its end after the draft.
    assert told == [(7, 0), (7, 1), (7, 2), (8, 0)]
    nats = [float(torch.frombuffer(bytearray(record[13:17]), dtype=torch.float32)) for record in records]
    expected = [float(torch.special.entr(row.double().softmax(-1)).sum()) for row in logits[:4]]
    assert nats == pytest.approx(expected, abs=1e-4)


def test_a_moved_seam_is_refused_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from meridian.vllm import speculation
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    monkeypatch.setattr(RejectionSampler, "forward", lambda self, metadata, logits: None)
    with pytest.raises(
        RuntimeError, match=r"^speculative_config: this vLLM's RejectionSampler.forward\(metadata, logits\)"
    ):
        speculation._wrap_rejection_sampler()


def test_an_engine_that_names_no_processor_is_untouched() -> None:
    from meridian.vllm import speculation
    from vllm.v1.sample import logits_processor

    speculation.install()
    speculation.install()
    build: Any = logits_processor.build_logitsprocs
    original = build.meridian
    assert not hasattr(original, "meridian"), "wrapped once"
    config: Any = SimpleNamespace(
        speculative_config=object(),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
    )
    device = torch.device("cpu")
    made = build(config, device, False, False)
    assert [type(one).__name__ for one in made.all] == ["MinTokensLogitsProcessor"]
    with pytest.raises(ValueError, match="Custom logits processors are not supported"):
        build(config, device, False, False, ("another:Processor",))


def test_other_engines_call_vllms_function_as_it_is() -> None:
    from meridian.vllm import speculation

    calls: list[Any] = []

    def build(
        vllm_config: Any, device: Any, is_pin_memory: bool, is_pooling_model: bool, custom_logitsprocs: Any = ()
    ) -> str:
        calls.append((vllm_config, device, custom_logitsprocs))
        return "made"

    built = speculation._building(build)
    plain, speculates = (SimpleNamespace(speculative_config=config) for config in (None, object()))
    for config, processors in [(plain, (Wire, speculation.OURS[0])), (speculates, (Wire, 7, "other:Processor"))]:
        assert built(config, "cpu", False, False, processors) == "made"
        assert calls.pop() == (config, "cpu", processors)
    everything = {"vllm_config": plain, "device": "cpu", "is_pin_memory": True, "is_pooling_model": False}
    assert built(**everything) == "made"
    # A vLLM whose function has other parameters.
    assert speculation._building(lambda config: config)(plain) is plain
    assert speculation._building(lambda config: config)(config=plain) is plain
