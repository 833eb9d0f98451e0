"""Rows of the model runner V1 come, go and move; every request keeps its own budget.

vLLM's own `InputBatch` and `BatchUpdateBuilder` drive the sampler's half of Meridian; what each request must generate
is computed from its own tokens alone, by a few lines of Python.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch

VOCABULARY, EOS, START, END = 256, 2, 7, 8
ROWS = 12
NO_LIMIT = (1 << 32) - 1
# Tokens of the model's own: no marker, no phrase.
OWN = range(128, VOCABULARY)


class Letters:
    """A tokenizer with a token for every character, and one for each marker."""

    eos_token_id = EOS

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`."""
        found: list[int] = []
        while text:
            special = next((mark for mark in ("<think>", "</think>") if text.startswith(mark)), "")
            found.append({"<think>": START, "</think>": END}[special] if special else ord(text[0]))
            text = text[len(special or text[0]) :]
        return found


@dataclass
class Wire:
    """A channel that a test writes into and reads from."""

    orders: list[bytes] = field(default_factory=list)
    reports: list[bytes] = field(default_factory=list)

    def received(self) -> list[bytes]:
        """Orders since the last call."""
        taken, self.orders = self.orders, []
        return taken

    def tell(self, report: bytes) -> None:
        """Keep what was measured."""
        self.reports.append(report)


def limit_order(key: int, start: int, most: int) -> bytes:
    """The record of meridian-core's `Order::Limit`."""
    return struct.pack("<BQII", 0, key, start, most)


def gone_order(key: int) -> bytes:
    """The record of meridian-core's `Order::Gone`."""
    return struct.pack("<BQII", 1, key, 0, 0)


def measure_order(key: int, on: bool) -> bytes:
    """The record of meridian-core's `Order::Measure`."""
    return struct.pack("<BQII", 2, key, on, 0)


def make_sampler(wire: Any, **model: Any) -> Any:
    """The sampler's half of Meridian with made-up surroundings."""
    from meridian import MeridianConfig, ModelConfig
    from meridian.vllm.processor import _Sampler

    outputs = SimpleNamespace(reasoning_parser="", enable_in_reasoning=False)
    vllm_config: Any = SimpleNamespace(structured_outputs_config=outputs)
    return _Sampler(MeridianConfig(model=ModelConfig(**model)), vllm_config, Letters(), wire, [EOS])


def limits(limit: int = NO_LIMIT, interrupts: list[list[int]] | None = None, **fields: Any) -> dict[str, Any]:
    """The scheduler's limits for the sampler of one request."""
    return {
        "key": 1,
        "followed": True,
        "limit": limit,
        "interrupts": interrupts or [],
        "measured": False,
        "reserve": NO_LIMIT,
        "answers": False,
        "plain": False,
        **fields,
    }


def planned(key: int, limit: int, interrupts: list[list[int]], **fields: Any) -> dict[str, Any]:
    """What the scheduler says of a request with its parameters."""
    from meridian.vllm.xargs import Row

    return {"meridian_row": Row(limits(limit, interrupts, key=key, **fields))}


