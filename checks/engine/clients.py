"""One day of requests against `vllm serve` with Meridian, driven by AIPerf and by `vllm bench serve`: what each client
measured, beside what the host counted meanwhile (`GET /v1/latency`).

The server has half of the cores and the clients the others, as on machines of their own: a client that waits for a core
measures that. Prompts are long, so that the time between client and server is a small part of a first token.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from meridian.vllm.bench.model import model_dir

from checks.run import meridian
from python.tests.vllm.serving import SCHEDULER, Fleet, ask, configure

# The level of every request: first token, and mean gap between two tokens, ms. Prompts are random tokens, so none of
# them begins to think.
TTFT_MS = 1500.0
TPOT_MS = 40.0
LEVEL = f"""
[model]
think_start = ""
think_end = ""
[service_levels.client]
default = true
ttfo_ms = {TTFT_MS}
prompt_ms_per_token = 0
tpot_ms = {TPOT_MS}
"""


def write_day(path: Path, requests: int, rate: float) -> None:
    """A trace in Meridian's format: Poisson arrivals, and in its middle third twice as many."""
    rng = random.Random(5)
    now = 0.0
    with path.open("w") as out:
        out.write("arrival_s,prompt_tokens,think_tokens,output_tokens\n")
        for i in range(requests):
            burst = requests // 3 <= i < 2 * requests // 3
            now += rng.expovariate(rate * (2 if burst else 1))
            out.write(f"{now:.3f},{rng.randint(600, 1800)},0,{rng.randint(20, 120)}\n")


def ended(*command: str | Path, env: dict[str, str], log: Path) -> None:
    """Run a client to its end."""
    with log.open("w") as out:
        done = subprocess.run(command, env=env, stdout=out, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        sys.exit(f"error: {Path(command[0]).name}: exit code {done.returncode}: {log.read_text()[-2000:]}")


def aiperf(program: Path, fleet: Fleet, replay: list[str], folder: Path) -> dict[str, float]:
    """What AIPerf reports. Without a network it finds a tokenizer by name only, in the cache of Hugging Face."""
    hub = folder / "hub" / "models--meridian--tiny-random"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text("0")
    (hub / "snapshots").mkdir()
    (hub / "snapshots" / "0").symlink_to(model_dir())
    slo = f"time_to_first_token:{TTFT_MS} inter_token_latency:{TPOT_MS}"
    command = [program, *replay[1:], "--fixed-schedule", "--streaming", "--url", fleet.base, "--goodput", slo]
    command += ["--endpoint-type", "completions", "--model", "tiny-random", "--tokenizer", "meridian/tiny-random"]
    command += ["--use-server-token-count", "--extra-inputs", "ignore_eos:true", "--ui", "none"]
    command += ["--artifact-dir", folder]
    ended(*command, env={**fleet.env, "HF_HUB_CACHE": str(folder / "hub")}, log=folder / "log")
    said = json.loads((folder / "profile_export_aiperf.json").read_text())
    return {
        "requests": said["request_count"]["avg"],
        "TTFT, mean": said["time_to_first_token"]["avg"],
        "ITL, mean": said["inter_token_latency"]["avg"],
        "goodput": said["good_request_count"]["avg"],
    }


def vllm_bench(requests: int, fleet: Fleet, replay: list[str], folder: Path) -> dict[str, float]:
    """What `vllm bench serve` reports."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", *replay[1:], "--num-prompts", str(requests)]
    command += ["--base-url", fleet.base, "--model", "tiny-random", "--tokenizer", str(model_dir())]
    command += ["--backend", "vllm", "--goodput", f"ttft:{TTFT_MS}", f"tpot:{TPOT_MS}", "--disable-tqdm"]
    command += ["--save-result", "--result-dir", str(folder), "--result-filename", "result.json"]
    ended(*command, env=fleet.env, log=folder / "log")
    said = json.loads((folder / "result.json").read_text())
    return {
        "requests": said["completed"],
        "TTFT, mean": said["mean_ttft_ms"],
        "ITL, mean": said["mean_tpot_ms"],
        "goodput": said["request_goodput"] * said["duration"],
    }


def counted(fleet: Fleet) -> dict[str, Any]:
    """The host's latencies since its start."""
    process = fleet.found()[0]
    code, said = ask("http://" + process["admin"].removeprefix("http://"), "GET", "/v1/latency")
    if code != 200:
        sys.exit(f"error: /v1/latency: {code}: {said}")
    return said


def metrics(fleet: Fleet) -> dict[str, float]:
    """vLLM's own sums and counts, which its API server keeps."""
    _, text = ask(fleet.base, "GET", "/metrics")
    found = re.findall(r"^vllm:(time_to_first_token|inter_token_latency)_seconds_(sum|count)\{.*\} (.*)$", text, re.M)
    return {f"{name} {what}": float(value) for name, what, value in found}


def between(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """The host's figures of what happened between two answers."""

    def mean(kind: str) -> float:
        count = sum(n for _, n in after[kind]["counts"]) - sum(n for _, n in before[kind]["counts"])
        return (after[kind]["sum_ms"] - before[kind]["sum_ms"]) / count

    return {
        "requests": after["finished"] - before["finished"],
        "TTFT, mean": mean("ttft"),
        "ITL, mean": mean("output_itl"),
        "goodput": after["in_time"] - before["in_time"],
    }


def served(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """vLLM's figures of what happened between two answers."""

    def mean(name: str) -> float:
        total, count = (after[f"{name} {what}"] - before.get(f"{name} {what}", 0.0) for what in ("sum", "count"))
        return 1e3 * total / count

    return {"TTFT, mean": mean("time_to_first_token"), "ITL, mean": mean("inter_token_latency")}


def measure(program: str, requests: int = 160, rate: float = 2.0) -> dict[str, Any]:
    """By client, each figure as it says it, as vLLM's metrics do, and as the host does. `program` is AIPerf's."""
    cores = sorted(os.sched_getaffinity(0))
    half = (len(cores) + 1) // 2
    servers, clients = cores[:half], cores[half:] or cores
    tools = {"aiperf": partial(aiperf, Path(program)), "vllm": partial(vllm_bench, requests)}
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        day = folder / "day.csv"
        write_day(day, requests, rate)
        options = ("--no-enable-prefix-caching", *SCHEDULER)
        os.sched_setaffinity(0, servers)
        bound = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, servers))}
        fleet = Fleet(folder, configure(folder, LEVEL), options, bound, engines=1)
        try:
            fleet.wait_until_ready()
            os.sched_setaffinity(0, clients)
            for tool, drive in tools.items():
                saved = meridian("bench", "trace", day, "--save", folder / f"{tool}.jsonl", "--as", tool)
                own, host = metrics(fleet), counted(fleet)
                client = drive(fleet, shlex.split(saved["replay"]), folder)
                server, host = served(own, metrics(fleet)), between(host, counted(fleet))
                found[tool] = {"client": client, "vLLM's metrics": server, "host": host}
        finally:
            fleet.kill()
    return found
