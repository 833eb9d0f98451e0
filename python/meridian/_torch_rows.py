"""The measurements of `meridian.kernels` in torch, for devices that the kernels do not support."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# Fields of a state of EAT, 4 bytes each: mean, variance, probes.
EAT_FIELDS = 3


class PendingRows:
    """Like `_native.PendingRows`. The device copies the answers to the host; callers wait only when they read them."""

    backend = "torch"

    def __init__(self, block: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if block.device.type == "cuda":
            self._block = torch.empty(block.shape, dtype=block.dtype, pin_memory=True)
            self._block.copy_(block, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(block.device))
        else:
            self._block = block.cpu()

    def ready(self) -> bool:
        """Whether the answers are on the host."""
        return self._event is None or self._event.query()

    def entropies(self) -> list[float]:
        """Nats, in the order of the rows asked for."""
        return self.columns()[0].tolist()

    def columns(self) -> torch.Tensor:
        """In the order of the kernels: [8, rows], float32; the last two rows hold the bits of integers."""
        if self._event is not None:
            self._event.synchronize()
        return self._block


def on_device(values: Sequence[Any] | torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A copy on the device; the host does not wait for it."""
    made = torch.as_tensor(values, dtype=dtype)
    if device.type != "cuda" or made.device.type == "cuda":
        return made.to(device)
    return made.pin_memory().to(device, non_blocking=True)


def launch(
    logits: torch.Tensor,
    rows: Sequence[int] | torch.Tensor | None,
    tokens: Sequence[int] | torch.Tensor | None,
    temperatures: Sequence[float] | torch.Tensor | None,
    probes: tuple[Sequence[int], float, torch.Tensor] | None,
) -> PendingRows:
    """Measure rows of logits of any floating type and layout; the arguments are those of `kernels.launch`.

    Raises:
        ValueError: an argument is not valid.
    """
    device = logits.device
    if device.type == "meta":
        raise ValueError("logits: on meta: expected a device with memory")
    if not logits.is_floating_point() or logits.ndim not in (1, 2) or not logits.numel():
        found = f"{logits.dtype} of shape {list(logits.shape)}"
        raise ValueError(f"logits: {found}: expected floats of shape [rows, vocabulary] or [vocabulary]")
    matrix = logits.reshape(-1, logits.shape[-1])
    total, vocab = matrix.shape
    x = matrix
    if rows is not None:
        wrong = [row for row in (rows.tolist() if isinstance(rows, torch.Tensor) else rows) if not 0 <= row < total]
        if wrong:
            raise ValueError(f"rows: {wrong[0]}: expected less than {total}")
        x = matrix[on_device(rows, device, torch.int64)]
    count = x.shape[0]
    x = x.float() if x.dtype != torch.float64 else x
    scale = _one_a_row("temperatures", temperatures, count, device, torch.float32)
    if temperatures is not None and not isinstance(temperatures, torch.Tensor):
        wrong = [value for value in temperatures if not 0 < value < float("inf")]
        if wrong:
            raise ValueError(f"temperatures: {wrong[0]}: expected a finite number above 0")
    most, top = x.max(dim=-1)
    # -inf - -inf is NaN; a masked token is -inf whatever the maximum.
    is_one = most.isfinite() & ~x.isnan().any(dim=-1)
    shifted = (x - most[:, None]) if scale is None else (x - most[:, None]) / scale[:, None]
    logs = shifted.log_softmax(dim=-1)
    nats = torch.special.entr(logs.exp()).sum(dim=-1)
    logsumexp = shifted.logsumexp(dim=-1) + (most if scale is None else most / scale)
    probability = torch.full_like(nats, float("nan"))
    wanted = _one_a_row("tokens", tokens, count, device, torch.int64)
    if wanted is not None:
        found = logs.gather(1, wanted.clamp(0, vocab - 1)[:, None])[:, 0].exp()
        probability = torch.where((wanted >= 0) & (wanted < vocab), found, probability)
    floats = torch.stack((nats, most, logsumexp, probability)).where(is_one, float("nan")).float()
    eat = torch.zeros(count, EAT_FIELDS, dtype=torch.int32, device=device)
    if probes is not None:
        eat = _observed(floats[0], *probes)
    whole = torch.stack((torch.where(is_one, top, -1).int(), eat[:, 2]))
    block = torch.cat((floats, eat[:, :2].T.contiguous().view(torch.float32), whole.view(torch.float32)))
    return PendingRows(block)


def _one_a_row(
    name: str, values: Sequence[Any] | torch.Tensor | None, count: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor | None:
    if values is None:
        return None
    if len(values) != count:
        raise ValueError(f"{name}: {len(values)}: expected one value a row asked for")
    return on_device(values, device, dtype)


def _observed(nats: torch.Tensor, slots: Sequence[int], alpha: float, states: torch.Tensor) -> torch.Tensor:
    """Add the entropies of probes to their states, like `EatState::observed` of the kernels. Returns each row's state,
    0 for rows that are not probes."""
    used = [slot for slot in slots if slot != -1]
    wrong = [slot for slot in used if not 0 <= slot < states.shape[0] or used.count(slot) > 1]
    if wrong:
        raise ValueError(f"slots: {wrong[0]}: expected -1, or one of the states, for one row only")
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha: {alpha}: expected in (0, 1]")
    if states.device != nats.device:
        raise ValueError(f"states: on {states.device}: expected them on the device of the logits")
    at = _one_a_row("slots", slots, len(nats), nats.device, torch.int64)
    assert at is not None
    before = states[at.clamp(min=0)]
    floats = before[:, :2].contiguous().view(torch.float32)
    is_first = before[:, 2] == 0
    mean = torch.where(is_first, nats, alpha * nats + (1 - alpha) * floats[:, 0])
    off = nats - mean
    variance = torch.where(is_first, 0.0, alpha * off * off + (1 - alpha) * floats[:, 1])
    after = torch.cat((torch.stack((mean, variance), dim=1).view(torch.int32), before[:, 2:] + 1), dim=1)
    after = torch.where(nats.isnan()[:, None], before, after)
    is_probe = on_device([i for i, slot in enumerate(slots) if slot != -1], nats.device, torch.int64)
    states[at[is_probe]] = after[is_probe]
    return torch.where((at >= 0)[:, None], after, 0)