def params_of(extra: dict[str, Any]) -> Any:
    """Sampling parameters with these in `extra_args`."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, extra_args=extra, ignore_eos=True)


@dataclass
class Asked:
    """One request: what it was asked, what it has generated, and what it must generate next."""

    key: int
    forced: list[int]
    limit: int
    interrupts: list[list[int]]
    tokens: list[int] = field(default_factory=list)
    later: list[tuple[int, int]] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)

    def limit_from(self, start: int, most: int) -> None:
        """Another limit from a number of tokens on."""
        self.later.append((max(start, len(self.tokens)), most))

    def must_be(self) -> int | None:
        """The next token; None for whatever is sampled."""
        for at in range(len(self.tokens) + 1):
            begun = [(start, i, most) for i, (start, most) in enumerate(self.later) if start <= at]
            limit = max(begun)[2] if begun else self.limit
            done = self.tokens[:at]
            if at >= limit or any(done[i : i + len(p)] == p for p in self.interrupts for i in range(at)):
                emitted = len(self.tokens) - at
                return self.forced[emitted] if emitted < len(self.forced) else None
        return None


class Batch:
    """vLLM's batch of the model runner V1, and requests in it."""

    def __init__(self, sampler: Any, forced: list[int], *, ahead: bool = False) -> None:
        from vllm.v1.sample.logits_processor import LogitsProcessors
        from vllm.v1.worker.gpu_input_batch import InputBatch

        self.sampler, self.forced, self.ahead = sampler, forced, ahead
        self.wire: Wire = sampler._channel
        follower = SimpleNamespace(is_argmax_invariant=lambda: False, update_state=self._update_state)
        # vLLM 0.30 asks for the kernels' block sizes as well.
        kernels: dict[str, Any] = (
            {"kernel_block_sizes": [16]} if "kernel_block_sizes" in signature(InputBatch).parameters else {}
        )
        self.inner = InputBatch(
            **kernels,
            max_num_reqs=ROWS,
            max_model_len=512,
            max_num_batched_tokens=512,
            device=torch.device("cpu"),
            vocab_size=VOCABULARY,
            block_sizes=[16],
            max_num_blocks_per_req=[32],
            logitsprocs=LogitsProcessors([follower]),  # type: ignore[list-item]
            logitsprocs_need_output_token_ids=True,
        )
        self.all: dict[str, Asked] = {}

    def _update_state(self, update: Any) -> None:
        if update is not None:
            self.sampler.follow(update)
        self.sampler.receive()

    def ask(self, rng: random.Random) -> str:
        """A request that nobody has seen, not in the batch yet."""
        key = len(self.all) + 1
        limit = rng.choice([0, 1, rng.randint(2, 40), NO_LIMIT])
        interrupts = [[rng.choice(OWN), rng.choice(OWN)]] if rng.random() < 0.4 else []
        self.all[str(key)] = Asked(key, self.forced, limit, interrupts)
        return str(key)

    def add(self, name: str) -> None:
        """Into the batch, for the first time or again."""
        from vllm.v1.worker.gpu_input_batch import CachedRequestState

        asked = self.all[name]
        if self.ahead:
            # The model runner takes a list of known tokens from the scheduler.
            asked.outputs = list(asked.tokens)
        state = CachedRequestState(
            req_id=name,
            prompt_token_ids=[200, 201, START],
            mm_features=[],
            sampling_params=params_of(planned(asked.key, asked.limit, asked.interrupts)),
            generator=None,
            block_ids=([],),
            num_computed_tokens=0,
            output_token_ids=asked.outputs,
        )
        self.inner.add_request(state)

    def remove(self, name: str) -> None:
        """Out of the batch, for now or for good."""
        self.inner.remove_request(name)

    def order(self, name: str, start: int, most: int) -> None:
        """The scheduler changes a limit."""
        self.all[name].limit_from(start, most)
        self.wire.orders.append(limit_order(self.all[name].key, start, most))

    def step(self, rng: random.Random, sample: float = 1.0) -> None:
        """Sample one token for each row, or for a share of them, and compare with what has to come."""
        self.inner.refresh_metadata()
        names = self.inner.req_ids
        for name in names:
            # Placeholders become tokens before the logits processors run.
            self.all[name].outputs[:] = self.all[name].tokens
        logits = torch.rand(len(names), VOCABULARY)
        own = [rng.choice(OWN) for _ in names]
        logits[range(len(names)), own] = 5.0
        before = logits.clone()
        self.sampler.apply(logits, None)
        for row, name in enumerate(names):
            asked = self.all[name]
            must = asked.must_be()
            if must is None:
                assert torch.equal(logits[row], before[row]), f"{name} in row {row} was touched: {asked}"
            token = int(logits[row].argmax())
            assert token == (own[row] if must is None else must), f"{name} in row {row}: {asked}"
            if rng.random() < sample:
                asked.tokens.append(token)
                asked.outputs.append(-1 if self.ahead else token)


