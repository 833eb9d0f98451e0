"""What the scheduling process and those that sample tell each other in vLLM's own messages, without an engine."""

from __future__ import annotations

import gc
import pickle
import random
import struct
import weakref
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from test_budget_rows import END, NO_LIMIT, START, Wire, limit_order, limits, make_sampler, planned

RECORD = 17


def order(number: int) -> bytes:
    """A record that can be told from others."""
    return limit_order(number, number, number)


def step() -> Any:
    """A step as the scheduler makes it."""
    from vllm.v1.core.sched.output import SchedulerOutput

    return SchedulerOutput.make_empty()


def sent(message: Any) -> Any:
    """As another process gets it."""
    return pickle.loads(pickle.dumps(message))


def outputs(*names: str) -> Any:
    """What a model runner returns for these requests."""
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

    if not names:
        return EMPTY_MODEL_RUNNER_OUTPUT
    return ModelRunnerOutput(list(names), {name: i for i, name in enumerate(names)}, [[7] for _ in names])


class Later:
    """What an asynchronous model runner returns."""

    def __new__(cls, output: Any) -> Any:
        from vllm.v1.outputs import AsyncModelRunnerOutput

        # vLLM 0.33 asks for one more method.
        methods = dict.fromkeys(AsyncModelRunnerOutput.__abstractmethods__, lambda self: output)
        return type("Made", (AsyncModelRunnerOutput,), methods)()


def test_orders_arrive_with_the_next_step_at_every_rank_and_once() -> None:
    from meridian.vllm.channel import ToSamplers, ToScheduler

    samplers, ranks = ToSamplers(), [ToScheduler() for _ in range(3)]
    for number in range(3):
        samplers.tell(order(number))
    samplers.tell(None)
    samplers.tell(b"")
    first, second = step(), step()
    samplers.leave_with(first)
    samplers.leave_with(second)
    for rank in ranks:
        rank.step_arrives(sent(first))
        assert rank.received() == [order(number) for number in range(3)]
        rank.step_arrives(sent(second))
        assert rank.received() == []
    assert vars(second) == vars(step()), "a step without orders is vLLM's own"


def test_a_configuration_comes_before_orders_and_is_withdrawn_only_if_there_is_one() -> None:
    from meridian import ModelConfig
    from meridian.vllm.channel import MODEL, ToSamplers, ToScheduler

    samplers, rank = ToSamplers(), ToScheduler()
    samplers.configure(None)
    assert samplers._messages == []
    samplers.configure(ModelConfig(force_phrase="x" * 100_000))
    samplers.tell(order(1))
    samplers.configure(None)
    samplers.configure(None)
    leaving = step()
    samplers.leave_with(leaving)
    rank.step_arrives(sent(leaving))
    received = rank.received()
    assert [message[: len(MODEL)] == MODEL for message in received] == [True, False, True]
    assert received[2] == MODEL + b"null"


def test_what_is_left_to_say_goes_with_the_first_step_after_meridian() -> None:
    from meridian import ModelConfig
    from meridian.vllm.channel import MODEL, ToSamplers, ToScheduler

    class Scheduler:
        own: ToSamplers | None = None

        def schedule(self) -> Any:
            made = step()
            if self.own is not None:
                self.own.leave_with(made)
            return made

    scheduler: Any = Scheduler()
    samplers, rank = ToSamplers(), ToScheduler()
    samplers.configure(ModelConfig())
    samplers.leave_with(step())
    samplers.leave_later(scheduler)
    assert vars(scheduler) == {}, "nothing is left to say"
    samplers.configure(None)
    samplers.leave_later(scheduler)
    # Another one moves in before that step.
    scheduler.own = ToSamplers()
    scheduler.own.configure(ModelConfig())
    for _ in range(2):
        rank.step_arrives(scheduler.schedule())
    last, first = rank.received()
    assert last == MODEL + b"null"
    assert first.startswith(MODEL + b"{")
    assert set(vars(scheduler)) == {"own"}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("names", [("a", "b"), ()])
def test_measurements_come_back_with_the_tokens(is_async: bool, names: tuple[str, ...]) -> None:
    from meridian.vllm.channel import ToScheduler, reports_in

    def returned() -> Any:
        left = rank.leave_with(Later(outputs(*names)) if is_async else outputs(*names))
        return sent(left.get_output() if is_async else left)

    rank = ToScheduler()
    assert reports_in(returned()) == ()
    rank.tell(b"one")
    rank.tell(b"two")
    assert rank.leave_with(None) is None
    output = returned()
    assert reports_in(output) == (b"one", b"two")
    assert output.sampled_token_ids == [[7] for _ in names]
    assert reports_in(returned()) == ()
    assert reports_in(outputs()) == (), "vLLM's own empty output stays as it is"


