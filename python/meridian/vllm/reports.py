"""What steps measure, on its way to the scheduler: begun before a step's logits are changed, told when it is there.

On a device nobody waits for entropies: those of a step are told at a later one, when the device has long been heard of.
The scheduler takes them in then (`ThinkBudgets::received` in host/runtime): a token's entropy is matched by its number,
and a probe that has come back waits for its own until the next probe of its request is due. A step of nothing but
probes is no exception. Nothing is stuck while the engine idles: whoever a report is about thinks on only in further
steps, and each of them begins with `flush`.
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

# Steps whose entropies may be on their way; a device that is further behind is waited for.
MOST_UNDER_WAY = 8


class Reports:
    """Steps that are not told yet, in their order. One thread uses it."""

    def __init__(self, tell: Callable[[bytes], None]) -> None:
        self._tell = tell
        self._steps: deque[tuple[_native.StepReport, kernels.Pending | None]] = deque()
        # Set when answers that were promised did not come: then the kernels are not asked again.
        self._is_broken = False
        self._is_logged = False

    def measure(self, logits: torch.Tensor, rows: list[int]) -> kernels.Pending:
        """Begin to measure; the logits may be changed afterwards."""
        if not self._is_broken:
            try:
                return kernels.launch(logits, rows)
            except (kernels.KernelError, ValueError) as why:
                self._log(why)
        return kernels.launch(logits, rows, require="torch")

    def add(self, step: _native.StepReport | None, pending: kernels.Pending | None) -> None:
        """The latest step, and the entropies of its rows; None when it has none."""
        if step is not None:
            self._steps.append((step, pending))

    def flush(self, *, waits: bool = False) -> None:
        """Tell what is there, or all: a report that is not does not let later ones pass."""
        while self._steps:
            step, pending = self._steps[0]
            entropies: list[float] = []
            try:
                if pending is not None:
                    if not (waits or len(self._steps) > MOST_UNDER_WAY or pending.ready()):
                        return
                    entropies = pending.entropies()
            except kernels.KernelError as why:
                # The logits are not what they were, so the step stays unmeasured; what else it says is told.
                self._is_broken = True
                self._log(why)
            self._steps.popleft()
            self._tell(step.datagram(entropies))

    def _log(self, why: Exception) -> None:
        if not self._is_logged:
            self._is_logged = True
            logger.warning("meridian: the kernels failed, torch measures entropies instead: %s", why)
