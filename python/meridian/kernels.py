"""Measure rows of logits in place: entropy, likeliest token and more, on the CPU, or on a CUDA device without waiting.

    import torch
    from meridian import kernels

    logits = torch.randn(8, 151_936)
    pending = kernels.launch(logits, rows=[0, 3], tokens=[11, 42])
    answers = pending.result()
    answers.entropy, answers.probability

Only the request is copied, never the logits. On a CUDA device, the work runs on its own stream, after the work that is
on torch's current stream. Later work on the current stream may write to the logits at once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch

from meridian import _native, _torch_rows
from meridian._native import KernelError, KernelUnavailable
from meridian._torch_rows import EAT_FIELDS

__all__ = [
    "EatStates",
    "EatValues",
    "KernelError",
    "KernelUnavailable",
    "Pending",
    "Probes",
    "RawLogits",
    "RowStats",
    "entropy",
    "launch",
    "launches",
]

logger = logging.getLogger("meridian.kernels")

_ELEMENTS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_NAMES = set(_ELEMENTS.values())
_launches: Counter[str] = Counter()
# Reasons for falling back to torch that were logged.
_warned: set[str] = set()


@runtime_checkable
class DLPack(Protocol):
    """An object that can lend its memory: arrays of numpy, JAX, CuPy."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...


@dataclass(frozen=True)
class RawLogits:
    """Logits by their address. The caller keeps memory of the given size valid until the answers have arrived.

    Attributes:
        address: of the first logit.
        dtype: "float32", "bfloat16" or "float16".
        rows: rows of the matrix.
        vocab: logits in a row.
        row_stride: logits from the first of one row to the first of the next; None for `vocab`.
        device: number of the CUDA device among the devices of this process; None for the machine's memory.
        stream: the `CUstream` that produces the logits; 0 for the legacy default stream.
    """

    address: int
    dtype: str
    rows: int
    vocab: int
    row_stride: int | None = None
    device: int | None = None
    stream: int = 0


@dataclass(frozen=True)
class RowStats:
    """Answers on the CPU, of shape [rows], in the order of the request. For row `x` of temperature `T`,
    `p = softmax(x/T)`.

    A row that is not a distribution (only `-inf`, or with a NaN or `+inf`) has NaN in the floats, and -1 as `top`.
    """

    entropy: torch.Tensor
    """float32: `-sum p ln p`, nats."""
    max: torch.Tensor
    """float32: the largest logit, not divided by `T`."""
    logsumexp: torch.Tensor
    """float32: `ln sum exp(x / T)`."""
    probability: torch.Tensor
    """float32: `p` of the requested token; NaN when the caller requested none."""
    top: torch.Tensor
    """int64: the first token with the largest logit."""
    eat_mean: torch.Tensor
    """float32: for a probe, the moving mean of its slot including this row, nats; 0 for other rows."""
    eat_variance: torch.Tensor
    """float32: the moving variance, nats squared."""
    eat_probes: torch.Tensor
    """int64: probes so far."""


class EatValues(NamedTuple):
    """Columns of all states of `EatStates`, on the CPU, of shape [slots]."""

    mean: torch.Tensor
    """float32, nats."""
    variance: torch.Tensor
    """float32, nats squared."""
    probes: torch.Tensor
    """int64."""


