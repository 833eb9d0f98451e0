"""Entropies that come later than their step, as those of a device; made up, by a launch that answers when told to."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

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
    sampler = make_sampler(Wire())
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
    sampler = make_sampler(wire)
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
    sampler = make_sampler(wire)
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
