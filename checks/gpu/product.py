"""The kernels as the product launches them, through `meridian.kernels`: on a stream of its own beside PyTorch's."""

from __future__ import annotations

import sys
import time
from statistics import median, quantiles
from typing import Any

from checks.gpu.answers import figure, largest

REPEATS = 200


def product(torch: Any, seed: int) -> list[dict[str, Any]]:
    """Whether answers are of the logits as they were at the launch, whatever is written to them before and after; what
    a launch costs PyTorch's stream and the host. Nothing where `meridian` cannot be imported."""
    try:
        from meridian import kernels
    except ImportError as why:
        print(f"not run: the product's own launches: {why}", file=sys.stderr)
        return []
    found = [
        figure(
            "product: relative error of entropy while logits are overwritten",
            order(torch, kernels, seed),
            "ratio",
            "<= 1e-5",
        ),
        figure("product: launches in a graph that are not refused", captured(torch, kernels), "launches", "<= 0"),
    ]
    for rows in (1, 256):
        logits = torch.randn(rows, 151_936, device="cuda")
        stream_us, host_us = [], []
        for _ in range(REPEATS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start.record()
            began = time.perf_counter()
            pending = kernels.launch(logits, require="native")
            host_us.append((time.perf_counter() - began) * 1e6)
            end.record()
            pending.entropies()
            torch.cuda.synchronize()
            stream_us.append(start.elapsed_time(end) * 1e3)
        low, middle, high = quantiles(stream_us, n=4, method="inclusive")
        name = f"product: {rows} x 151936 float32"
        found.append(figure(f"{name}: time of PyTorch's stream", middle, "us", low=low, high=high))
        found.append(figure(f"{name}: time of the call", median(host_us), "us"))
    return found


def order(torch: Any, kernels: Any, seed: int) -> float:
    """Largest relative error of entropies whose logits are late, and gone right after the launch."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    worst, pending = 0.0, []
    for round_, rows in enumerate((1, 8, 300, 1500, 64, 2, 1024, 7)):
        fresh = torch.randn(rows, 20_000 + round_, generator=generator, device="cuda") * 3
        logits = torch.full_like(fresh, float("nan"))
        asked = list(range(rows))[::-2]
        tokens = torch.arange(len(asked), device="cuda", dtype=torch.int32)
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
