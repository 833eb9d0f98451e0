"""The CUDA kernels of Meridian, compiled with any options and launched from Python: for measurements and their tests.

The product launches them from Rust (kernels/src/cuda); this exists to time a kernel inside a CUDA graph, to compile it
in other ways, and to run under compute-sanitizer on a machine that has nothing of Meridian but its source.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "kernels" / "cuda" / "entropy.cu"
THREADS = 256
VECTOR_BYTES = 16
# Blocks of a multiprocessor, as MERIDIAN_BLOCKS in the source.
BLOCKS = 5
# What a block costs beside what it reads, as in kernels/src/cuda/params.rs.
BLOCK_BYTES = 16 << 10
# As in kernels/src/cuda/device.rs.
MOST_PARTS = 1 << 14
# f32: entropy, max, logsumexp, probability; i32: top; f32: mean, variance; u32: probes.
ANSWER_WORDS = 8
NAMES = {"float32": "meridian_entropy_f32", "bfloat16": "meridian_entropy_bf16", "float16": "meridian_entropy_f16"}


class Params(ctypes.Structure):
    """`Params` of kernels/cuda/entropy.cu; addresses are the device's, 0 for what is not there."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("logits", "row_stride", "rows", "tokens", "temperatures", "slots")),
        *((name, ctypes.c_uint64) for name in ("states", "partials", "tickets", "answers")),
        ("alpha", ctypes.c_float),
        ("vocab", ctypes.c_uint32),
        ("splits", ctypes.c_uint32),
    )


class Failed(Exception):
    """A compiler or the driver said no; the message is for the reader."""