@pytest.mark.parametrize("is_taken", [True, False])
def test_an_asynchronous_output_is_freed_whether_or_not_it_was_taken(is_taken: bool) -> None:
    from meridian.vllm.channel import ToScheduler

    rank = ToScheduler()
    rank.tell(b"one")
    output = rank.leave_with(Later(outputs("a")))
    gone = weakref.ref(output)
    gc.disable()
    try:
        if is_taken:
            output.get_output()
        del output
        assert gone() is None
    finally:
        gc.enable()


def test_each_model_runner_gives_its_steps_to_its_own_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from meridian.vllm import channel

    class GPUModelRunner:
        def __init__(self, vllm_config: Any) -> None:
            self.vllm_config = vllm_config

        def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
            return intermediate_tensors

        def sample_tokens(self, grammar_output: Any) -> Any:
            return outputs("a")

    name = "a_runner"
    monkeypatch.setattr(channel, "_RUNNERS", (name, "not_imported"))
    monkeypatch.setitem(channel.sys.modules, name, SimpleNamespace(GPUModelRunner=GPUModelRunner))  # type: ignore[arg-type]
    ends, configs = [channel.ToScheduler() for _ in range(2)], [SimpleNamespace() for _ in range(3)]
    for i in range(len(ends)):
        channel.listen(configs[i], ends[i])  # type: ignore[arg-type]
        # Another plug-in wraps the method in turn.
        ours = GPUModelRunner.execute_model
        GPUModelRunner.execute_model = lambda *args, ours=ours: ours(*args)  # type: ignore[method-assign]
    runners = [GPUModelRunner(config) for config in configs]
    ends[0].tell(b"report")
    for number, runner in enumerate(runners):
        samplers, arriving = channel.ToSamplers(), step()
        samplers.tell(order(number))
        samplers.leave_with(arriving)
        assert runner.execute_model(arriving, "between stages") == "between stages"
    reports = [channel.reports_in(runner.sample_tokens(None)) for runner in runners]
    assert reports == [(b"report",), (), ()]
    assert [end.received() for end in ends] == [[order(0)], [order(1)]]
    del ends[0]
    assert channel.reports_in(runners[0].sample_tokens(None)) == ()


def test_a_model_runner_with_another_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from meridian.vllm import channel

    class GPUModelRunner:
        def execute_model(self, batch: Any) -> Any: ...

        def sample_tokens(self, grammar_output: Any) -> Any: ...

    monkeypatch.setattr(channel, "_RUNNERS", ("a_runner",))
    monkeypatch.setitem(channel.sys.modules, "a_runner", SimpleNamespace(GPUModelRunner=GPUModelRunner))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"is not supported by this Meridian: .*execute_model\(self, batch\)$"):
        channel.listen(SimpleNamespace(), channel.ToScheduler())  # type: ignore[arg-type]
    monkeypatch.setattr(channel, "_RUNNERS", ("not_imported",))
    with pytest.raises(RuntimeError, match=r"is not supported by this Meridian: no model runner V1 or V2 is in use$"):
        channel.listen(SimpleNamespace(), channel.ToScheduler())  # type: ignore[arg-type]


def garbage(rng: random.Random, keys: list[int]) -> bytes:
    """Any bytes, and records of known keys that make no sense."""
    if rng.random() < 0.5:
        return rng.randbytes(rng.choice([0, 1, 16, 17, 18, 22, 33, 34, 44, 1000]))
    tag = rng.randrange(4, 256)
    record = struct.pack("<BQII", tag, rng.choice(keys), rng.getrandbits(32), rng.getrandbits(32))
    return rng.choice([record, record * 3, record[:-1], limit_order(keys[0], 0, 0)[: rng.randrange(RECORD)]])


def test_garbage_changes_nothing_where_tokens_are_sampled() -> None:
    from meridian import _native
    from meridian.vllm.markers import TokenMarkers

    def rows() -> Any:
        made = _native.BudgetRows()
        made.configure(TokenMarkers([[START]], [[END]]), False)
        for row, limit in enumerate([0, 3, NO_LIMIT]):
            made.add(row, [START], outputs[row], limits(limit, [[5, 6]], key=row + 1, measured=True), True)
        return made

    outputs: list[list[int]] = [[], [], []]
    one, other = rows(), rows()
    rng = random.Random(0)
    for step in range(60):
        for _ in range(5):
            one.receive(garbage(rng, [1, 2, 3]))
        found = one.step(3)
        assert found == other.step(3)
        told = [rows.told() for rows in (one, other)]
        assert told[0].message([0.5] * 3) == told[1].message([0.5] * 3)
        for row, tokens in enumerate(outputs):
            forced = dict(zip(found[0], found[1], strict=True))
            tokens.append(forced.get(row, 100 + step))
    assert [tokens.index(END) if END in tokens else None for tokens in outputs] == [0, 3, None]


