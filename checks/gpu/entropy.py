"""Times of the CUDA entropy kernels, and their checks under compute-sanitizer.

Times are CUDA graphs of launches over inputs larger than the L2 cache together, replayed; the median, and the
quartiles. On the emulated device they are times of calls on the CPU, which say nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Any

from checks.gpu.answers import figure
from checks.gpu.driver import MOST_PARTS, ROOT, Kernels, nvcc, splits

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Sizes:
    """What is timed. Inputs are larger than any L2 cache of today, and less than any such card's memory."""

    # Qwen3's vocabulary.
    vocab: int = 151_936
    rows: tuple[int, ...] = (1, 8, 64, 256, 1024)
    rotated_bytes: int = 512 << 20
    replays: int = 30


# Enough for every line of the code.
DRY = Sizes(vocab=1000, rows=(1, 256), rotated_bytes=1 << 20, replays=3)
SANITIZER = "compute-sanitizer"


def sanitize(seed: int, *, at_all: bool) -> list[dict[str, Any]]:
    """The check again under compute-sanitizer, our kernels only: memory, races in shared memory, barriers. It takes
    minutes, and needs a GPU."""
    if not at_all:
        print(f"not run: {SANITIZER}, which takes minutes on a GPU", file=sys.stderr)
        return []
    folders = [Path(nvcc()).parent, Path("/usr/local/cuda/bin")]
    beside = next((str(folder / SANITIZER) for folder in folders if (folder / SANITIZER).is_file()), None)
    tool = shutil.which(SANITIZER) or beside
    found = []
    for name in ("memcheck", "racecheck", "synccheck"):
        if tool is None:
            print(f"not run: {SANITIZER} was not found", file=sys.stderr)
            found.append(figure(f"{SANITIZER} {name}: errors", float("nan"), "errors", "<= 0"))
            continue
        command = [tool, "--tool", name, "--kernel-regex", "kns=meridian", "--report-api-errors", "no"]
        command += ["--error-exitcode", "9", sys.executable, "-m", "checks.gpu"]
        command += ["--only", "answers", "--small", "--seed", str(seed)]
        # Without its cache every tensor of PyTorch is an allocation that memcheck knows.
        env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
        summary = next((line for line in done.stdout.splitlines() if "SUMMARY" in line), "")
        counted = re.search(r"SUMMARY: (\d+) (?:error|hazard)", summary)
        errors = float(counted[1]) if counted else float("nan")
        found.append(
            figure(f"{SANITIZER} {name}: errors", errors, "errors", "<= 0", said=summary, code=done.returncode)
        )
    return found


def times(kernels: Kernels, sizes: Sizes) -> list[dict[str, Any]]:
    """The kernel against PyTorch and against a copy, in the same run."""
    torch = kernels.torch
    found = []
    for rows in sizes.rows:
        for kind in (torch.bfloat16, torch.float32):
            if rows != 256 and kind != torch.bfloat16:
                continue
            sets = inputs(kernels, rows, kind, sizes)
            label = f"{rows} x {sizes.vocab} {str(kind).removeprefix('torch.')}"
            gigabytes = sets[0].nbytes / 1e9
            answers = kernels.answers(rows)
            own = timed(kernels, sizes, sets, lambda x, answers=answers: kernels.launch(x, answers))
            to = cycle([torch.empty_like(one) for one in sets])
            copy = timed(kernels, sizes, sets, lambda x, to=to: next(to).copy_(x))
            read = timed(kernels, sizes, sets, lambda x: x.view(torch.int32).sum())
            eager = timed(kernels, sizes, sets, entropy)
            # The faster of two ways to write it.
            compiled = min(
                (timed(kernels, sizes, sets, torch.compile(way, dynamic=False)) for way in (entropy, entropy_by_sums)),
                key=lambda taken: taken[1],
            )
            of_copy = gigabytes / own[1] / (2 * gigabytes / copy[1])
            is_bound = rows == 256 and kind == torch.bfloat16
            found += [
                quartiles(f"{label}: time", own, "< 12" if rows == 1 else None),
                figure(f"{label}: bandwidth read", gigabytes / own[1] * 1e6, "GB/s"),
                figure(f"{label}: bandwidth of a sum of its words", gigabytes / read[1] * 1e6, "GB/s"),
                figure(f"{label}: bandwidth of a copy, both ways", 2 * gigabytes / copy[1] * 1e6, "GB/s"),
                figure(f"{label}: bandwidth over a copy's", of_copy, "ratio", ">= 0.9" if is_bound else None),
                figure(f"{label}: torch eager over the kernel", eager[1] / own[1], "ratio"),
                figure(
                    f"{label}: torch.compile over the kernel",
                    compiled[1] / own[1],
                    "ratio",
                    ">= 1.8" if is_bound else None,
                ),
            ]
            print(f"  timed {label}", file=sys.stderr, flush=True)
    return found