def splits(count: int, row_bytes: int, multiprocessors: int) -> int:
    """Parts that each row is read in: `splits` of kernels/src/cuda/params.rs."""
    at_once = multiprocessors * BLOCKS
    most = max(min(-(-row_bytes // (THREADS * VECTOR_BYTES)), MOST_PARTS // max(count, 1)), 1)

    def time(parts: int) -> int:
        return -(-count * parts // at_once) * (row_bytes // parts + BLOCK_BYTES)

    return min(range(1, most + 1), key=time)


def nvcc() -> str:
    """Path of nvcc: $CUDA_HOME, $CUDA_PATH, the search path, or the project's own.

    Raises:
        Failed: there is none.
    """
    homes = [Path(os.environ[name]) / "bin" / "nvcc" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    usual = [Path("/usr/local/cuda/bin/nvcc")]
    found = next((str(path) for path in homes if path.is_file()), None) or shutil.which("nvcc")
    found = found or next((str(path) for path in usual if path.is_file()), None)
    if found is None:
        script = subprocess.run([str(ROOT / "scripts" / "fetch.sh"), "cuda"], stdout=subprocess.PIPE, text=True)
        if script.returncode:
            raise Failed("nvcc was not found: set CUDA_HOME")
        found = f"{script.stdout.strip()}/bin/nvcc"
    return found


def compile_cubin(capability: int, *options: str) -> tuple[bytes, str]:
    """Machine code for a compute capability times ten, and what ptxas says of registers and spills.

    Raises:
        Failed: with what the compiler says.
    """
    compiler = nvcc()
    path = f"{Path(compiler).parent}:{os.environ.get('PATH', '')}"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "entropy.cubin"
        command = [compiler, "-cubin", "-std=c++17", f"-arch=sm_{capability}", "-Xptxas", "-v", "-o", str(out)]
        done = subprocess.run(
            [*command, *options, str(SOURCE)], capture_output=True, text=True, env=os.environ | {"PATH": path}
        )
        if done.returncode:
            raise Failed(f"nvcc: {done.stderr.strip()[:2000]}")
        return out.read_bytes(), done.stderr


class Driver:
    """The driver's library, in the context that is current."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        self._cuda = ctypes.CDLL(library)

    def call(self, name: str, *arguments: Any) -> None:
        """One function of the driver.

        Raises:
            Failed: with its code.
        """
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise Failed(f"{name} failed with code {code}")

    def functions(self, image: bytes) -> dict[str, ctypes.c_void_p]:
        """The kernels of a module, by the kind of the logits."""
        module = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), image)
        found: dict[str, ctypes.c_void_p] = {}
        for kind, name in NAMES.items():
            function = ctypes.c_void_p()
            self.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
            found[kind] = function
        return found

    def launch(self, function: ctypes.c_void_p, params: Params, rows: int, stream: int) -> None:
        """Queue a kernel for `rows` answers; the parameters are copied."""
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        blocks = ctypes.c_uint(rows * params.splits)
        one, none = ctypes.c_uint(1), ctypes.c_void_p()
        self.call(
            "cuLaunchKernel",
            *(function, blocks, one, one, ctypes.c_uint(THREADS), one, one),
            *(ctypes.c_uint(0), ctypes.c_void_p(stream), arguments, none),
        )


class Kernels:
    """The kernels on a device of PyTorch's, and what they need beside the logits."""

    def __init__(
        self, torch: Any, driver: Driver, image: bytes, device: str, multiprocessors: int, compiler: str = ""
    ) -> None:
        self.torch = torch
        self.device = device
        self.multiprocessors = multiprocessors
        self.compiler = compiler
        self.driver = driver
        self._functions = driver.functions(image)
        self._partials = torch.empty(MOST_PARTS * 8, dtype=torch.float32, device=device)
        self._tickets = torch.zeros(MOST_PARTS, dtype=torch.int32, device=device)

    @classmethod
    def on_gpu(cls, torch: Any, *options: str) -> Kernels:
        """On the current CUDA device, compiled with these options.

        Raises:
            Failed: with what the compiler or the driver says.
        """
        # Makes PyTorch's context.
        torch.zeros(1, device="cuda")
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        image, compiler = compile_cubin(properties.major * 10 + properties.minor, *options)
        return cls(torch, Driver(), image, "cuda", properties.multi_processor_count, compiler)

    @classmethod
    def emulated(cls, torch: Any) -> Kernels:
        """On a device that this machine does not have: kernels/tests/emulator, which runs the kernels' text on the CPU.
        Its memory is the machine's. What nvcc makes of the text, and how fast that is, it cannot tell."""
        script = ROOT / "scripts" / "build-cuda-emulator.sh"
        library = subprocess.run([str(script)], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
        driver, context = Driver(library), ctypes.c_void_p()
        driver.call("cuInit", 0)
        driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        driver.call("cuCtxSetCurrent", context)
        image = ".version 9.0 " + " ".join(NAMES.values())
        return cls(torch, driver, image.encode(), "cpu", 4)

    def synchronize(self) -> None:
        """Wait until all launches are done."""
        self.driver.call("cuStreamSynchronize", ctypes.c_void_p(self._stream()))

    def answers(self, rows: int) -> torch.Tensor:
        """Memory of the host that the device writes to, as the product has it: [rows, 8] words, full of nonsense."""
        pinned = self.device == "cuda"
        return self.torch.full((rows, ANSWER_WORDS), -1, dtype=self.torch.int32, pin_memory=pinned)

    def launch(self, logits: torch.Tensor, answers: torch.Tensor, parts: int | None = None, **columns: Any) -> None:
        """Queue the kernel for all rows of `logits` [rows, vocabulary] on PyTorch's current stream. `columns`: int32 or
        float32 tensors of a value a row, and `states` [slots, 3] with `alpha`."""
        rows, vocab = logits.shape
        alpha = columns.pop("alpha", 0.0)
        params = Params(
            logits=logits.data_ptr(),
            row_stride=logits.stride(0),
            vocab=vocab,
            alpha=alpha,
            answers=answers.data_ptr(),
            splits=parts or splits(rows, vocab * logits.element_size(), self.multiprocessors),
            **{name: tensor.data_ptr() for name, tensor in columns.items()},
        )
        if params.splits > 1:
            params.partials, params.tickets = self._partials.data_ptr(), self._tickets.data_ptr()
        function = self._functions[str(logits.dtype).removeprefix("torch.")]
        self.driver.launch(function, params, rows, self._stream())

    def _stream(self) -> int:
        return self.torch.cuda.current_stream().cuda_stream if self.device == "cuda" else 0
