"""Measurements of steps on their way to the scheduler: started before a step changes its logits, sent when complete.

On a device, no step waits for its entropies; a later step sends them. The scheduler takes them in then
(`ThinkBudgets::received` in host/core). It matches a token's entropy by the token's number. A probe that has returned
waits for its entropy until the next probe of its request is due. A step with only probes is no exception. An idle
engine loses no report: a request thinks on only in later steps, and each step begins with `flush`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from meridian import _native, kernels

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.meridian")

# Most steps whose entropies may be pending; beyond this, `flush` waits for the device.
MOST_UNDER_WAY = 8


class Reports:
    """Reports of steps that are not sent yet, in order. For one thread only."""

    def __init__(self, tell: Callable[[bytes], None]) -> None:
        self._tell = tell
        self._steps: deque[tuple[_native.StepReport, kernels.Pending | None]] = deque()
        # Set when promised answers did not arrive; the kernels are then not used again.
        self._is_broken = False
        self._is_logged = False

    def measure(self, logits: torch.Tensor, rows: list[int]) -> kernels.Pending:
        """Start a measurement; the caller may change the logits afterwards."""
        if not self._is_broken:
            try:
                return kernels.launch(logits, rows)
            except (kernels.KernelError, ValueError) as why:
                self._log(why)
        return kernels.launch(logits, rows, require="torch")

    def add(self, step: _native.StepReport | None, pending: kernels.Pending | None) -> None:
        """Add the latest step and the entropies of its rows; `pending` is None when it has none."""
        if step is not None:
            self._steps.append((step, pending))

    def flush(self, *, waits: bool = False) -> None:
        """Send the complete reports in order, or with `waits` all; an incomplete report holds back later ones."""
        while self._steps:
            step, pending = self._steps[0]
            entropies: list[float] = []
            confidences: list[float] = []
            try:
                if pending is not None:
                    if not (waits or len(self._steps) > MOST_UNDER_WAY or pending.ready()):
                        return
                    entropies = pending.entropies()
                    if step.has_probes:
                        confidences = pending.confidences()
            except kernels.KernelError as why:
                # The logits have changed, so the step stays unmeasured; the rest of its report is sent.
                self._is_broken = True
                self._log(why)
            self._steps.popleft()
            self._tell(step.message(entropies, confidences))

    def _log(self, why: Exception) -> None:
        if not self._is_logged:
            self._is_logged = True
            logger.warning("meridian: the kernels failed, torch measures entropies instead: %s", why)
