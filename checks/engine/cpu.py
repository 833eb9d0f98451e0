"""What vLLM does not do on a CPU by itself: schedule asynchronously, fork its engine process, run the kernels of its
Model Runner V2.

vLLM turns asynchronous scheduling off on CPU, whose model runner would need streams and events of CUDA. They order
copies between device and host; here all tensors are the host's, each copy is complete when the call returns, and
stand-ins that do nothing are right. The scheduler, the model runner and the batch are vLLM's own asynchronous ones:
step n + 1 is scheduled before the tokens of step n are known.

Model Runner V2 is one class for a GPU and a CPU (vllm/v1/worker/cpu/model_runner.py). Its kernels are Triton's, whose
backend for CPUs no package index has. Here they run in Triton's own interpreter, program by program. vLLM itself
replaces streams, events and pinned memory on a CPU (vllm/v1/worker/cpu/shm.py).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

# What Triton's interpreter cannot run, and vLLM's own code for a machine without Triton, which runs instead.
REPLACED = {("vllm.v1.sample.ops.topk_topp_sampler", "apply_top_k_top_p_triton"): "apply_top_k_top_p_pytorch"}


class _Nothing:
    """A stream or an event of a device that is never behind."""

    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, *args: Any) -> None: ...

    def wait_event(self, *args: Any) -> None: ...

    def query(self) -> bool:
        return True


@contextlib.contextmanager
def _on_stream(stream: Any) -> Iterator[None]:
    del stream
    yield


def use_runner_v2() -> None:
    """Choose Model Runner V2, and the interpreter for its kernels, before vLLM is imported."""
    fetch = Path(__file__).resolve().parents[2] / "scripts" / "fetch.sh"
    sys.path.append(subprocess.check_output([fetch, "triton"], text=True).strip())
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    from triton.backends import backends  # pyright: ignore[reportMissingImports]

    # vLLM looks for the name and for one active driver (vllm/triton_utils/importing.py); the interpreter needs neither.
    backends["cpu"] = SimpleNamespace(compiler=None, driver=SimpleNamespace(is_active=lambda: True))


def install(*, asynchronous: bool) -> None:
    """Change vLLM's CPU platform in this process and in those that it forks, before an engine is made."""
    from vllm.platforms.cpu import CpuPlatform

    own = CpuPlatform.check_and_update_config.__func__
    # The latest call decides.
    checked = getattr(own, "__wrapped__", own)

    @functools.wraps(checked)
    def check_and_update_config(cls: type[CpuPlatform], vllm_config: Any) -> None:
        checked(cls, vllm_config)
        # A new process would import vLLM again, which takes six seconds.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        vllm_config.scheduler_config.async_scheduling = asynchronous

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)  # type: ignore[assignment]
    if "TRITON_INTERPRET" in os.environ:
        for (module, name), instead in REPLACED.items():
            found = importlib.import_module(module)
            setattr(found, name, getattr(found, instead))
    if asynchronous:
        cuda: Any = torch.cuda
        cuda.Stream = cuda.Event = _Nothing
        cuda.current_stream = _Nothing
        cuda.stream = _on_stream
