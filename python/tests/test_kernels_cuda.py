"""`meridian.kernels` and the processor's reports on a CUDA device that is emulated (kernels/tests/emulator).

The kernels' own text, Meridian's own calls of the driver, NVRTC itself. PyTorch has no such device, so a tensor in its
memory says it is on one. In a process of its own, where libcuda is the emulator's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import ctypes, json, math, sys, weakref
from types import SimpleNamespace

emulator, nvrtc = sys.argv[1:]
for name in (f"{nvrtc}/libnvrtc-builtins.so.13.0", f"{nvrtc}/libnvrtc.so.13"):
    ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
cuda = ctypes.CDLL(emulator, mode=ctypes.RTLD_GLOBAL)
context = ctypes.c_void_p()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0

import torch
from meridian import kernels
from meridian.kernels import RawLogits
from meridian.vllm.reports import Reports

ROWS, VOCAB = 6, 4000
stream = ctypes.c_void_p()
assert cuda.cuStreamCreate(ctypes.byref(stream), 1) == 0
torch.cuda.current_stream = lambda device=None: SimpleNamespace(cuda_stream=stream.value)


class OnDevice(torch.Tensor):
    is_cuda, is_cpu, device = True, False, torch.device("cuda", 0)


def memory(count, type_):
    address = ctypes.c_uint64()
    assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(count * ctypes.sizeof(type_))) == 0
    return (type_ * count).from_address(address.value)


def nats(rows):
    logs = rows.double().log_softmax(-1)
    return torch.special.entr(logs.exp()).sum(-1).tolist()


found = {}
buffer = memory(ROWS * VOCAB, ctypes.c_float)
plain = torch.frombuffer(buffer, dtype=torch.float32).view(ROWS, VOCAB)
plain.copy_(torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(7)) * 3)
logits = plain.as_subclass(OnDevice)

def spoil():
    size = ctypes.c_size_t(ctypes.sizeof(buffer))
    assert cuda.cuMemsetD8Async(ctypes.c_uint64(ctypes.addressof(buffer)), 0x42, size, stream) == 0


# By its address.
raw = RawLogits(ctypes.addressof(buffer), "float32", ROWS, VOCAB, device=0, stream=stream.value)
pending = kernels.launch(raw, rows=[4, 1], tokens=[3, -1])
found["backend"], found["ready at once"] = pending.backend, pending.ready()
answers = pending.result()
found["raw"] = [answers.entropy.tolist(), nats(plain[[4, 1]]), answers.top.tolist(), plain[[4, 1]].argmax(-1).tolist()]
one, none = answers.probability.tolist()
found["probability"] = [one, plain[4].softmax(-1)[3].item(), math.isnan(none)]

# As a tensor, with tokens on the device.
tokens_buffer = memory(ROWS, ctypes.c_int32)
plain_tokens = torch.frombuffer(tokens_buffer, dtype=torch.int32)
plain_tokens.copy_(torch.arange(ROWS))
result = kernels.launch(logits, tokens=plain_tokens.as_subclass(OnDevice), temperatures=[0.7] * ROWS).result()
expected = (plain.double() / 0.7).softmax(-1)
found["tensor"] = [result.probability.tolist(), [expected[i, i].item() for i in range(ROWS)]]

# The processor's reports: begun, written over, told later and in order.
told, expected = [], []
reports = Reports(told.append)


class Step:
    def __init__(self, number):
        self.number = number

    has_probes = False

    def message(self, entropies, confidences):
        return self.number, entropies


for number in range(3):
    plain.copy_(torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(number)))
    expected.append(nats(plain[: number + 1]))
    pending = reports.measure(logits, list(range(number + 1)))
    spoil()
    reports.add(Step(number), pending)
    found[f"told before step {number} is done"] = len(told)
    # As the next forward pass would: what is on the caller's stream gets done.
    assert cuda.cuStreamSynchronize(stream) == 0
    reports.flush()
found["told"] = [list(one) for one in told]
found["expected"] = expected

# Dropped before it is done: nothing fails, and the next works.
kernels.launch(logits, overwrites=False)
del pending
kernels.launch(logits)
found["after"] = kernels.launch(logits, rows=[0]).result().entropy.tolist() == kernels.entropy(raw, [0]).tolist()

# With the fence nothing is held on to; without it, all that is read is.
for name, overwrites in (("fenced", True), ("not fenced", False)):
    lent = plain.as_subclass(OnDevice)
    gone = weakref.ref(lent)
    pending = kernels.launch(lent, overwrites=overwrites)
    del lent
    found[f"held, {name}"] = gone() is not None
    pending.result()
    found[f"held after the answers, {name}"] = gone() is not None

# A device that fails is told, and torch is asked the next time.
cuda.emulator_fail(b"cuLaunchKernel", 0, 719)
try:
    kernels.launch(raw)
except kernels.KernelError as why:
    found["failure"] = str(why)
try:
    kernels.launch(RawLogits(raw.address, "float32", ROWS, VOCAB, device=3))
except kernels.KernelUnavailable as why:
    found["no such device"] = str(why)
try:
    kernels.launch(RawLogits(ctypes.addressof((ctypes.c_float * 8)()), "float32", 1, 8, device=0, stream=stream.value))
except ValueError as why:
    found["of the host"] = str(why)
found["launches"] = kernels.launches()
print(json.dumps(found))
"""


