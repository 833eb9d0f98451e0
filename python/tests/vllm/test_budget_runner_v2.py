"""The interface of Model Runner V2. This machine has no GPU: the runner's tensors are made up, on the CPU, and so is
the runner that fills them; the processor, vLLM's loader and its `LogitsContext` are the real ones."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from test_budget_rows import END, NO_LIMIT, OWN, START, VOCABULARY, Wire, limit_order, make_sampler, planned
from torch.overrides import TorchFunctionMode

pytest.importorskip("vllm.v1.worker.gpu.sample.logits_processor", reason="vLLM 0.30 has no such interface")

SLOTS, LENGTH = 8, 256
NAME = "meridian.vllm:BudgetLogitsProcessor"


@dataclass
class Asked:
    """One request; `extra` is what its parameters carry."""

    extra: dict[str, Any] | None
    prompt: list[int] = field(default_factory=lambda: [200, 201, 202, START])
    tokens: list[int] = field(default_factory=list)
    slot: int = -1
    # Tokens of a piece of the prompt, while it is computed in pieces.
    computed: int | None = None
    is_taken: bool = False


class Runner:
    """What the model runner does around the processor, with tensors on the CPU."""

    def __init__(self) -> None:
        from meridian.vllm import BudgetLogitsProcessor
        from meridian.vllm.processor import _Slots

        self.wire = Wire()
        self.states = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=torch.zeros(SLOTS, LENGTH, dtype=torch.int32)),
            prompt_len=SimpleNamespace(np=np.zeros(SLOTS, dtype=np.int32)),
            prefill_len=SimpleNamespace(np=np.zeros(SLOTS, dtype=np.int32)),
        )
        # As its constructor leaves it, without the engine's configuration.
        self.processor = object.__new__(BudgetLogitsProcessor)
        sampler = make_sampler(self.wire, force_phrase="ok</think>")
        self.processor._sampler = sampler
        self.processor._slots = _Slots(sampler, self.states)
        self.rng = random.Random(0)

    def add(self, asked: Asked, slot: int) -> bool:
        """Into a slot, for the first time or again after a preemption."""
        from vllm import SamplingParams

        asked.slot = slot
        known = [*asked.prompt, *asked.tokens]
        self.states.all_token_ids.gpu[slot] = 0
        self.states.all_token_ids.gpu[slot, : len(known)] = torch.tensor(known, dtype=torch.int32)
        self.states.prompt_len.np[slot] = len(asked.prompt)
        self.states.prefill_len.np[slot] = len(known)
        params = SamplingParams(temperature=0.0, ignore_eos=True, extra_args=asked.extra)
        asked.is_taken = self.processor.add_request(slot, params)
        return asked.is_taken

    def step(self, requests: list[Asked]) -> torch.Tensor:
        """One token for each whose prompt is computed, in this order of rows; returns the rows before and after."""
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext

        self.processor.apply_staged_writes()
        slots = torch.tensor([asked.slot for asked in requests])
        lengths = [
            len(asked.prompt) + len(asked.tokens) if asked.computed is None else asked.computed for asked in requests
        ]
        known = self.states.all_token_ids.gpu
        ctx = LogitsContext(
            expanded_idx_mapping=slots,
            idx_mapping=slots,
            idx_mapping_np=slots.numpy(),
            expanded_local_pos=torch.zeros(len(requests), dtype=torch.int32),
            input_ids=torch.stack(
                [known[asked.slot, length - 1] for asked, length in zip(requests, lengths, strict=True)]
            ),
            pos=torch.tensor(lengths) - 1,
            seq_lens_upper_bound_np=np.array(lengths),
        )
        logits = torch.rand(len(requests), VOCABULARY)
        logits[range(len(requests)), [self.rng.choice(OWN) for _ in requests]] = 5.0
        before = logits.clone()
        after = self.processor.apply(logits, ctx)
        assert self.processor._sampler is not None, "Meridian gave up"
        for row, asked in enumerate(requests):
            if asked.computed is not None or not asked.is_taken:
                assert torch.equal(after[row], before[row]), "nothing is forced here"
            if asked.computed is None:
                asked.tokens.append(int(after[row].argmax()))
                known[asked.slot, len(asked.prompt) + len(asked.tokens) - 1] = asked.tokens[-1]
        return after

    def verify(self, requests: list[Asked], true: dict[int, list[int]]) -> None:
        """A step with drafts: right ones for a while, then others. `true` are the tokens of each slot without them."""
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext

        self.processor.apply_staged_writes()
        rng, known = self.rng, self.states.all_token_ids.gpu
        slots, inputs, positions, offsets, counts, logits = [], [], [], [], [], []
        for asked in requests:
            ahead = true[asked.slot][len(asked.tokens) :][: rng.randint(0, 4)]
            right = rng.randint(0, 4)
            drafts = [token if i < right else rng.choice((*OWN, END)) for i, token in enumerate(ahead)]
            counts.append(len(drafts) + 1)
            length = len(asked.prompt) + len(asked.tokens)
            for i, token in enumerate((int(known[asked.slot, length - 1]), *drafts)):
                slots.append(asked.slot)
                inputs.append(token)
                positions.append(length - 1 + i)
                offsets.append(i)
                row = torch.rand(VOCABULARY)
                row[self.likeliest(asked, [*asked.tokens, *drafts[:i]])] = 5.0
                logits.append(row)
        batch = torch.tensor([asked.slot for asked in requests])
        ctx = LogitsContext(
            expanded_idx_mapping=torch.tensor(slots),
            idx_mapping=batch,
            idx_mapping_np=batch.numpy(),
            expanded_local_pos=torch.tensor(offsets, dtype=torch.int32),
            input_ids=torch.tensor(inputs, dtype=torch.int32),
            pos=torch.tensor(positions),
            seq_lens_upper_bound_np=np.array([0]),
        )
        after = self.processor.apply(torch.stack(logits), ctx).argmax(dim=1).tolist()
        assert self.processor._sampler is not None, "Meridian gave up"
        first = 0
        for asked, count in zip(requests, counts, strict=True):
            for row in range(first, first + count):
                asked.tokens.append(after[row])
                known[asked.slot, len(asked.prompt) + len(asked.tokens) - 1] = after[row]
                if row + 1 < first + count and inputs[row + 1] != after[row]:
                    break
            first += count

    @staticmethod
    def likeliest(asked: Asked, tokens: list[int]) -> int:
        """The token that a greedy model would generate."""
        return random.Random(f"{asked.slot} {tokens}").choice(OWN)


def budget(tokens: int) -> dict[str, Any]:
    """What a client sends."""
    return {"meridian_think_budget": tokens}


def ends(asked: Asked) -> list[int]:
    """Where the forced phrase begins."""
    phrase = [ord("o"), ord("k"), END]
    return [i for i in range(len(asked.tokens)) if asked.tokens[i : i + 3] == phrase]


def test_budgets_land_in_whatever_order_the_rows_come() -> None:
    runner = Runner()
    budgets = [0, 1, 5, 9, 12, 17]
    requests = [Asked(budget(tokens)) for tokens in budgets]
    for asked, slot in zip(requests, [5, 0, 3, 7, 1, 2], strict=True):
        assert runner.add(asked, slot)
    for _ in range(24):
        runner.step(runner.rng.sample(requests, len(requests)))
    assert [ends(asked) for asked in requests] == [[tokens] for tokens in budgets]


def test_a_request_that_is_left_out_of_steps_goes_on_where_it_was() -> None:
    runner = Runner()
    requests = [Asked(budget(tokens)) for tokens in (6, 8, 10)]
    for slot, asked in enumerate(requests):
        runner.add(asked, slot)
    for _ in range(40):
        runner.step(runner.rng.sample(requests, runner.rng.randint(1, 3)))
    assert [ends(asked) for asked in requests] == [[6], [8], [10]]


class HostReads(TorchFunctionMode):
    """Fails, as a capture would, when the host reads from the device more often than `most`.

    vLLM captures the model alone in a CUDA graph (vllm/v1/worker/gpu/cudagraph_utils.py), and not its sampler. A read
    there is possible, and makes the host wait for the step.
    """

    NAMES = frozenset({"tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"})

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.seen = most, list[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.NAMES:
            self.seen.append(name)
            assert len(self.seen) <= self.most, f"the host waits for the device: {self.seen}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("kinds", "most"),
    [
        ([None, None], 0),
        ([budget(3), None], 1),
        ([planned(1, 4, [[129, 130]]), budget(2), None], 1),
        ([planned(1, NO_LIMIT, [], measured=True), planned(2, 5, [])], 1),
    ],
    ids=["nothing set", "a budget", "a pattern", "measured"],
)
def test_a_step_waits_for_the_device_at_most_once(kinds: list[Any], most: int) -> None:
    from meridian.vllm import processor

    runner = Runner()
    requests = [Asked(extra) for extra in kinds]
    for slot, asked in enumerate(requests):
        runner.add(asked, slot)
    # The first step reads the ends of the prompts.
    runner.step(requests)
    apply = runner.processor.apply

    def watched(logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        reads = HostReads(most)
        # Entropies are read when a device has them; here a torch operation stands in for the kernel.
        with mock.patch.object(processor.Reports, "flush", return_value=None), reads:
            return apply(logits, ctx)

    runner.processor.apply = watched  # type: ignore[method-assign, assignment]
    for _ in range(8):
        runner.step(requests)


def test_a_piece_of_a_prompt_is_not_counted() -> None:
    runner = Runner()
    cut, other = Asked(budget(0), prompt=[*range(200, 220), START]), Asked(budget(4))
    runner.add(cut, 4)
    runner.add(other, 1)
    for computed in (6, 12, 18):
        cut.computed = computed
        runner.step([other, cut])
    cut.computed = None
    for _ in range(5):
        runner.step([cut, other])
    assert (ends(cut), ends(other)) == ([0], [4])


@pytest.mark.parametrize("slots", [(2, 6), (6, 2), (2, 2)])
@pytest.mark.parametrize("extra", [budget(9), planned(1, 9, [])], ids=["client", "scheduler"])
def test_a_preempted_request_ends_where_it_had_to(extra: dict[str, Any], slots: tuple[int, int]) -> None:
    runner = Runner()
    asked, other = Asked(extra), Asked(budget(3))
    runner.add(asked, slots[0])
    runner.add(other, 0)
    for _ in range(5):
        runner.step([asked, other])
    for _ in range(2):
        runner.step([other])
    runner.add(asked, slots[1])
    # What it has generated is computed again, in pieces.
    for computed in (3, 6):
        asked.computed = computed
        runner.step([asked, other])
    asked.computed = None
    for _ in range(9):
        runner.step([asked, other])
    assert (ends(asked), ends(other)) == ([9], [3])


def test_a_request_that_is_preempted_inside_the_phrase_completes_it() -> None:
    runner = Runner()
    asked = Asked(planned(1, 3, []))
    runner.add(asked, 1)
    for _ in range(4):
        runner.step([asked])
    runner.add(asked, 3)
    for _ in range(4):
        runner.step([asked])
    assert ends(asked) == [3]


@pytest.mark.parametrize("slots", [(2, 6), (6, 2)])
def test_a_changed_limit_outlives_a_preemption(slots: tuple[int, int]) -> None:
    runner = Runner()
    asked = Asked(planned(1, NO_LIMIT, []))
    runner.add(asked, slots[0])
    runner.wire.orders.append(limit_order(1, 0, 8))
    for _ in range(4):
        runner.step([asked])
    runner.add(asked, slots[1])
    for _ in range(8):
        runner.step([asked])
    assert ends(asked) == [8]


@pytest.mark.parametrize("slots", [(2, 6), (6, 2)])
def test_an_order_finds_the_slot_that_a_resumed_request_has_now(slots: tuple[int, int]) -> None:
    runner = Runner()
    asked = Asked(planned(1, NO_LIMIT, []))
    runner.add(asked, slots[0])
    for _ in range(4):
        runner.step([asked])
    runner.add(asked, slots[1])
    runner.step([asked])
    runner.wire.orders.append(limit_order(1, 5, 0))
    for _ in range(6):
        runner.step([asked])
    assert ends(asked) == [5]


def test_a_slot_has_nothing_of_whoever_had_it_before() -> None:
    runner = Runner()
    first, second, third = Asked(budget(3)), Asked(budget(7)), Asked(None)
    for asked in (first, second, third):
        runner.add(asked, 4)
        for _ in range(14):
            runner.step([asked])
    assert (ends(first), ends(second), ends(third)) == ([3], [7], [])


def test_a_request_with_nothing_set_is_declined() -> None:
    runner = Runner()
    assert not runner.add(Asked(None), 0)
    assert not runner.add(Asked({"somebody_elses": 3}), 1)
    assert runner.add(Asked(budget(0)), 2)
    assert runner.add(Asked(planned(1, NO_LIMIT, [])), 3)
    assert not runner.add(Asked(planned(2, NO_LIMIT, [], followed=False)), 4)


def test_what_is_measured_is_reported_for_the_row_of_the_request() -> None:
    from meridian import kernels

    runner = Runner()
    asked, other = Asked(planned(9, NO_LIMIT, [], measured=True)), Asked(None)
    runner.add(asked, 5)
    runner.add(other, 0)
    for number in range(3):
        after = runner.step([other, asked])
        report = runner.wire.reports.pop()
        assert len(report) == 22
        assert int.from_bytes(report[1:9], "little") == 9
        assert int.from_bytes(report[9:13], "little") == number
        assert np.frombuffer(report[13:17], dtype="<f4")[0] == pytest.approx(float(kernels.entropy(after)[1]), abs=1e-6)


def test_the_loaders_of_both_runners_accept_the_class() -> None:
    from meridian.vllm import BudgetLogitsProcessor
    from vllm.v1.sample import logits_processor as one
    from vllm.v1.worker.gpu.sample.logits_processor import loader as two

    assert one._load_logitsprocs_by_fqcns([NAME]) == [BudgetLogitsProcessor]
    assert one._load_logitsprocs_by_fqcns([BudgetLogitsProcessor]) == [BudgetLogitsProcessor]
    assert two._load_v2_logitsprocs_by_fqcns([NAME, BudgetLogitsProcessor]) == [BudgetLogitsProcessor] * 2
    assert object.__new__(BudgetLogitsProcessor).is_argmax_invariant() is False


def test_the_loaders_validator_refuses_a_bad_budget() -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.worker.gpu.sample.logits_processor import build_custom_logits_processors_params_validator

    validate = build_custom_logits_processors_params_validator([NAME])
    validate(SamplingParams(extra_args=budget(3)))
    with pytest.raises(VLLMValidationError, match=r"meridian_think_budget: -1: expected an integer"):
        validate(SamplingParams(extra_args=budget(-1)))


def test_budgets_land_inside_drafts() -> None:
    runner = Runner()
    budgets = [0, 1, 5, 9, 12, 17]
    requests = [Asked(budget(tokens)) for tokens in budgets]
    true = {}
    for slot, (asked, tokens) in enumerate(zip(requests, budgets, strict=True)):
        assert runner.add(asked, slot)
        own = true[slot] = []
        while len(own) < 30:
            forced = [ord("o"), ord("k"), END][len(own) - tokens :] if tokens <= len(own) < tokens + 3 else []
            own.append(forced[0] if forced else runner.likeliest(asked, own))
    steps = 0
    while any(len(asked.tokens) < 24 for asked in requests):
        runner.verify(runner.rng.sample(requests, runner.rng.randint(1, len(requests))), true)
        steps += 1
    for asked in requests:
        assert asked.tokens[:24] == true[asked.slot][:24]
    assert steps < 60, "drafts were accepted"


def test_speculation_on_runner_v1_without_the_plugin_is_refused_with_one_line() -> None:
    from meridian.vllm import BudgetLogitsProcessor

    config: Any = SimpleNamespace(speculative_config=object())
    with pytest.raises(ValueError, match=r"^speculative_config: meridian.vllm:BudgetLogitsProcessor") as refused:
        BudgetLogitsProcessor(config, torch.device("cpu"), False)
    assert "\n" not in str(refused.value)