class EatStates:
    """Moving means and variances of the entropies of probes (EAT, arXiv 2509.26522), one state per slot, on a device.

    Launches that use the same states run one after the other. Only one thread may use them.
    """

    def __init__(self, slots: int, device: torch.device | str | int = "cpu") -> None:
        if slots < 1:
            raise ValueError(f"slots: {slots}: expected at least 1")
        # 12 bytes each: mean and variance as float32, the number of probes.
        self.tensor = torch.zeros(slots, EAT_FIELDS, dtype=torch.int32, device=device)
        self._latest: Pending | None = None

    def __len__(self) -> int:
        return self.tensor.shape[0]

    def reset(self, slot: int) -> None:
        """Clear the slot for another request. Waits for earlier launches.

        Raises:
            ValueError: there is no such slot.
        """
        if not 0 <= slot < len(self):
            raise ValueError(f"slot: {slot}: expected 0 to {len(self) - 1}")
        self._settle()
        self.tensor[slot].zero_()

    def read(self) -> EatValues:
        """The states after all earlier launches; waits for them."""
        self._settle()
        states = self.tensor.cpu()
        mean, variance = states[:, :2].contiguous().view(torch.float32).unbind(1)
        return EatValues(mean, variance, states[:, 2].long())

    def _settle(self) -> None:
        # Torch's work on the states is not ordered after the kernels' own stream.
        if self._latest is not None:
            self._latest.entropies()
            self._latest = None


@dataclass(frozen=True)
class Probes:
    """Rows that are probes of EAT.

    Attributes:
        slots: for each requested row, the slot of its request in `states`, each at most once; -1 if it is not a probe.
        alpha: weight of the newest entropy, in (0, 1].
        states: on the device of the logits.
    """

    slots: Sequence[int]
    alpha: float
    states: EatStates


class Pending:
    """Answers that may not have arrived yet. The caller may drop this object at any time.

    After a launch with `overwrites=False`, it holds the logits until it has the answers. Otherwise their memory may be
    reused at once, because the stream that would write to it waits for the read."""

    __slots__ = ("_rows",)

    def __init__(self, rows: _native.PendingRows | _torch_rows.PendingRows) -> None:
        self._rows = rows

    @property
    def backend(self) -> str:
        """The backend of this launch: "cpu-portable", "cpu-avx2", "cpu-avx512", "cuda" or "torch"."""
        return self._rows.backend

    def ready(self) -> bool:
        """Whether `result` returns without waiting.

        Raises:
            KernelError: the device failed.
        """
        return self._rows.ready()

    def result(self) -> RowStats:
        """The answers. Waits for them without the GIL; may be called repeatedly.

        Raises:
            KernelError: the device failed.
        """
        block = self._rows.columns()
        if not isinstance(block, torch.Tensor):
            # torch reads no empty buffer.
            block = torch.frombuffer(block, dtype=torch.float32) if block else torch.empty(0)
        block = block.view(8, -1)
        top, probes = block[6:].view(torch.int32).long().unbind(0)
        entropy, most, logsumexp, probability, mean, variance = block[:6].unbind(0)
        return RowStats(entropy, most, logsumexp, probability, top, mean, variance, probes)

    def entropies(self) -> list[float]:
        """`result().entropy` as a list, for a caller that needs only entropies. Waits and raises like `result`."""
        return self._rows.entropies()

    def confidences(self) -> list[float]:
        """The probability of each row's likeliest token, as a list. Waits and raises like `result`."""
        rows = self.result()
        # Rounding may leave the largest logit above the sum.
        return (rows.max - rows.logsumexp).exp().clamp(max=1.0).tolist()


