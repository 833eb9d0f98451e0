"""What vLLM does not do on a CPU by itself: schedule asynchronously, and fork its engine process.

vLLM turns asynchronous scheduling off on CPU, whose model runner would need streams and events of CUDA. They order
copies between device and host; here all tensors are the host's, each copy is complete when the call returns, and
stand-ins that do nothing are right. The scheduler, the model runner and the batch are vLLM's own asynchronous ones:
step n + 1 is scheduled before the tokens of step n are known.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any

import torch


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


def install(*, asynchronous: bool) -> None:
    """Change vLLM's CPU platform in this process and in those that it forks, before an engine is made."""
    from vllm.platforms.cpu import CpuPlatform

    checked = CpuPlatform.check_and_update_config.__func__

    @functools.wraps(checked)
    def check_and_update_config(cls: type[CpuPlatform], vllm_config: Any) -> None:
        checked(cls, vllm_config)
        # A new process would import vLLM again, which takes six seconds.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        vllm_config.scheduler_config.async_scheduling = asynchronous

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)  # type: ignore[assignment]
    if asynchronous:
        cuda: Any = torch.cuda
        cuda.Stream = cuda.Event = _Nothing
        cuda.current_stream = _Nothing
        cuda.stream = _on_stream