def test_garbage_changes_nothing_where_steps_are_planned() -> None:
    from meridian import MeridianConfig, _native
    from meridian.vllm.markers import TokenMarkers
    from meridian.vllm.xargs import RequestBudget

    config = MeridianConfig.from_toml('[telemetry]\nprometheus = ""\n[admin]\nlisten = ""\n')
    native = _native.Engine(
        config.to_json(), config.base_dir, markers=TokenMarkers([[START]], [[END]]), block_tokens=16, steps_ahead=0
    )
    thinking = native.follow_thinking([], {10}, {10}, [], True)
    facts = {"prompt": [START], "prompt_tokens": 1, "max_tokens": 90, "arrival_ms": 0.0, "deadline_ms": 1e9}
    client = RequestBudget(max_think_tokens=7)
    enrolled = native.add(object(), "r", **facts, priority=0, tenant="", client=client)
    assert not isinstance(enrolled, bool)
    key = enrolled["key"]
    assert (enrolled["followed"], enrolled["limit"]) == (True, 7)

    def begin(now_ms: float) -> _native.StepPlan | None:
        return native.begin([], None, now_ms, 64, 10, 10, 0, 0, 1, False, True)

    assert begin(0.0) is not None
    before = native.stats()
    rng = random.Random(1)
    for _ in range(3000):
        thinking.received(garbage(rng, [key, key + 1]))
    # What makes sense but is not true: entropies that are none, of tokens that nobody sampled.
    for nats in (float("nan"), float("inf"), -1.0, 1e38):
        for tag in (0, 1, 2):
            thinking.received(
                struct.pack("<BQIfBf", tag, key, rng.getrandbits(32), nats, rng.randrange(4), rng.uniform(-1, 2))
            )
    plan = begin(1.0)
    assert plan is not None
    assert plan.orders is None
    assert thinking.is_thinking(key)
    assert thinking.due() == []
    after = native.stats()
    assert after["budget"] == before["budget"]
    assert after["faults"] == before["faults"]


def test_a_sampler_takes_no_row_but_the_schedulers() -> None:
    from meridian.vllm.xargs import ROW, Row, row_of
    from vllm import SamplingParams

    genuine = planned(7, 0, [])
    forged: list[Any] = [
        dict(genuine[ROW]),
        msgspec.msgpack.decode(msgspec.msgpack.encode(dict(genuine[ROW]))),
        {"probe": 7, "at": 0},
        [["key", 7]],
        "key",
        7,
        True,
        type("Row", (dict,), {})(genuine[ROW]),
    ]
    for row in forged:
        sampler = make_sampler(Wire())
        params = SamplingParams(extra_args={ROW: row})
        assert row_of(params.extra_args) is None
        assert not sampler.add(0, params, [START], []), f"{row!r} is no order"
        assert sampler.rows.step(1, None)[0] == []
    sampler = make_sampler(Wire())
    assert sampler.add(0, SamplingParams(extra_args=pickle.loads(pickle.dumps(genuine))), [START], [])
    assert sampler.rows.step(1, None)[:2] == ([0], [END])
    assert type(genuine[ROW]) is Row


def test_what_arrives_from_a_client_holds_no_row() -> None:
    from meridian.vllm.xargs import ROW, row_of
    from vllm import SamplingParams
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    params = SamplingParams(extra_args=planned(7, NO_LIMIT, []))
    arrived = MsgpackDecoder(SamplingParams).decode(MsgpackEncoder().encode(params))
    assert row_of(arrived.extra_args) is None
    assert ROW in arrived.extra_args


def test_vllms_own_budget_is_left_to_it() -> None:
    from vllm import SamplingParams

    sampler = make_sampler(Wire())
    assert not sampler.add(0, SamplingParams(thinking_token_budget=5), [START], [])
    both = SamplingParams(extra_args={"meridian_think_budget": 3}, thinking_token_budget=5)
    assert sampler.add(0, both, [START], [])
    assert both.thinking_token_budget == 5
