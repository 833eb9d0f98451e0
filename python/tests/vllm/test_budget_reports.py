"""Entropies that come later than their step, as those of a device; made up, by a launch that answers when told to.
And the reports to clients of requests with several choices; `test_doors.py` has them over HTTP."""

from __future__ import annotations

import itertools
import json
import os
import struct
from copy import copy
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from meridian import kernels
from test_budget_logits import logits_of, take
from test_budget_rows import END, EOS, NO_LIMIT, VOCABULARY, Wire, make_sampler, planned

NATIVE, GUARDED = 0, 1


@dataclass
class Later:
    """Answers that are there when they are let come."""

    entropies_of: list[float]
    backend: str = "cuda"
    is_there: bool = False
    is_waited_for: bool = False
    fails: bool = False

    def ready(self) -> bool:
        """Without waiting."""
        return self.is_there

    def entropies(self) -> list[float]:
        """Waits, as far as anybody can tell."""
        self.is_waited_for = not self.is_there
        if self.fails:
            raise kernels.KernelError("the launch failed with code 700")
        return self.entropies_of


@dataclass
class Device:
    """Launches, in their order."""

    launched: list[Later] = field(default_factory=list)
    required: list[str | None] = field(default_factory=list)
    refuses: bool = False

    def launch(self, logits: torch.Tensor, rows: list[int], *, require: str | None = None) -> Any:
        """As `kernels.launch`; an entropy is the number of the launch and the first logit of its row."""
        self.required.append(require)
        if require == "torch":
            return Later([-1.0 for _ in rows], backend="torch", is_there=True)
        if self.refuses:
            raise kernels.KernelError("9 launches are under way")
        number = 100.0 * len(self.launched)
        self.launched.append(Later([number + float(logits[row, 0]) for row in rows]))
        return self.launched[-1]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """In place of the kernels."""
    found = Device()
    monkeypatch.setattr(kernels, "launch", found.launch)
    return found


def told(wire: Wire) -> list[tuple[int, int, int, float]]:
    """Records since the last call: what, key, token, nats."""
    whole = b"".join(wire.reports)
    wire.reports.clear()
    return [record[:4] for record in struct.iter_unpack("<BQIfBf", whole)]


def measured_logits(value: float) -> torch.Tensor:
    """Logits that name their row and step in the first one."""
    logits = logits_of()
    logits[:, 0] = torch.arange(len(logits)) + value
    return logits


def test_steps_are_told_in_their_order_when_they_are_there(device: Device) -> None:
    wire = Wire()
    sampler = make_sampler(wire)
    outputs = take(sampler, 1, planned(7, NO_LIMIT, [], measured=True), ignore_eos=True)
    for number in range(3):
        sampler.apply(measured_logits(0), None)
        outputs.append(200 + number)
    assert told(wire) == []
    # The second is there: the first does not let it pass.
    device.launched[1].is_there = True
    sampler.receive()
    assert told(wire) == []
    device.launched[0].is_there = True
    sampler.receive()
    assert told(wire) == [(NATIVE, 7, 0, 1.0), (NATIVE, 7, 1, 101.0)]
    device.launched[2].is_there = True
    sampler.apply(measured_logits(0), None)
    assert told(wire) == [(NATIVE, 7, 2, 201.0)]
    assert not any(later.is_waited_for for later in device.launched)


def test_rows_are_measured_before_they_are_forced(device: Device) -> None:
    sampler = make_sampler(Wire(), eos_guard=True)
    take(sampler, 0, planned(7, NO_LIMIT, [], measured=True), ignore_eos=True)
    take(sampler, 3, {"meridian_think_budget": 0})
    logits = measured_logits(5)
    logits[3, EOS] = 3.0
    sampler.apply(logits, None)
    assert torch.equal(logits[3].softmax(-1), torch.eye(VOCABULARY)[END])
    assert device.launched[0].entropies_of == [5.0]


def test_a_device_that_is_far_behind_is_waited_for(device: Device) -> None:
    from meridian.vllm.reports import MOST_UNDER_WAY

    wire = Wire()
    sampler = make_sampler(wire)
    outputs = take(sampler, 0, planned(7, NO_LIMIT, [], measured=True), ignore_eos=True)
    for number in range(MOST_UNDER_WAY + 3):
        sampler.apply(measured_logits(0), None)
        outputs.append(200 + number)
    assert [later.is_waited_for for later in device.launched] == [True] * 3 + [False] * MOST_UNDER_WAY
    assert [token for _, _, token, _ in told(wire)] == [0, 1, 2]


