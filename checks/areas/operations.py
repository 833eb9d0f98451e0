"""What operators bring and rely on: their traces, a machine that is short of time, and engines that hang or lie."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from checks.figures import Figure, Part, printed
from checks.run import POLICIES, RELEASE, ROOT, build, engine, example, fetched, meridian, say

# A file of each format, written by us: those that the fuzzer begins with.
SAMPLES = ROOT / "host" / "fuzz" / "corpus" / "trace"
# Each file with the requests that are in it, failed ones left out.
ROWS = {
    "own.csv": 2,
    "servegen.csv": 1,
    "azure.csv": 2,
    "mooncake.jsonl": 2,
    "agentic.jsonl": 2,
    "vllm.json": 3,
    "bailian.jsonl": 2,
    "bailian.gz": 2,
    "burstgpt.csv": 1,
    "copilot.jsonl": 1,
    "aiperf.jsonl": 1,
    "columns.csv": 2,
}
# What a file needs that does not say all of itself.
OPTIONS = {
    "columns.csv": (
        "--columns",
        "arrival=timestamp,prompt=input_length,output=output_length,session=session_id,blocks=hash_ids",
    ),
    # Its last row has a text, of which no tokenizer counts the tokens here.
    "mooncake.jsonl": ("--requests", "2"),
}
# A day of more rows than a run takes.
LONG_DAY = 2_200_000


def formats(_: int) -> Iterator[Figure]:
    """Requests read of a sample of each format, and how long a day of millions of rows takes."""
    build()
    for name, rows in ROWS.items():
        read = meridian("bench", "trace", SAMPLES / name, *OPTIONS.get(name, ()))
        yield Figure(f"{name} ({read['format']}): requests read", read["requests"], "requests", f">= {rows}")
    with tempfile.TemporaryDirectory() as folder:
        day = Path(folder) / "day.csv"
        with day.open("w") as out:
            out.write("TIMESTAMP,ContextTokens,GeneratedTokens\n")
            for row in range(LONG_DAY):
                clock = f"{row // 91_667:02}:{row // 1528 % 60:02}:{row // 26 % 60:02}"
                out.write(f"2024-05-10 {clock}.5+00:00,{row % 900 + 1},7\n")
        read = meridian("bench", "trace", day)
        yield Figure(f"a day of {LONG_DAY:,} rows: requests kept", read["requests"], "requests", ">= 2000000")


# The period of Linux's CPU quotas.
PERIOD_S = 0.1
SECONDS = 600
SHARES = (0.1, 0.2, 0.5)


def on_a_share(share: float, *args: str) -> dict[str, float]:
    """The lines of `quota_figures` while its process gets this share of each period, and is stopped for the rest."""
    build()
    program = RELEASE / "examples" / "quota_figures"
    say(f"  {program.name} {' '.join(args)}, on {share:.0%} of each {PERIOD_S * 1e3:.0f} ms")
    with subprocess.Popen((program, *args), stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            time.sleep(PERIOD_S * share)
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(PERIOD_S * (1 - share))
            os.kill(process.pid, signal.SIGCONT)
        said = process.stdout.read() if process.stdout else ""
    if process.returncode != 0:
        sys.exit(f"error: {program.name}: exit code {process.returncode}")
    return {line["name"]: line["value"] for line in map(json.loads, said.splitlines())}


def quota(_: int) -> Iterator[Figure]:
    """A good policy on a share of a core, with itself in shadow."""
    good = ("good", str(POLICIES / "srpt.wasm"), str(SECONDS))
    # Together they have less than one core.
    with ThreadPoolExecutor(len(SHARES)) as pool:
        measured = list(pool.map(lambda share: on_a_share(share, *good), SHARES))
    for share, values in zip(SHARES, measured, strict=True):
        name = f"good policy on {share:.0%} of a core"
        yield Figure(f"{name}: quarantines", values["quarantines"], "quarantines", "<= 0")
        yield Figure(f"{name}: faults", values["faults"] + values["faults in shadow"], "faults", "<= 0")
        yield Figure(f"{name}: longest decision", values["longest decision"], "ms")
        yield Figure(f"{name}: steps", values["steps"], "steps")


def endless(_: int) -> Iterator[Figure]:
    """Policies that never end, on a whole core."""
    lines = example("quota_figures", "endless")
    deadline = next(line["value"] for line in lines if line["name"] == "deadline")
    for line in lines:
        if line["name"] != "deadline":
            yield Figure(line["name"], line["value"], "ms", f"<= {3 * deadline}")


def clients(_: int) -> Iterator[Figure]:
    """AIPerf and `vllm bench serve` against a server: what they, and vLLM's own metrics, say beside the host."""
    for tool, found in engine("clients", program=Path(fetched("aiperf")) / "bin" / "aiperf").items():
        host = found["host"]
        for side in ("client", "vLLM's metrics"):
            for name, value in found[side].items():
                apart = max(value, host[name]) / min(value, host[name]) - 1
                yield Figure(f"{tool}: {name}: {side} and host apart", apart, "share", "<= 0.02")


PARTS: dict[str, Part] = {
    "formats": formats,
    "clients": clients,
    "quota": quota,
    "endless": endless,
    # 50 roll-backs with one of three engines stopped; six commands over a fleet with engines that lie in 20 ways.
    **{what: printed(partial(example, "engines_figures", what)) for what in ("rollback", "lying")},
}
