"""Rows of logits through `meridian.kernels`: from torch, numpy and bare addresses, by the kernels and by torch."""

from __future__ import annotations

import gc
import logging
import math
import threading
from typing import Any, Literal

import numpy as np
import pytest
import torch
from meridian import kernels
from meridian.kernels import EatStates, KernelError, KernelUnavailable, Probes, RawLogits

Required = Literal["native", "torch"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
REQUIRED: list[Required] = ["native", "torch"]


def made(rows: int, vocab: int, dtype: torch.dtype = torch.float32, layout: str = "packed") -> torch.Tensor:
    """Rows as a model gives them; some tokens are masked."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 6
    logits[0, vocab // 2 + 1 :] = float("-inf")
    logits = logits.to(dtype)
    if layout == "wide":
        wide = torch.full((rows, vocab + 13), 1e4).to(dtype)
        wide[:, :vocab] = logits
        return wide[:, :vocab]
    if layout == "every other row":
        return logits.repeat_interleave(2, dim=0)[::2]
    return logits


def expected(logits: torch.Tensor, rows: list[int], tokens: list[int], scales: list[float]) -> dict[str, torch.Tensor]:
    """The same in 64 bits."""
    x = logits[rows].double()
    logs = (x / torch.tensor(scales)[:, None]).log_softmax(-1)
    inside = [0 <= token < logits.shape[1] for token in tokens]
    found = logs.exp()[range(len(rows)), [token * is_in for token, is_in in zip(tokens, inside, strict=True)]]
    return {
        "entropy": torch.special.entr(logs.exp()).sum(-1),
        "max": x.max(-1).values,
        "logsumexp": (x / torch.tensor(scales)[:, None]).logsumexp(-1),
        "probability": torch.where(torch.tensor(inside), found, float("nan")),
        "top": x.argmax(-1),
    }


@pytest.mark.parametrize("require", REQUIRED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 2, 255, 32_000])
@pytest.mark.parametrize("layout", ["packed", "wide", "every other row"])
def test_answers_are_those_of_64_bits(require: Required, dtype: torch.dtype, vocab: int, layout: str) -> None:
    logits = made(5, vocab, dtype, layout)
    rows, tokens, scales = [4, 0, 2, 2], [0, vocab - 1, -1, vocab], [1.0, 0.6, 2.0, 1.0]
    before = logits.clone()
    found = kernels.launch(logits, rows, tokens, scales, require=require).result()
    assert torch.equal(before, logits)
    for name, values in expected(logits, rows, tokens, scales).items():
        torch.testing.assert_close(getattr(found, name).double(), values.double(), atol=1e-4, rtol=1e-5, equal_nan=True)
    assert [found.entropy.dtype, found.top.dtype, found.eat_probes.dtype] == [torch.float32, torch.int64, torch.int64]
    assert found.eat_mean.tolist() == found.eat_variance.tolist() == found.eat_probes.tolist() == [0] * 4


@pytest.mark.parametrize("require", REQUIRED)
def test_rows_that_are_no_distribution(require: Required) -> None:
    logits = torch.zeros(4, 64)
    logits[0], logits[1, 3], logits[2, 5] = float("-inf"), float("nan"), float("inf")
    found = kernels.launch(logits, require=require).result()
    assert found.entropy.isnan().tolist() == [True, True, True, False]
    assert found.logsumexp.isnan().tolist() == [True, True, True, False]
    assert found.top.tolist() == [-1, -1, -1, 0]
    assert float(found.entropy[3]) == pytest.approx(math.log(64), abs=1e-5)


@pytest.mark.parametrize("require", REQUIRED)
def test_all_rows_one_row_and_none(require: Required) -> None:
    logits = made(3, 50)
    every = kernels.launch(logits, require=require).result().entropy
    assert torch.equal(kernels.launch(logits[1], require=require).result().entropy, every[1:2])
    assert torch.equal(kernels.launch(logits, torch.tensor([2, 0]), require=require).result().entropy, every[[2, 0]])
    assert kernels.launch(logits, [], require=require).result().entropy.shape == (0,)
    # A column of a wider matrix is one row when there is one.
    assert kernels.launch(logits[:1, :7], require=require).entropies() == pytest.approx(
        kernels.launch(logits[0, :7], require=require).entropies()
    )
    torch.testing.assert_close(kernels.entropy(logits), every)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_numpy_is_read_where_it_is(dtype: str) -> None:
    wide = np.random.default_rng(0).normal(size=(4, 90)).astype(dtype)
    array = wide[:, :77]
    as_torch = kernels.entropy(torch.from_numpy(array))
    assert torch.equal(kernels.entropy(array), as_torch)
    assert torch.equal(kernels.entropy(array, np.array([3, 1])), as_torch[[3, 1]])  # type: ignore[arg-type]
    raw = RawLogits(array.ctypes.data, dtype, 4, 77, row_stride=90)
    assert torch.equal(kernels.entropy(raw), as_torch)
    packed = np.ascontiguousarray(array)
    assert torch.equal(kernels.entropy(RawLogits(packed.ctypes.data, dtype, 4, 77)), as_torch)


@pytest.mark.parametrize("require", REQUIRED)
def test_states_of_probes_follow_the_recurrence(require: Required) -> None:
    import meridian.budget

    states, alpha = EatStates(3), 0.3
    steps = [made(2, 40 + number) for number in range(6)]
    nats: list[float] = []
    found = None
    for logits in steps:
        found = kernels.launch(logits, probes=Probes([2, -1], alpha, states), require=require).result()
        nats.append(float(found.entropy[0]))
        means, variances = meridian.budget.eat(nats, alpha)
        assert float(found.eat_mean[0]) == pytest.approx(means[-1], rel=1e-5)
        assert float(found.eat_variance[0]) == pytest.approx(variances[-1], rel=1e-4, abs=1e-7)
        assert found.eat_probes.tolist() == [len(nats), 0]
    assert found is not None
    read = states.read()
    assert read.probes.tolist() == [0, 0, 6]
    assert read.mean.tolist()[:2] == [0, 0]
    assert float(read.mean[2]) == float(found.eat_mean[0])
    assert float(read.variance[2]) == float(found.eat_variance[0])
    # A row that is no distribution is no probe.
    broken = torch.full((1, 8), float("nan"))
    found = kernels.launch(broken, probes=Probes([2], alpha, states), require=require).result()
    assert found.eat_probes.tolist() == [6]
    states.reset(2)
    assert states.read().probes.tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match=r"^slot: 3: expected 0 to 2$"):
        states.reset(3)
    with pytest.raises(ValueError, match=r"^slots: 0: expected at least 1$"):
        EatStates(0)


_LOGITS = torch.zeros(2, 8)


@pytest.mark.parametrize(
    ("logits", "options", "text"),
    [
        (_LOGITS.double(), {}, "logits: torch.float64: expected torch.float32, torch.bfloat16 or torch.float16"),
        (_LOGITS[None], {}, "logits: shape [1, 2, 8]: expected [rows, vocabulary] or [vocabulary]"),
        (_LOGITS[:0], {}, "logits: shape [0, 8]: expected at least one row and one token"),
        (_LOGITS.T, {}, "logits: stride 8 of the last dimension: expected 1"),
        (_LOGITS[:1].expand(3, 8), {}, "row_stride: 0: expected at least the vocabulary"),
        ([1.0, 2.0], {}, "logits: list: expected a tensor, an array with __dlpack__, or RawLogits"),
        (np.zeros((2, 3), dtype="U1"), {}, "logits: ndarray: expected memory that can be lent: "),
        (_LOGITS, {"rows": [2]}, "rows: 2: expected less than 2"),
        (_LOGITS, {"rows": [-1]}, "rows: -1: expected integers from 0 to 4294967295"),
        (_LOGITS, {"rows": [0.5]}, "rows: 0.5: expected integers from 0 to 4294967295"),
        (_LOGITS, {"rows": 1}, "rows: 1: expected a sequence of integers"),
        (_LOGITS, {"tokens": [1]}, "tokens: 1: expected one value a row asked for"),
        (_LOGITS, {"tokens": [1, 1 << 40]}, "tokens: 1099511627776: expected integers from -2147483648 to 2147483647"),
        (_LOGITS, {"temperatures": [1.0, 0.0]}, "temperatures: 0: expected a finite number above 0"),
        (_LOGITS, {"temperatures": [1.0]}, "temperatures: 1: expected one value a row asked for"),
        (_LOGITS, {"probes": Probes([0, 0], 0.1, EatStates(2))}, "slots: 0: expected -1, or one of the states"),
        (_LOGITS, {"probes": Probes([0, 2], 0.1, EatStates(2))}, "slots: 2: expected -1, or one of the states"),
        (_LOGITS, {"probes": Probes([0, 1], 0.0, EatStates(2))}, "alpha: 0: expected in (0, 1]"),
        (RawLogits(0, "float32", 1, 8), {}, "logits: null pointer"),
        (RawLogits(64, "float64", 1, 8), {}, "dtype: 'float64': expected float32, bfloat16 or float16"),
        (RawLogits(66, "float32", 1, 8), {}, "logits: 66: expected an address that is a multiple of the size"),
        (RawLogits(64, "float32", 2, 8, row_stride=7), {}, "row_stride: 7: expected at least the vocabulary"),
        (RawLogits(64, "float32", -1, 8), {}, "rows: -1: expected an integer that is not negative"),
        (RawLogits(64, "float32", 1, 8), {"require": "torch"}, "require: 'torch': expected a tensor as logits"),
    ],
)
def test_what_does_not_fit_is_refused_with_one_line(logits: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        kernels.launch(logits, **options)
    assert str(refused.value).startswith(text)
    assert "\n" not in str(refused.value)


def test_without_cuda_there_is_no_kernel_for_its_memory() -> None:
    with pytest.raises(KernelUnavailable, match="not available on this machine"):
        kernels.launch(RawLogits(1 << 20, "bfloat16", 2, 8, device=0, stream=0))
    assert issubclass(KernelUnavailable, KernelError)
    assert issubclass(KernelError, RuntimeError)


def test_a_device_that_the_kernels_do_not_know_is_torchs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KernelUnavailable, match=r"^no kernels for meta: expected logits on cpu or cuda$"):
        kernels.launch(torch.empty(2, 8, device="meta"), require="native")
    with pytest.raises(ValueError, match=r"^logits: on meta: expected a device with memory$"):
        kernels.launch(torch.empty(2, 8, device="meta"))

    def refuse(*_: Any) -> Any:
        raise KernelUnavailable("no kernels for xpu")

    logits = made(3, 20)
    native = kernels.launch(logits)
    monkeypatch.setattr(kernels._native, "launch_rows", refuse)
    before = kernels.launches()
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="meridian.kernels"):
        for _ in range(3):
            pending = kernels.launch(logits)
            assert (pending.backend, pending.ready()) == ("torch", True)
            assert pending.entropies() == pytest.approx(native.entropies(), abs=1e-5)
    assert [record.getMessage() for record in caplog.records] == ["torch measures logits on cpu: no kernels for xpu"]
    assert kernels.launches() == {**before, "torch": before.get("torch", 0) + 3}
    with pytest.raises(KernelUnavailable):
        kernels.launch(logits, require="native")


def test_launches_are_counted_by_what_ran_them() -> None:
    before = kernels.launches()
    pending = kernels.launch(made(2, 9))
    assert pending.backend in ("cpu-portable", "cpu-avx2", "cpu-avx512")
    assert kernels.launches() == {**before, pending.backend: before.get(pending.backend, 0) + 1}


def test_answers_outlive_their_logits_and_can_be_taken_again_by_any_thread() -> None:
    logits = made(64, 4000)
    wanted = kernels.launch(logits, require="torch").entropies()
    pending = kernels.launch(logits)
    del logits
    gc.collect()
    assert pending.ready()
    found: list[list[float]] = []
    threads = [threading.Thread(target=lambda: found.append(pending.entropies())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for entropies in found:
        assert entropies == pytest.approx(wanted, abs=1e-4)
    assert pending.result().entropy.tolist() == pending.entropies()