def test_what_a_guard_did_is_told_with_its_step_and_after_what_was_before(device: Device) -> None:
    """The scheduler has to know before the token: nothing may wait any longer."""
    wire = Wire()
    sampler = make_sampler(wire, eos_guard=True)
    outputs = take(sampler, 1, planned(7, NO_LIMIT, [], measured=True))
    take(sampler, 4, planned(8, NO_LIMIT, []))
    quiet = measured_logits(0)
    quiet[:, EOS], quiet[:, END] = float("-inf"), 1.0
    sampler.apply(quiet, None)
    outputs.append(200)
    assert told(wire) == []
    loud = measured_logits(0)
    loud[:, EOS], loud[:, END] = 9.0, 1.0
    sampler.apply(loud, None)
    first, second, guarded = told(wire)
    assert (first, second) == ((NATIVE, 7, 0, 1.0), (GUARDED, 7, 1, 101.0))
    # Nobody measured this one.
    assert guarded[:3] == (GUARDED, 8, 0)
    assert guarded[3] != guarded[3]


def test_a_guard_alone_is_told_while_nothing_is_measured(device: Device) -> None:
    wire = Wire()
    sampler = make_sampler(wire, eos_guard=True)
    take(sampler, 4, planned(8, NO_LIMIT, []))
    logits = measured_logits(0)
    logits[4, EOS], logits[4, END] = 9.0, 1.0
    sampler.apply(logits, None)
    assert [record[:3] for record in told(wire)] == [(GUARDED, 8, 0)]
    assert device.launched == []


