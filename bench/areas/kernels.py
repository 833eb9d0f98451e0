"""Area `kernels`: what compilers make of the CUDA kernels, what they answer, and what a GPU measured."""

from __future__ import annotations

import heapq
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from .common import RESULTS, ROOT, WORK, Bound, Figure, say

sys.path.insert(0, str(ROOT / "bench" / "gpu"))

from checks import check
from driver import Failed, Kernels, compile_cubin, nvcc

TARGETS = (80, 90, 100)
# Vectors of 16 bytes of 8 logits each that a turn of the loop reads.
LOGITS_A_TURN = 4 * 8
# Exit code of bench/gpu/entropy.py.
NOT_MEASURED = 3


def compiled() -> Iterator[Figure]:
    """Spills, registers and loads of every target."""
    for target in TARGETS:
        image, said = compile_cubin(target)
        spills = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
        registers = max(map(int, re.findall(r"Used (\d+) registers", said)))
        yield Figure(f"sm_{target}: bytes spilled, all kernels", spills, "bytes", Bound(0))
        # 5 blocks of 256 threads share a multiprocessor's 65,536 registers.
        yield Figure(f"sm_{target}: registers a thread, largest kernel", registers, "registers", Bound(48))
        wide, instructions = loop(image)
        name = f"sm_{target}: 128-bit loads in a turn of the bf16 loop"
        yield Figure(name, wide, "loads", Bound(4, at_most=False))
        yield Figure(
            f"sm_{target}: instructions a logit in the bf16 loop", instructions / LOGITS_A_TURN, "instructions"
        )


def loop(image: bytes) -> tuple[int, int]:
    """Loads of 16 bytes, and instructions, of one usual turn of the bf16 loop: the shortest way from its first such
    load back to it on which every logit has its exponential."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "entropy.cubin"
        path.write_bytes(image)
        tool = Path(nvcc()).parent / "cuobjdump"
        done = subprocess.run([str(tool), "-sass", str(path)], capture_output=True, text=True, check=True)
    function = done.stdout.partition("Function : meridian_entropy_bf16")[2].partition("Function :")[0]
    lines = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", function)
    at = {int(address, 16): i for i, (address, _) in enumerate(lines)}
    code = [text for _, text in lines]
    start = next(i for i, text in enumerate(code) if is_wide(text))
    # Where a BSYNC goes on is said by the BSSY of the same barrier before it.
    meets: dict[int, int] = {}
    latest: dict[str, int] = {}
    for i, text in enumerate(code):
        if found := re.search(r"BSSY(?:\.\w+)* (B\d+), 0x([0-9a-f]+)", text):
            latest[found[1]] = at[int(found[2], 16)]
        elif found := re.search(r"BSYNC(?:\.\w+)* (B\d+)", text):
            meets[i] = latest[found[1]]
    # Shortest first: length, instruction, exponentials, loads; each state once.
    queue, seen = [(0, start, 0, 0)], set[tuple[int, int]]()
    while queue:
        length, i, exponentials, wide = heapq.heappop(queue)
        if i == start and length and exponentials >= LOGITS_A_TURN:
            return wide, length
        if (i, exponentials) in seen or ("EXIT" in code[i] and not code[i].startswith("@")):
            continue
        seen.add((i, exponentials))
        counts = (exponentials + ("MUFU.EX2" in code[i]), wide + is_wide(code[i]))
        branch = re.search(r"BRA(?:\.\w+)* .*?0x([0-9a-f]+)", code[i])
        following = {at[int(branch[1], 16)]} if branch else {meets[i]} if i in meets else {i + 1}
        if code[i].startswith("@"):
            following.add(i + 1)
        for after in following:
            heapq.heappush(queue, (length + 1, after, *counts))
    raise Failed("the bf16 kernel has no such loop")


def is_wide(text: str) -> bool:
    """Whether an instruction loads 16 bytes of a row."""
    return "LDG" in text and ".128" in text and "CONSTANT" in text


def emulated() -> Iterator[Figure]:
    """The kernels' own text run on the CPU, thread by thread, against float64."""
    import torch

    for found in check(Kernels.emulated(torch), seed=20261122, small=True):
        comparison, _, limit = (found["bound"] or "").partition(" ")
        bound = Bound(float(limit), at_most=comparison != ">=") if limit else None
        yield Figure(f"emulated on the CPU: {found['name']}", found["value"], found["unit"], bound)


def gpu() -> Iterator[Figure]:
    """What bench/gpu/entropy.py measures on a GPU, here or, where there is none, where it was run before."""
    kept = RESULTS / "gpu.json"
    WORK.mkdir(parents=True, exist_ok=True)
    out = WORK / "gpu.json"
    command = [sys.executable, str(ROOT / "bench" / "gpu" / "entropy.py"), "--out", str(out)]
    out.unlink(missing_ok=True)
    code = subprocess.run(command, stdout=sys.stderr).returncode
    if code != NOT_MEASURED:
        if not out.exists():
            sys.exit(f"error: bench/gpu/entropy.py failed with exit code {code}")
        kept.write_text(out.read_text())
    elif not kept.exists():
        say("  not measured: no GPU here, and none was measured before")
        return
    found = json.loads(kept.read_text())
    for line in found["figures"]:
        comparison, _, limit = (line["bound"] or "").partition(" ")
        bound = Bound(float(limit), comparison != ">=", below=comparison == "<") if limit else None
        name = f"{found['machine']}, {found['commit']}: {line['name']}"
        yield Figure(name, line["value"], line["unit"], bound, line.get("low"), line.get("high"))


def parts(pairs: int) -> dict[str, Callable[[], Iterator[Figure]]]:
    """Parts of the area by name."""
    del pairs

    def or_say(part: Callable[[], Iterator[Figure]]) -> Callable[[], Iterator[Figure]]:
        def run() -> Iterator[Figure]:
            try:
                yield from part()
            except Failed as why:
                sys.exit(f"error: {why}")

        return run

    return {"compiled": or_say(compiled), "emulated": or_say(emulated), "gpu": or_say(gpu)}