def drive(batch: Batch, rng: random.Random, steps: int) -> Iterator[str]:
    """Random comings, goings and moves; tells what it did."""
    away: list[str] = []
    for _ in range(steps):
        live = list(batch.inner.req_ids)
        for name in rng.sample(live, min(len(live), rng.choice([0, 0, 1, 3]))):
            batch.remove(name)
            if rng.random() < 0.3:
                batch.wire.orders.append(gone_order(batch.all[name].key))
                yield "ended"
            else:
                away.append(name)
                yield "preempted"
        # One that was preempted comes back in a later step.
        back = [name for name in away if name not in live]
        for name in rng.sample(back, min(len(back), rng.choice([0, 1, 2]), ROWS - batch.inner.num_reqs)):
            away.remove(name)
            batch.add(name)
            yield "resumed"
        while batch.inner.num_reqs < ROWS and rng.random() < 0.4:
            batch.add(batch.ask(rng))
            yield "added"
        batch.inner.condense()
        present = len(batch.inner.req_ids)
        for _ in range(rng.choice([0, 0, 1, 4]) if present > 1 else 0):
            batch.inner.swap_states(*rng.sample(range(present), 2))
            yield "swapped"
        for name in [*batch.inner.req_ids, *away]:
            if rng.random() < 0.03:
                known = len(batch.all[name].tokens)
                batch.order(name, known + rng.choice([0, 1, 5]), rng.choice([0, known + 3, NO_LIMIT]))
                yield "ordered"
        batch.step(rng, sample=0.9)


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(6))
def test_every_forced_token_lands_whatever_moves(seed: int, ahead: bool) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    batch = Batch(make_sampler(Wire(), force_phrase="ok</think>"), [ord("o"), ord("k"), END], ahead=ahead)
    done = list(drive(batch, rng, 250))
    assert {"ended", "preempted", "resumed", "added", "swapped", "ordered"} <= set(done)
    assert sum(END in asked.tokens for asked in batch.all.values()) > 30


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_a_changed_limit_outlives_a_reset_of_the_running_requests(ahead: bool) -> None:
    """`reset_prefix_cache(reset_running_requests=True)`: out of the batch and in again within one step."""
    rng = random.Random(1)
    batch = Batch(make_sampler(Wire()), [END], ahead=ahead)
    names = [batch.ask(rng) for _ in range(4)]
    for number, name in enumerate(names):
        batch.all[name].limit, batch.all[name].interrupts = NO_LIMIT, []
        batch.add(name)
        batch.order(name, 0, 6 + number)
    for _ in range(3):
        batch.step(rng)
    for name in names:
        batch.remove(name)
    for name in reversed(names):
        batch.add(name)
    batch.inner.condense()
    for _ in range(12):
        batch.step(rng)
    assert [batch.all[name].tokens.index(END) for name in names] == [6, 7, 8, 9]


def test_an_order_that_comes_late_ends_thinking_at_the_next_token_with_the_phrase() -> None:
    rng = random.Random(2)
    batch = Batch(make_sampler(Wire(), force_phrase="ok</think>"), [ord("o"), ord("k"), END])
    name = batch.ask(rng)
    batch.all[name].limit, batch.all[name].interrupts = NO_LIMIT, []
    batch.add(name)
    for _ in range(5):
        batch.step(rng)
    batch.order(name, 2, 0)
    for _ in range(4):
        batch.step(rng)
    assert batch.all[name].tokens[5:8] == [ord("o"), ord("k"), END]


def test_a_request_that_is_gone_leaves_nothing_to_its_row() -> None:
    sampler = make_sampler(Wire())
    sampler.rows.add(0, [START], [], limits(0), True)
    assert sampler.rows.step(1)[0] == [0]
    sampler.rows.receive(gone_order(1))
    sampler.rows.remove(0)
    assert sampler.rows.step(1) == ([], [], [], [])
    sampler.rows.add(0, [START], [], limits(), True)
    assert sampler.rows.step(1)[0] == [], "nothing was kept of it"
    sampler.rows.add_probe(0, 1, 3)
    assert sampler.rows.step(1)[3] == [0]
    assert sampler.rows.tokens(0) is None