def test_a_launch_that_fails_is_torchs_in_the_same_step(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    wire = Wire()
    sampler = make_sampler(wire)
    outputs = take(sampler, 2, planned(7, NO_LIMIT, [], measured=True), ignore_eos=True)
    device.refuses = True
    for number in range(2):
        sampler.apply(measured_logits(0), None)
        outputs.append(200 + number)
    assert told(wire) == [(NATIVE, 7, 0, -1.0), (NATIVE, 7, 1, -1.0)]
    device.refuses = False
    sampler.apply(measured_logits(0), None)
    assert device.required == [None, "torch", None, "torch", None]
    assert [record.getMessage() for record in caplog.records] == [
        "meridian: the kernels failed, torch measures entropies instead: 9 launches are under way"
    ]


def test_answers_that_do_not_come_are_not_told_and_the_kernels_not_asked_again(device: Device) -> None:
    wire = Wire()
    sampler = make_sampler(wire)
    outputs = take(sampler, 2, planned(7, NO_LIMIT, [], measured=True), ignore_eos=True)
    sampler.apply(measured_logits(0), None)
    outputs.append(200)
    device.launched[0].fails = device.launched[0].is_there = True
    sampler.apply(measured_logits(0), None)
    # The second was begun before anybody knew.
    (lost,) = told(wire)
    assert lost[:3] == (NATIVE, 7, 0)
    assert lost[3] != lost[3]
    outputs.append(201)
    device.launched[1].is_there = True
    sampler.apply(measured_logits(0), None)
    assert told(wire) == [(NATIVE, 7, 1, 102.0), (NATIVE, 7, 2, -1.0)]
    assert device.required == [None, None, "torch"]


# Reports of several choices, in vLLM's front end.


class Choices:
    """A request of three choices, of which the engine sends the ends."""

    def __init__(self, **fields: Any) -> None:
        from meridian.vllm import answers
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.output_processor import OutputProcessor
        from vllm.v1.engine.parallel_sampling import ParentRequest

        answers.install()
        answers.install()
        self.processor = OutputProcessor(None, log_stats=False)
        params = SamplingParams(
            **{
                "n": 3,
                "extra_args": {"meridian_think_report": 1},
                "output_kind": RequestOutputKind.FINAL_ONLY,
                **fields,
            }
        )
        request = EngineCoreRequest(
            request_id="a",
            external_req_id="a",
            prompt_token_ids=[1],
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        if params.n == 1:
            self.processor.add_request(request, None)
            return
        parent = ParentRequest(request)
        for index in range(params.n):
            child = copy(request)
            child.request_id, child.sampling_params = parent.get_child_info(index)
            self.processor.add_request(child, None, parent, index)

    def end(self, name: str, told: dict[str, Any] | None) -> list[Any]:
        """What the client gets once the engine has ended this request, with this in `kv_transfer_params`."""
        from vllm.v1.engine import EngineCoreOutput, FinishReason

        output = EngineCoreOutput(
            request_id=name, new_token_ids=[5], finish_reason=FinishReason.LENGTH, kv_transfer_params=told
        )
        done: Any = self.processor.process_outputs([output]).request_outputs
        return [each.kv_transfer_params for each in done]


def own_of(index: int) -> dict[str, Any]:
    return {"think_tokens": 10 + index, "think_end": "hard-cap", "reopened": index}


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_choice_that_ends_last_has_the_report_of_each(order: tuple[int, ...]) -> None:
    choices = Choices()
    *early, last = order
    for index in early:
        assert choices.end(f"{index}_a", {"meridian": own_of(index)}) == []
    told = {**own_of(last), "choices": {str(index): own_of(index) for index in range(3)}}
    (found,) = choices.end(f"{last}_a", {"meridian": own_of(last)})
    assert found == {"meridian": told}
    assert list(found["meridian"]["choices"]) == ["0", "1", "2"]
    assert not choices.processor.request_states
    assert not choices.processor.parent_requests


def test_a_choice_without_a_report_takes_none_from_the_others() -> None:
    """vLLM's front end ends it by itself, as with a stop string, so its engine reports nothing."""
    choices = Choices()
    choices.end("2_a", {"meridian": own_of(2)})
    choices.end("0_a", {"meridian": own_of(0)})
    assert choices.end("1_a", None) == [{"meridian": {"choices": {"0": own_of(0), "2": own_of(2)}}}]
    nothing = Choices()
    assert [nothing.end(f"{index}_a", None) for index in range(3)] == [[], [], [None]]


def test_a_stream_has_the_reports_so_far() -> None:
    from vllm.sampling_params import RequestOutputKind

    choices = Choices(output_kind=RequestOutputKind.DELTA)
    (first,) = choices.end("1_a", {"meridian": own_of(1)})
    assert first == {"meridian": {**own_of(1), "choices": {"1": own_of(1)}}}
    (second,) = choices.end("0_a", {"meridian": own_of(0)})
    assert second == {"meridian": {**own_of(0), "choices": {"0": own_of(0), "1": own_of(1)}}}
    # Later reports do not change those that were sent.
    assert list(first["meridian"]["choices"]) == ["1"]


def test_parameters_of_a_connector_stay() -> None:
    choices = Choices()
    choices.end("0_a", {"meridian": own_of(0)})
    choices.end("1_a", {"remote": 1})
    assert choices.end("2_a", {"remote": 2}) == [{"remote": 2}]


def test_one_choice_is_as_the_engine_says_it() -> None:
    assert Choices(n=1).end("a", {"meridian": own_of(0)}) == [{"meridian": own_of(0)}]


def test_requests_that_ask_for_no_report_are_vllms_own() -> None:
    for fields, kind in (({"extra_args": {}}, "RequestState"), ({}, "MeridianRequestState")):
        assert {type(state).__name__ for state in Choices(**fields).processor.request_states.values()} == {kind}
    (state,) = Choices(n=1).processor.request_states.values()
    assert type(state).__name__ == "RequestState"


OFFLINE = """
import json, sys
from vllm import LLM, SamplingParams

llm = LLM(model=sys.argv[1], scheduler_cls="meridian.vllm.MeridianScheduler", max_model_len=1024, enforce_eager=True,
          logits_processors=["meridian.vllm:BudgetLogitsProcessor"], dtype="float32", max_num_seqs=8, block_size=32)
prompt = "<|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n<think>\\n"
found = []
for n in (1, 4):
    # One token in ten ends a choice, so that they end at different steps.
    params = SamplingParams(n=n, max_tokens=200, seed=1, ignore_eos=True, stop_token_ids=list(range(300, 500)),
                            extra_args={"meridian_think_report": 1, "meridian_think_budget": 4})
    (done,) = llm.generate([prompt], params, use_tqdm=False)
    found.append([done.kv_transfer_params, [list(one.token_ids) for one in done.outputs]])
end = llm.get_tokenizer().encode("</think>", add_special_tokens=False)[0]
print(json.dumps([found, end]))
"""


@pytest.mark.skipif(find_spec("vllm._C") is None, reason="this vLLM has no CPU build, so no engine runs")
def test_the_engine_reports_each_choice(tmp_path: Path) -> None:
    from meridian.vllm.bench.model import model_dir
    from meridian.vllm.bench.run import ENVIRONMENT

    config = tmp_path / "meridian.toml"
    config.write_text(
        "[scheduler]\nmin_think_tokens = 0\n[entropy]\nenabled = false\n[admin]\nlisten = ''\n"
        "[telemetry]\nprometheus = ''\n"
    )
    env = {**os.environ, **ENVIRONMENT, "MERIDIAN_CONFIG": str(config)}
    done = fresh.run(None, str(model_dir()), code=OFFLINE, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    ((one, _), (several, tokens)), end = json.loads(done.stdout.splitlines()[-1])
    assert set(one["meridian"]) == {"think_tokens", "think_end", "reopened"}
    assert len({len(each) for each in tokens}) > 1, "they end together"
    choices = several["meridian"].pop("choices")
    # The end marker counts; a choice may end before its budget.
    assert [choices[str(index)]["think_tokens"] for index in range(4)] == [
        each.index(end) + 1 if end in each else len(each) for each in tokens
    ]
    assert several["meridian"] in choices.values()