STUB = """
import ctypes, sys

ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
ctypes.CDLL(sys.argv[2], mode=ctypes.RTLD_GLOBAL)
from meridian import _native

try:
    _native.launch_rows(4096, "float32", (1, 8, 8), (0, 0, True), None)
except _native.KernelUnavailable as why:
    print(why)
except ValueError as why:
    # A build that carries PTX needs no NVRTC; the address is none of the device.
    print(why)
"""


def script(name: str, *args: str) -> str:
    done = subprocess.run([str(ROOT / "scripts" / name), *args], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    arguments = [script("build-cuda-emulator.sh"), f"{script('fetch.sh', 'cuda')}/lib"]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_launch_returns_before_its_answers(found: dict[str, Any]) -> None:
    assert found["backend"] == "cuda"
    assert not found["ready at once"]


def test_answers_by_address_and_of_a_tensor(found: dict[str, Any]) -> None:
    entropies, expected, tops, expected_tops = found["raw"]
    assert entropies == pytest.approx(expected, rel=1e-5)
    assert tops == expected_tops
    probability, right, is_none = found["probability"]
    assert probability == pytest.approx(right, rel=1e-4)
    assert is_none
    assert found["tensor"][0] == pytest.approx(found["tensor"][1], rel=1e-4)


def test_reports_of_steps_come_late_and_are_of_the_logits_as_they_were(found: dict[str, Any]) -> None:
    assert [found[f"told before step {number} is done"] for number in range(3)] == [0, 1, 2]
    assert [number for number, _ in found["told"]] == [0, 1, 2]
    for (_, entropies), expected in zip(found["told"], found["expected"], strict=True):
        assert entropies == pytest.approx(expected, rel=1e-5)


def test_what_is_dropped_leaves_nothing(found: dict[str, Any]) -> None:
    assert found["after"]


def test_logits_are_held_only_where_nothing_else_keeps_their_memory(found: dict[str, Any]) -> None:
    assert not found["held, fenced"]
    assert found["held, not fenced"]
    assert not found["held after the answers, not fenced"]


def test_failures_are_told(found: dict[str, Any]) -> None:
    assert found["failure"] == "the launch failed with code 719"
    assert found["no such device"] == "not available on this machine: the CUDA driver knows no device 3"
    assert found["of the host"] == "logits: an address of the host: expected memory of the launch's device"


def test_only_the_kernels_ran(found: dict[str, Any]) -> None:
    assert set(found["launches"]) == {"cuda"}


def test_an_nvrtc_that_does_not_work_is_as_good_as_none(tmp_path: Path) -> None:
    """As scripts/make_cuda_stubs.py makes them: every function is there, and answers with an error nobody knows."""
    functions = ("Version", "CreateProgram", "CompileProgram", "DestroyProgram")
    functions += ("GetPTXSize", "GetPTX", "GetProgramLogSize", "GetProgramLog")
    source, library = tmp_path / "stub.c", tmp_path / "libnvrtc.so"
    source.write_text("".join(f"int nvrtc{name}(void) {{ return 999; }}\n" for name in functions))
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libnvrtc.so", "-o", str(library), str(source)], check=True)
    command = [sys.executable, "-c", STUB, script("build-cuda-emulator.sh"), str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout.strip()
    assert said.endswith(("and no NVRTC (libnvrtc.so) that works was found", "memory of the launch's device"))
