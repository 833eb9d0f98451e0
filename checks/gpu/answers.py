"""Whether the kernels' answers are what float64 says of the same logits."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from checks.figures import Figure

if TYPE_CHECKING:
    import torch

    from checks.gpu.driver import Kernels

# Norm of the differences over the norm of what is right, by kind.
BOUNDS = {"float32": "<= 1e-5", "bfloat16": "<= 1e-3", "float16": "<= 1e-3"}
FIELDS = ("entropy", "max", "logsumexp", "probability")


def figure(name: str, value: float, unit: str, bound: str | None = None, **more: Any) -> dict[str, Any]:
    """A figure; `bound` such as "<= 1e-5" or ">= 0.9"."""
    holds = Figure(name, value, unit, bound).holds()
    return {"name": name, "value": value, "unit": unit, "bound": bound, "holds": holds} | more


def check(kernels: Kernels, seed: int, small: bool) -> list[dict[str, Any]]:
    """Figures of the largest error of each kind over shapes, strides, temperatures, tokens and probes; and whether rows
    that are masked, or no distribution, say so."""
    torch = kernels.torch
    generator = torch.Generator(device=kernels.device).manual_seed(seed)
    shapes = [(1, 1), (3, 7), (5, 1000), (2, 4099), (33, 5000), (1, 40_000)]
    if not small:
        shapes += [(1, 151_936), (7, 128_257), (256, 151_936), (300, 32_000), (4096, 2048), (2, 300_000)]
    found = []
    nearly_sure = sure(kernels, generator)
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        name = str(kind).removeprefix("torch.")
        worst = dict.fromkeys(FIELDS, 0.0)
        nats, wrong = 0.0, 0
        for rows, vocab in shapes:
            for scale in (0.1, 3.0, 30.0):
                for gap in (0, 1, 13):
                    logits = random(kernels, generator, rows, vocab, gap, scale, kind)
                    # As the product splits the rows, and so that every block has more than one turn to read.
                    for parts in (None, 1, 2):
                        errors, tops = compare(kernels, generator, logits, parts)
                        worst = {field: max(worst[field], errors[field]) for field in FIELDS}
                        nats, wrong = max(nats, errors["nats"]), wrong + tops
        for field in FIELDS:
            found.append(
                figure(
                    f"{name}: relative error of {field}, worst of all shapes",
                    worst[field],
                    "ratio",
                    BOUNDS[name] if field == "entropy" else None,
                )
            )
        found.append(figure(f"{name}: largest difference of an entropy", nats, "nats"))
        found.append(figure(f"{name}: rows whose likeliest token is another", wrong, "rows", "<= 0"))
        found.append(figure(f"{name}: rows of a special kind that are wrong", special(kernels, kind), "rows", "<= 0"))
        print(f"  checked {name}", file=sys.stderr, flush=True)
    found.append(
        figure("float32: relative error of an entropy, worst row of almost sure ones", nearly_sure, "ratio", "<= 1e-5")
    )
    found.append(figure("EAT states over 20 probes: largest difference", eat(kernels, generator), "nats", "<= 1e-5"))
    return found


def random(kernels: Kernels, generator: Any, rows: int, vocab: int, gap: int, scale: float, kind: Any) -> torch.Tensor:
    """Normal logits in rows `vocab + gap` apart, the first of them `gap` after an aligned address; a tenth masked."""
    torch = kernels.torch
    store = torch.randn(gap + rows * (vocab + gap), generator=generator, device=kernels.device) * scale
    store[torch.rand(store.shape, generator=generator, device=kernels.device) < 0.1] = float("-inf")
    logits = store.to(kind)[gap:].as_strided((rows, vocab), (vocab + gap, 1))
    # None of them is masked throughout.
    logits[:, vocab // 2] = 0.5
    return logits


def compare(kernels: Kernels, generator: Any, logits: torch.Tensor, parts: int | None) -> tuple[dict[str, float], int]:
    """Relative errors of one launch, and rows whose top token is wrong."""
    torch = kernels.torch
    rows, vocab = logits.shape
    tokens = torch.randint(0, vocab, (rows,), generator=generator, device=kernels.device, dtype=torch.int32)
    temperatures = torch.rand(rows, generator=generator, device=kernels.device) * 2 + 0.3
    answers = kernels.answers(rows)
    kernels.launch(logits, answers, parts=parts, tokens=tokens, temperatures=temperatures)
    kernels.synchronize()
    floats = answers.view(torch.float32).double()
    x = logits.double() / temperatures.double()[:, None]
    logs = x.log_softmax(dim=-1)
    probabilities = logs.exp()
    expected = {
        "entropy": torch.special.entr(probabilities).sum(dim=-1).cpu(),
        "max": logits.double().amax(dim=-1).cpu(),
        "logsumexp": x.logsumexp(dim=-1).cpu(),
        "probability": probabilities.gather(1, tokens.long()[:, None])[:, 0].cpu(),
    }
    errors: dict[str, float] = {}
    for i, (field, right) in enumerate(expected.items()):
        off = floats[:, i] - right
        # A row of one token is sure: there is nothing to be relative to.
        errors[field] = float(off.norm() / right.norm().clamp(min=1e-3))
        if field == "entropy":
            errors["nats"] = float(off.abs().max())
    first = (logits == logits.amax(dim=-1, keepdim=True)).int().argmax(dim=-1).cpu()
    # NaN where an answer was never written: it is not equal to anything.
    errors = {field: float("inf") if error != error else error for field, error in errors.items()}
    return errors, int((answers[:, 4] != first).sum())


def special(kernels: Kernels, kind: Any) -> int:
    """Rows of a special kind that are answered wrongly."""
    torch = kernels.torch
    inf, wrong = float("inf"), 0
    low = torch.finfo(kind).min
    for vocab in (1, 7, 3000, 151_936):
        logits = torch.full((8, vocab), -inf, dtype=kind, device=kernels.device)
        logits[1, vocab // 2] = -3.0
        logits[2] = 0.5
        logits[2, vocab // 3] = float("nan")
        logits[3, vocab - 1] = float("nan")
        logits[4, vocab - 1] = inf
        logits[5] = low
        logits[6] = low
        logits[6, vocab // 2] = 2.0
        logits[7] = 1.0
        answers = kernels.answers(8)
        kernels.launch(logits, answers)
        kernels.synchronize()
        got, top = answers.view(torch.float32)[:, 0].double(), answers[:, 4].tolist()
        uniform = float(torch.tensor(float(vocab)).log())
        right = [None, 0.0, None, None, None, uniform, 0.0, uniform]
        tops = [-1, vocab // 2, -1, -1, -1, 0, vocab // 2, 0]
        for i, value in enumerate(right):
            is_right = bool(got[i].isnan()) if value is None else abs(float(got[i]) - value) < 1e-5
            wrong += not (is_right and top[i] == tops[i])
    return wrong


def eat(kernels: Kernels, generator: Any) -> float:
    """Largest difference of the mean and variance of five requests from the recurrence in float64."""
    torch = kernels.torch
    states = torch.zeros((5, 3), dtype=torch.float32, device=kernels.device)
    slots = torch.tensor([3, -1, 0, 4, 1, 2], dtype=torch.int32, device=kernels.device)
    expected = torch.zeros((5, 2), dtype=torch.float64)
    off = 0.0
    for probe in range(20):
        logits = random(kernels, generator, 6, 40_000, 3, 3.0, torch.bfloat16)
        answers = kernels.answers(6)
        kernels.launch(logits, answers, slots=slots, states=states, alpha=0.2)
        kernels.synchronize()
        nats = torch.special.entr(logits.double().softmax(dim=-1)).sum(dim=-1).cpu()
        for row, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            mean, variance = expected[slot].tolist()
            x = float(nats[row])
            mean = 0.2 * x + 0.8 * mean if probe else x
            variance = 0.2 * (x - mean) ** 2 + 0.8 * variance if probe else 0.0
            expected[slot] = torch.tensor([mean, variance], dtype=torch.float64)
            told = answers.view(torch.float32)[row, 5:7].double()
            off = max(off, largest(told - expected[slot]))
    kept = states[:, :2].double().cpu()
    return max(off, largest(kept - expected))


def sure(kernels: Kernels, generator: Any) -> float:
    """Largest relative error of the entropies of rows whose likeliest token is ever more certain, each of its own."""
    torch = kernels.torch
    logits = torch.randn((30, 6000), generator=generator, device=kernels.device)
    logits[torch.arange(30), torch.arange(30) * 150] = torch.linspace(6.0, 35.0, 30, device=kernels.device)
    answers = kernels.answers(30)
    kernels.launch(logits, answers)
    kernels.synchronize()
    nats = torch.special.entr(logits.double().softmax(dim=-1)).sum(dim=-1).cpu()
    return largest(answers.view(torch.float32)[:, 0].double() / nats - 1)


def largest(off: torch.Tensor) -> float:
    """The largest absolute value; infinite when one is NaN, which is equal to nothing."""
    return float("inf") if bool(off.isnan().any()) else float(off.abs().max())