@pytest.mark.parametrize("when", ["before it leaves", "while it is away"])
@pytest.mark.parametrize("on", [False, True])
def test_whether_a_request_is_measured_outlives_a_preemption(when: str, on: bool) -> None:
    rows = make_sampler(Wire()).rows
    outputs: list[int] = []
    rows.add(0, [START], outputs, limits(measured=not on), True)
    assert rows.step(1)[3] == [0] * (not on)
    if when == "before it leaves":
        rows.receive(measure_order(1, on))
        assert rows.step(1)[3] == [0] * on
    outputs.append(200)
    rows.remove(0)
    if when == "while it is away":
        rows.receive(measure_order(1, on))
    # The model runner has its parameters as they came.
    rows.add(2, [START], outputs, limits(measured=not on), True)
    assert rows.step(3)[3] == [2] * on


def test_an_idle_row_is_not_planned_until_an_order_arrives_and_then_catches_up() -> None:
    sampler = make_sampler(Wire(), force_phrase="ok</think>")
    rows, outputs = sampler.rows, list[int]()
    sampler.add(0, params_of(planned(1, 3, [], followed=False, measured=True)), [START], outputs)
    for token in range(200, 208):
        assert rows.is_idle
        assert rows.step(1) == ([], [], [], []), "no limit of its own binds, and nothing is measured"
        assert rows.tokens(0) == 0, "its tokens are not looked at"
        outputs.append(token)
    rows.receive(limit_order(1, 6, 7))
    assert not rows.is_idle
    # Eight tokens of thinking are more than seven.
    assert rows.step(1)[:2] == ([0], [ord("o")])
    assert rows.tokens(0) == 8
    rows.receive(limit_order(2, 0, 9))
    assert (rows.is_awaited(1), rows.is_awaited(2)) == (False, True)
    sampler.add(1, params_of(planned(2, NO_LIMIT, [], followed=False)), [START], [200])
    assert not rows.is_awaited(2)
    assert rows.tokens(1) == 1, "an order that came before it has woken it up"


@pytest.mark.parametrize("is_order", [limit_order(1, 0, 2), measure_order(1, True)], ids=["limit", "measure"])
def test_an_idle_row_is_idle_again_after_a_preemption_unless_an_order_came(is_order: bytes) -> None:
    sampler = make_sampler(Wire())
    extra = planned(1, NO_LIMIT, [], followed=False)
    sampler.add(0, params_of(extra), [START], [200, 201])
    sampler.rows.remove(0)
    sampler.add(3, params_of(extra), [START], [200, 201])
    assert sampler.rows.is_idle
    sampler.rows.receive(is_order)
    sampler.rows.remove(3)
    sampler.add(2, params_of(extra), [START], [200, 201])
    assert not sampler.rows.is_idle
    forced, _, _, measured = sampler.rows.step(3)
    assert (forced, measured) in (([2], []), ([], [2]))


@pytest.mark.parametrize("copies", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("steps_between", [0, 1])
def test_a_guarded_end_of_sequence_is_completed_after_a_preemption(steps_between: int, copies: bool) -> None:
    """The first token of a longer end marker stood for an end of sequence; the others have to follow."""
    from meridian import _native
    from meridian.vllm.markers import TokenMarkers

    rows = _native.BudgetRows()
    rows.configure(TokenMarkers([[START]], [[100, 101, 102]]), False)
    outputs = [200, 201]
    rows.add(0, [START], outputs, limits(), True)
    assert rows.step(1) == ([], [], [0], [])
    rows.guard([0])
    outputs.append(100)
    for _ in range(steps_between):
        assert rows.step(1) == ([0], [101], [], [])
        outputs.append(101)
    rows.remove(0)
    outputs = list(outputs) if copies else outputs
    rows.add(2, [START], outputs, limits(), True)
    following = [101, 102][steps_between:]
    for token in following:
        assert rows.step(3) == ([2], [token], [], [])
        outputs.append(token)
    assert rows.step(3) == ([], [], [], [])
