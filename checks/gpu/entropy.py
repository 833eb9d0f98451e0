"""Builds, checks and times the CUDA entropy kernels on a machine with a GPU, in one go.

    python -m checks.gpu.entropy                  # everything; writes bench/results/gpu.json
    python -m checks.gpu.entropy --only check     # only whether the answers are right
    python -m checks.gpu.entropy --sweep          # other unrolls, blocks and splits too
    python -m checks.gpu.entropy --json           # the whole result on standard output

Needs PyTorch with CUDA and nvcc, and nothing of Meridian but this checkout; where `meridian` can be imported, how it
launches the kernels itself is checked and timed too. Right is what float64 says of the same
inputs, which are fresh in each run; answers are full of nonsense before each launch. Times are CUDA graphs of launches
over inputs larger than the L2 cache together, replayed; the median, and the quartiles. Exit code: 0 all bounds hold,
1 one does not, 2 bad arguments, 3 there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Any

from checks.gpu.answers import check, figure
from checks.gpu.driver import MOST_PARTS, ROOT, Failed, Kernels, nvcc, splits
from checks.gpu.product import product

if TYPE_CHECKING:
    import torch

RESULT = ROOT / "bench" / "results" / "gpu.json"
PARTS = ("check", "sanitize", "product", "time")
# Qwen3's vocabulary.
VOCAB = 151_936
ROWS = (1, 8, 64, 256, 1024)
# Larger than any L2 cache of today, and less than any such card's memory.
ROTATED_BYTES = 512 << 20
REPLAYS = 30
NOT_MEASURED = 3
SANITIZER = "compute-sanitizer"


def main() -> int:
    """Command line."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--only", choices=PARTS, action="append", help="a part; may be given again (default: all)")
    p.add_argument("--sweep", action="store_true", help="time other ways to compile and to split too")
    p.add_argument("--small", action="store_true", help="check small sizes only, as under compute-sanitizer")
    p.add_argument("--seed", type=int, default=time.time_ns() % (1 << 31), help="of the inputs (default: the clock)")
    p.add_argument("--json", action="store_true", help="print the whole result as JSON")
    p.add_argument("--out", type=Path, default=RESULT, help=f"where to write it (default {RESULT.relative_to(ROOT)})")
    a = p.parse_args()
    try:
        import torch
    except ImportError:
        print("not measured: PyTorch is not installed", file=sys.stderr)
        return NOT_MEASURED
    if not torch.cuda.is_available():
        print("not measured: PyTorch sees no CUDA device", file=sys.stderr)
        return NOT_MEASURED
    parts = a.only or PARTS
    try:
        kernels = Kernels.on_gpu(torch)
        figures: list[dict[str, Any]] = []
        if "check" in parts:
            figures += check(kernels, a.seed, small=a.small)
        if "sanitize" in parts:
            figures += sanitize(a.seed)
        if "product" in parts:
            figures += product(torch, a.seed)
        if "time" in parts:
            figures += times(kernels)
        found: dict[str, Any] = provenance(torch) | {"seed": a.seed, "figures": figures}
        if a.sweep:
            found["sweep"] = sweep(torch)
    except Failed as why:
        print(f"error: {why}", file=sys.stderr)
        return 1
    show(found)
    if a.json:
        print(json.dumps(found))
    if set(parts) == set(PARTS):
        a.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(figure["holds"] is not False for figure in figures) else 1


def sanitize(seed: int) -> list[dict[str, Any]]:
    """The check again under compute-sanitizer, our kernels only: memory, races in shared memory, barriers."""
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
        command += ["--error-exitcode", "9", sys.executable, "-m", "checks.gpu.entropy"]
        command += ["--only", "check", "--small", "--seed", str(seed)]
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