def launch(
    logits: torch.Tensor | DLPack | RawLogits,
    rows: Sequence[int] | torch.Tensor | None = None,
    tokens: Sequence[int] | torch.Tensor | None = None,
    temperatures: Sequence[float] | torch.Tensor | None = None,
    probes: Probes | None = None,
    overwrites: bool = True,
    require: Literal["native", "torch"] | None = None,
) -> Pending:
    """Start measuring rows of logits. On the CPU, the answers are complete on return; on a device, they follow later.

    Where the kernels cannot run, torch computes the same answers, and the log gives each reason once.

    Args:
        logits: [rows, vocabulary], or [vocabulary] for one row; float32, bfloat16 or float16; the last dimension
            contiguous, rows at any distance. Read in place.
        rows: numbers of the rows to measure, in the order of the answers; None for all.
        tokens: for each of these rows, the token whose probability is wanted; a token outside the vocabulary, such as
            -1, for none. An int32 tensor on the device of the logits is read there.
        temperatures: for each of these rows, its temperature, finite and above 0; None for 1.
        probes: which of these rows are probes of EAT.
        overwrites: whether the stream that made the logits may write to them or free them before the caller takes the
            answers, as a sampler does. That stream then waits for the read, on the device.
        require: "native" for the kernels or an error, "torch" for torch.

    Raises:
        ValueError: an argument is not valid; names the argument, its value and what was expected.
        KernelUnavailable: no kernel runs on this device, and `require` excludes torch or torch cannot read `RawLogits`.
        KernelError: the device refused.
    """
    if not isinstance(logits, (torch.Tensor, RawLogits)):
        logits = _borrowed(logits)
    if require != "torch":
        try:
            return _counted(Pending(_launched(logits, rows, tokens, temperatures, probes, overwrites)), probes)
        except KernelUnavailable as why:
            if require == "native" or isinstance(logits, RawLogits):
                raise
            if str(why) not in _warned:
                _warned.add(str(why))
                logger.warning("torch measures logits on %s: %s", logits.device, why)
        except (TypeError, OverflowError):
            if isinstance(logits, RawLogits):
                _explain_raw(logits)
            _explain(rows=rows, tokens=tokens, slots=None if probes is None else probes.slots)
            raise
    if isinstance(logits, RawLogits):
        raise ValueError("require: 'torch': expected a tensor as logits: torch has no memory by its address")
    slots = None if probes is None else (probes.slots, probes.alpha, probes.states.tensor)
    return _counted(Pending(_torch_rows.launch(logits, rows, tokens, temperatures, slots)), probes)


def entropy(
    logits: torch.Tensor | DLPack | RawLogits, rows: Sequence[int] | torch.Tensor | None = None
) -> torch.Tensor:
    """Entropies in nats, float32 on the CPU, of shape [rows]: `launch` and `result` in one call; raises like them."""
    return launch(logits, rows).result().entropy


def launches() -> dict[str, int]:
    """Number of launches of this process by backend (`Pending.backend`)."""
    return dict(_launches)


def _counted(pending: Pending, probes: Probes | None) -> Pending:
    _launches[pending._rows.backend] += 1
    if probes is not None:
        probes.states._latest = pending
    return pending


def _launched(
    logits: torch.Tensor | RawLogits,
    rows: Sequence[int] | torch.Tensor | None,
    tokens: Sequence[int] | torch.Tensor | None,
    temperatures: Sequence[float] | torch.Tensor | None,
    probes: Probes | None,
    overwrites: bool,
) -> _native.PendingRows:
    cuda = None
    if isinstance(logits, RawLogits):
        address, element, shape = logits.address, logits.dtype, (logits.rows, logits.vocab, _stride(logits))
        if element not in _NAMES:
            raise ValueError(f"dtype: {element!r}: expected float32, bfloat16 or float16")
        if logits.device is not None:
            cuda = (logits.device, logits.stream, overwrites)
    else:
        if logits.is_cuda:
            device = logits.device
            cuda = (device.index, torch.cuda.current_stream(device).cuda_stream, overwrites)
        elif not logits.is_cpu:
            raise KernelUnavailable(f"no kernels for {logits.device.type}: expected logits on cpu or cuda")
        address, element, shape = _matrix(logits)
    # Torch's allocator does not know the stream of the kernels, so these are kept alive. On the CPU, the answers are
    # complete at once.
    keep = None if cuda is None else [logits, tokens, None if probes is None else probes.states.tensor]
    token_address = 0
    if isinstance(tokens, torch.Tensor) and tokens.device.type != "cpu":
        count = shape[0] if rows is None else len(rows)
        _check_device_tokens(tokens, count, None if cuda is None else cuda[0])
        token_address, tokens = tokens.data_ptr(), None
    states = None
    if probes is not None:
        held = probes.states.tensor
        on = None if held.device.type == "cpu" else held.device.index
        if on != (None if cuda is None else cuda[0]):
            raise ValueError(f"states: on {held.device}: expected them on the device of the logits")
        states = (probes.slots, probes.alpha, held.data_ptr(), held.shape[0])
    return _native.launch_rows(
        address,
        element,
        shape,
        cuda,
        keep,
        _listed(rows),
        _listed(tokens),
        token_address,
        _listed(temperatures),
        states,
    )


