"""The kernels as the product launches them, through `meridian.kernels`: on a stream of its own beside PyTorch's.

Where the device is emulated, tensors are the CPU's, and so are the kernels that the product chooses.
"""

from __future__ import annotations

import sys
import time
from statistics import median, quantiles
from typing import Any

from checks.gpu.answers import figure, largest
from checks.gpu.entropy import Sizes

REPEATS = 200


def product(torch: Any, device: str, seed: int, sizes: Sizes) -> list[dict[str, Any]]:
    """Whether answers are of the logits as they were at the launch, whatever is written to them before and after; what
    a launch costs PyTorch's stream and the host. Nothing where `meridian` cannot be imported."""
    try:
        from meridian import kernels
    except ImportError as why:
        print(f"not run: the product's own launches: {why}", file=sys.stderr)
        return []
    worst = order(torch, kernels, device, seed)
    found = [figure("product: relative error of entropy while logits are overwritten", worst, "ratio", "<= 1e-5")]
    if device == "cuda":
        wrong = captured(torch, kernels)
        found.append(figure("product: launches in a graph that are not refused", wrong, "launches", "<= 0"))
    for rows in (1, 256):
        logits = torch.randn(rows, sizes.vocab, device=device)
        stream_us, host_us = [], []
        for _ in range(REPEATS):
            synchronize(torch, device)
            began = time.perf_counter()
            pending = kernels.launch(logits, require="native")
            host_us.append((time.perf_counter() - began) * 1e6)
            pending.entropies()
            synchronize(torch, device)
            stream_us.append((time.perf_counter() - began) * 1e6)
        low, middle, high = quantiles(stream_us, n=4, method="inclusive")
        name = f"product: {rows} x {sizes.vocab} float32"
        found.append(figure(f"{name}: time to the answers", middle, "us", low=low, high=high))
        found.append(figure(f"{name}: time of the call", median(host_us), "us"))
    return found


def synchronize(torch: Any, device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def order(torch: Any, kernels: Any, device: str, seed: int) -> float:
    """Largest relative error of entropies whose logits are late, and gone right after the launch."""
    generator = torch.Generator(device=device).manual_seed(seed)
    worst, pending = 0.0, []
    for round_, rows in enumerate((1, 8, 300, 1500, 64, 2, 1024, 7)):
        vocab = (20_000 if device == "cuda" else 200) + round_
        fresh = torch.randn(rows, vocab, generator=generator, device=device) * 3
        logits = torch.full_like(fresh, float("nan"))
        asked = list(range(rows))[::-2]
        tokens = torch.arange(len(asked), device=device, dtype=torch.int32)
        if device == "cuda":
            # Longer than the host takes to launch.
            torch.cuda._sleep(20_000_000)
        logits.copy_(fresh)
        pending.append((kernels.launch(logits, asked, tokens=tokens, require="native"), fresh[asked]))
        logits.fill_(float("nan"))
        del logits
        torch.full_like(fresh, float("nan"))
    for one, rows in pending:
        nats = torch.special.entr(rows.double().softmax(dim=-1)).sum(dim=-1).cpu()
        worst = max(worst, largest(one.result().entropy.double() / nats - 1))
    return worst


def captured(torch: Any, kernels: Any) -> int:
    """Launches while a graph is captured that are not refused, and captures that a refusal breaks."""
    logits, wrong = torch.randn(4, 1000, device="cuda"), 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = logits * 2
        try:
            kernels.launch(logits, require="native")
            wrong += 1
        except ValueError:
            pass
    graph.replay()
    torch.cuda.synchronize()
    return wrong + (not bool((doubled == logits * 2).all()))