def times(kernels: Kernels) -> list[dict[str, Any]]:
    """The kernel against PyTorch and against a copy, in the same run."""
    torch = kernels.torch
    found = []
    for rows in ROWS:
        for kind in (torch.bfloat16, torch.float32):
            if rows != 256 and kind != torch.bfloat16:
                continue
            sets = inputs(torch, rows, kind)
            label = f"{rows} x {VOCAB} {str(kind).removeprefix('torch.')}"
            gigabytes = sets[0].nbytes / 1e9
            answers = kernels.answers(rows)
            own = timed(torch, sets, lambda x, answers=answers: kernels.launch(x, answers))
            to = cycle([torch.empty_like(one) for one in sets])
            copy = timed(torch, sets, lambda x, to=to: next(to).copy_(x))
            read = timed(torch, sets, lambda x: x.view(torch.int32).sum())
            eager = timed(torch, sets, entropy)
            # The faster of two ways to write it.
            compiled = min(
                (timed(torch, sets, torch.compile(way, dynamic=False)) for way in (entropy, entropy_by_sums)),
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


def inputs(torch: Any, rows: int, kind: Any) -> list[torch.Tensor]:
    """Random logits, several sets of them, so that no launch finds its own in the L2 cache."""
    one = rows * VOCAB * torch.tensor([], dtype=kind).element_size()
    return [
        (torch.randn(rows, VOCAB, device="cuda", dtype=torch.float32) * 3).to(kind)
        for _ in range(max(ROTATED_BYTES // one, 2))
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


def timed(torch: Any, sets: Sequence[torch.Tensor], work: Callable[[torch.Tensor], object]) -> list[float]:
    """Microseconds of one call: lower quartile, median, upper quartile over replays of a graph of a call a set."""
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
    for _ in range(3):
        graph.replay()
    taken = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) * 1e3 / len(sets))
    return quantiles(taken, n=4, method="inclusive")


def quartiles(name: str, taken: list[float], bound: str | None = None) -> dict[str, Any]:
    return figure(name, taken[1], "us", bound, low=taken[0], high=taken[2])


def sweep(torch: Any) -> list[dict[str, Any]]:
    """Times of other ways to compile the kernel and to split the rows, best first for each number of rows."""
    found = []
    for unroll, blocks in ((2, 5), (2, 8), (4, 4), (4, 5), (4, 6), (6, 4), (8, 3), (8, 4)):
        kernels = Kernels.on_gpu(torch, f"-DMERIDIAN_UNROLL={unroll}", f"-DMERIDIAN_BLOCKS={blocks}")
        for rows in (1, 64, 256, 1024):
            sets, answers = inputs(torch, rows, torch.bfloat16), kernels.answers(rows)
            usual = splits(rows, VOCAB * 2, kernels.multiprocessors)
            for parts in sorted({1, 2, 4, 8, 16, 37, 75, 150, usual}):
                if rows * parts > MOST_PARTS or parts < usual / 4 or parts > usual * 4:
                    continue
                taken = timed(torch, sets, lambda x, k=kernels, a=answers, n=parts: k.launch(x, a, parts=n))
                found.append({"rows": rows, "unroll": unroll, "blocks": blocks, "splits": parts, "us": taken[1]})
        print(f"  unroll {unroll}, {blocks} blocks", file=sys.stderr, flush=True)
    return sorted(found, key=lambda one: (one["rows"], one["us"]))


def provenance(torch: Any) -> dict[str, Any]:
    """Machine, versions, commit."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "machine": f"{properties.name}, {properties.multi_processor_count} multiprocessors",
        "torch": torch.__version__,
        "commit": commit.stdout.strip() or "unknown",
        "measured": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": "python -m checks.gpu.entropy",
    }


def show(found: dict[str, Any]) -> None:
    """A short table, last."""
    print(f"{found['machine']}, torch {found['torch']}, commit {found['commit']}, seed {found['seed']}")
    for one in found.get("sweep", [])[:8]:
        print(f"  {one}")
    for one in found["figures"]:
        holds = {True: "holds", False: "FALLS SHORT", None: ""}[one["holds"]]
        print(f"{one['name']:58} {one['value']:12.5g} {one['unit']:10} {one['bound'] or '':9} {holds}")


if __name__ == "__main__":
    sys.exit(main())