def inputs(kernels: Kernels, rows: int, kind: Any, sizes: Sizes) -> list[torch.Tensor]:
    """Random logits, several sets of them, so that no launch finds its own in the L2 cache."""
    torch = kernels.torch
    one = rows * sizes.vocab * torch.tensor([], dtype=kind).element_size()
    return [
        (torch.randn(rows, sizes.vocab, device=kernels.device, dtype=torch.float32) * 3).to(kind)
        for _ in range(max(sizes.rotated_bytes // one, 2))
    ]


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """As one writes it."""
    logs = logits.float().log_softmax(dim=-1)
    return -(logs.exp() * logs).sum(dim=-1)


def entropy_by_sums(logits: torch.Tensor) -> torch.Tensor:
    """As a compiler may like it better: two sums against the maximum."""
    x = logits.float()
    d = x - x.amax(dim=-1, keepdim=True)
    e = d.exp()
    s = e.sum(dim=-1)
    return s.log() - (d * e).sum(dim=-1) / s


def timed(
    kernels: Kernels, sizes: Sizes, sets: Sequence[torch.Tensor], work: Callable[[torch.Tensor], object]
) -> list[float]:
    """Microseconds of one call: lower quartile, median, upper quartile over replays of a graph of a call a set."""
    replay = graph_of if kernels.device == "cuda" else calls_of
    taken = replay(kernels, sets, work)
    for _ in range(3):
        taken()
    return quantiles([taken() * 1e6 / len(sets) for _ in range(sizes.replays)], n=4, method="inclusive")


def graph_of(
    kernels: Kernels, sets: Sequence[torch.Tensor], work: Callable[[torch.Tensor], object]
) -> Callable[[], float]:
    """Replays a graph of the calls; seconds on the device."""
    torch = kernels.torch
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work(sets[0])
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for one in sets:
            work(one)

    def replayed() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return replayed


def calls_of(
    kernels: Kernels, sets: Sequence[torch.Tensor], work: Callable[[torch.Tensor], object]
) -> Callable[[], float]:
    """Makes the calls on the emulated device; seconds of the CPU."""

    def called() -> float:
        begun = time.perf_counter()
        for one in sets:
            work(one)
        kernels.synchronize()
        return time.perf_counter() - begun

    return called


def quartiles(name: str, taken: list[float], bound: str | None = None) -> dict[str, Any]:
    return figure(name, taken[1], "us", bound, low=taken[0], high=taken[2])


def sweep(torch: Any, sizes: Sizes) -> list[dict[str, Any]]:
    """Times of other ways to compile the kernel and to split the rows, best first for each number of rows."""
    found = []
    for unroll, blocks in ((2, 5), (2, 8), (4, 4), (4, 5), (4, 6), (6, 4), (8, 3), (8, 4)):
        kernels = Kernels.on_gpu(torch, f"-DMERIDIAN_UNROLL={unroll}", f"-DMERIDIAN_BLOCKS={blocks}")
        for rows in (1, 64, 256, 1024):
            sets, answers = inputs(kernels, rows, torch.bfloat16, sizes), kernels.answers(rows)
            usual = splits(rows, sizes.vocab * 2, kernels.multiprocessors)
            for parts in sorted({1, 2, 4, 8, 16, 37, 75, 150, usual}):
                if rows * parts > MOST_PARTS or parts < usual / 4 or parts > usual * 4:
                    continue
                taken = timed(kernels, sizes, sets, lambda x, k=kernels, a=answers, n=parts: k.launch(x, a, parts=n))
                found.append({"rows": rows, "unroll": unroll, "blocks": blocks, "splits": parts, "us": taken[1]})
        print(f"  unroll {unroll}, {blocks} blocks", file=sys.stderr, flush=True)
    return sorted(found, key=lambda one: (one["rows"], one["us"]))