def _matrix(logits: torch.Tensor) -> tuple[int, str, tuple[int, int, int]]:
    """Address, element and shape of a tensor."""
    element = _ELEMENTS.get(logits.dtype)
    if element is None:
        raise ValueError(f"logits: {logits.dtype}: expected torch.float32, torch.bfloat16 or torch.float16")
    if logits.ndim == 2:
        (rows, vocab), (row_stride, stride) = logits.shape, logits.stride()
    elif logits.ndim == 1:
        rows, vocab, stride = 1, logits.shape[0], logits.stride(0)
        row_stride = vocab
    else:
        raise ValueError(f"logits: shape {list(logits.shape)}: expected [rows, vocabulary] or [vocabulary]")
    if not rows or not vocab:
        raise ValueError(f"logits: shape {list(logits.shape)}: expected at least one row and one token")
    if stride != 1 and vocab != 1:
        raise ValueError(f"logits: stride {stride} of the last dimension: expected 1")
    # The stride of a single row means nothing.
    return logits.data_ptr(), element, (rows, vocab, row_stride if rows > 1 else vocab)


def _stride(logits: RawLogits) -> int:
    return logits.vocab if logits.row_stride is None else logits.row_stride


def _borrowed(logits: object) -> torch.Tensor:
    if not isinstance(logits, DLPack):
        raise ValueError(f"logits: {type(logits).__name__}: expected a tensor, an array with __dlpack__, or RawLogits")
    try:
        return torch.from_dlpack(logits)
    except (BufferError, RuntimeError, TypeError) as why:
        raise ValueError(f"logits: {type(logits).__name__}: expected memory that can be lent: {why}") from why


def _check_device_tokens(tokens: torch.Tensor, count: int, device: int | None) -> None:
    """Check them here: the kernels cannot see how many tokens there are."""
    if device is None or tokens.device.index != device:
        raise ValueError(f"tokens: on {tokens.device}: expected them on the CPU, or on the device of the logits")
    if tokens.dtype != torch.int32 or not tokens.is_contiguous():
        raise ValueError(f"tokens: {tokens.dtype}: expected contiguous torch.int32 on a device")
    if tuple(tokens.shape) != (count,):
        raise ValueError(f"tokens: shape {list(tokens.shape)}: expected [{count}], one for each row asked for")


def _listed(values: Any) -> Any:
    if values is None or type(values) is list:
        return values
    # Tensors, and arrays of numpy.
    return values.tolist() if hasattr(values, "tolist") else values


def _explain_raw(logits: RawLogits) -> None:
    """Report the field that is not a valid number."""
    for name, value in vars(logits).items():
        if value is not None and name != "dtype" and not (isinstance(value, int) and 0 <= value < 1 << 64):
            raise ValueError(f"{name}: {value!r}: expected an integer that is not negative") from None


def _explain(**arguments: Any) -> None:
    """Report the argument that is not a valid integer."""
    for name, values in arguments.items():
        least, most = (0, (1 << 32) - 1) if name == "rows" else (-(1 << 31), (1 << 31) - 1)
        listed = _listed(values)
        if isinstance(listed, int):
            raise ValueError(f"{name}: {listed}: expected a sequence of integers") from None
        for value in listed or ():
            if not isinstance(value, int) or not least <= value <= most:
                raise ValueError(f"{name}: {value!r}: expected integers from {least} to {most}") from None
