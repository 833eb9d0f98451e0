"""What operators rely on: fleets and roll-outs, KV blocks between engines, hostile components and clients,
and what it costs to watch an engine."""

from __future__ import annotations

import json
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import mean, median
from typing import Any

from checks.figures import Figure, Part, Row, over_pairs, printed, ranged, table
from checks.report import markdown, write_table
from checks.run import SERVEGEN, WORK, example, meridian, output, seeds
from python.tests.vllm.serving import free_port

RUNS = 20


def simulated(program: str, what: str, runs: int) -> list[dict[str, Any]]:
    """The lines of an example about simulated engines."""
    folder = WORK / program
    folder.mkdir(parents=True, exist_ok=True)
    return example(program, what, str(runs), folder)


def share_of(name: str, right: int, runs: int, least: float = 1.0) -> Figure:
    """How many of the runs were right; the bound is this share of them."""
    return Figure(name, right, f"of {runs}", f">= {round(least * runs)}")


def experiment(_: int) -> Iterator[Figure]:
    """Experiments with a known difference of 10 %, and as many without any."""
    known, same = (simulated("experiment_figures", what, RUNS) for what in ("known", "same"))
    worse = sum(line["finding"]["verdict"] == "worse" for line in known)
    yield share_of("experiment: a difference of 10 % found", worse, RUNS, 0.9)
    ratios = [line["finding"]["ratio"]["ratio"] for line in known]
    yield ranged("experiment: the difference as measured (lowest and highest run)", ratios, "ratio")
    claimed = sum(line["finding"]["verdict"] in ("better", "worse") for line in same)
    yield share_of("experiment: no difference claimed between equal policies", RUNS - claimed, RUNS, 0.9)
    restored = sum(line["restored"] for line in known + same)
    yield share_of("experiment: the old policy decides in the end", restored, 2 * RUNS)
    yield Figure("experiment: simulated time of one", median(line["seconds"] for line in known) / 60, "min")
    yield Figure("experiment: share of the time cut off as warm-up", known[0]["cut"], "share")


HEADLINES = {
    "output_itl_mean": "mean output ITL",
    "output_itl_p99": "p99 output ITL",
    "ttft_mean": "mean TTFT",
    "ttfo_mean": "mean TTFO",
}


def predict(_: int) -> Iterator[Figure]:
    """Predictions from a recording of ten minutes, against ten minutes of other traffic in the same engine."""
    lines = [line for line in simulated("experiment_figures", "predict", 5) if line["predicted"]]
    for metric, title in HEADLINES.items():
        name, of = f"prediction: {title}", [line for line in lines if line["metric"] == metric]
        errors = [100 * abs(line["predicted"]["ratio"] / line["outcome"] - 1) for line in of]
        yield ranged(f"{name}, new over old: off by (median, lowest and highest)", errors, "%")
        held = sum(line["predicted"]["low"] <= line["outcome"] <= line["predicted"]["high"] for line in of)
        yield Figure(f"{name}: outcomes inside the 95 % interval", held / len(of), "share", ">= 0.9")
        off = [100 * abs(line["simulated"] / line["recorded"] - 1) for line in of if line["recorded"]]
        if off:
            yield Figure(f"{name} of the old policy, simulated, off the recorded", median(off), "%")
    yield Figure("prediction: predictions held against an outcome", len(lines), "ratios")


BAD = {"slow": "a policy that takes its deadline in every step", "starves": "a policy that starves output"}


def rollout(_: int, runs: int = RUNS) -> Iterator[Figure]:
    """Roll-outs of each kind of policy."""
    for what, title in BAD.items():
        name, lines = f"roll-out: {title}", simulated("rollout_figures", what, runs)
        back = [line for line in lines if line["outcome"] == "rolled-back" and "exceeded" in line["why"]]
        in_time = sum(line["looks"] <= 3 for line in back)
        yield share_of(f"{name}: sent back by a guard in at most 3 intervals", in_time, runs)
        yield ranged(f"{name}: intervals until it was sent back", [line["looks"] for line in lines], "intervals")
        wrong = sum(line["engines"] - line["right"] for line in lines)
        yield Figure(f"{name}: engines with another policy in the end", wrong, "engines", "<= 0")
    equal = simulated("rollout_figures", "equal", runs)
    kept = sum(line["outcome"] != "rolled-back" for line in equal)
    yield share_of("roll-out: an equal policy not sent back", kept, runs)
    completed = sum(line["outcome"] == "completed" for line in equal)
    yield Figure("roll-out: an equal policy on every engine in the end", completed, f"of {runs}")
    minutes = median(line["seconds"] for line in equal) / 60
    yield Figure("roll-out: simulated time of a complete one, holds of a minute", minutes, "min")


many = table(
    # What a roll-out over 1,000 engines costs.
    lambda _: simulated("rollout_figures", "many", 1),
    Row("roll-out of 1,000 engines: engines with the new policy in the end", "right", "engines"),
    Row("roll-out of 1,000 engines: calls to engines", "messages", "calls"),
    Row("roll-out of 1,000 engines: calls to each engine", lambda m: m["messages"] / m["engines"], "calls"),
    Row("roll-out of 1,000 engines: duration, four holds of a minute", "seconds", "s"),
    Row("roll-out of 1,000 engines: the controller's own time", "own_s", "s"),
    Row("roll-out of 1,000 engines: state file", lambda m: m["state_bytes"] / 1e6, "MB"),
    Row("roll-out of 1,000 engines: measurements", lambda m: m["measured_bytes"] / 1e6, "MB"),
)

BLOCKS, BLOCK_BYTES = 128, 2 << 20
# The fabric checks versions, layouts and every byte; that may cost a fifth of the rate.
SHARE = ">= 0.8"


def fabric(pairs: int) -> Iterator[Figure]:
    """A fetch of 256 MiB of KV blocks between two processes over TCP, each round beside memcpy and raw sockets."""
    size = ("--blocks", str(BLOCKS), "--block-bytes", str(BLOCK_BYTES), "--rounds", str(2 * pairs))
    found = example("fabric_figures", "tcp", *size)
    by_name: dict[str, list[float]] = {}
    for row in found:
        by_name.setdefault(row["name"], []).append(row["gb_s"])
    ours = [row for row in found if row["name"] == "tcp"]
    yield Figure("tcp: blocks moved", len(ours) * BLOCKS, "blocks of 2 MiB")
    yield Figure("tcp: rounds whose bytes differ", sum(not row["equal"] for row in ours), "rounds", "<= 0")
    for name, values in by_name.items():
        yield over_pairs(f"{name}, 256 MiB", values, "GB/s")
    for name in ("raw sockets, memory to memory", "raw sockets, one piece"):
        ratios = [own / raw for own, raw in zip(by_name["tcp"], by_name[name], strict=True)]
        # Raw sockets that move the same memory are the same work; one piece never leaves the cache.
        yield over_pairs(f"tcp over {name}", ratios, "ratio", SHARE if "memory" in name else None)


# Peers that are killed at some moment of a transfer of 32 MiB; what was cut short is asked of the next peer.
KILLED_PEERS = ("--blocks", "16", "--block-bytes", str(BLOCK_BYTES), "--rounds", "200")
fabric_kills = table(
    lambda _: example("fabric_figures", "kills", *KILLED_PEERS),
    Row("kills: peers killed", "transfers", "peers"),
    Row("kills: transfers cut short", "cut", "transfers"),
    Row("kills: transfers whose blocks were wrong or lost at last", "lost", "transfers", "<= 0"),
    Row("kills: transfers that left a block in use", "held", "transfers", "<= 0"),
)

# Engines of the plan, and the ratio whose figures are kept.
PLANNED, BEST_PLAN = 8, "handoff=6:2"
PLAN_RATES = {"below capacity": 4.0, "above capacity": 8.0}
PLAN_COLUMNS = {
    "itl_output_p99_ms": "output ITL p99, ms",
    "ttot_p50_ms": "TTOT p50, ms",
    "ttfo_p50_ms": "TTFO p50, ms",
    "ttft_p50_ms": "TTFT p50, ms",
    "throughput_tok_s": "tokens/s",
    "goodput_rps": "goodput, requests/s",
}


def plan(_: int) -> Iterator[Figure]:
    """Eight simulated engines, below and above what they can do: each ratio of engines that think and that answer,
    beside the same engines without handoffs."""
    names = ("balanced", *(f"handoff={think}:{PLANNED - think}" for think in range(PLANNED - 1, PLANNED // 2 - 1, -1)))
    flags = ["--trace", str(SERVEGEN), "--requests", "3000", "--engines", str(PLANNED), "--engine", "32b-h200"]
    flags += ["--rate", ",".join(map(str, PLAN_RATES.values())), "--seeds", seeds(3), "--transfer-gb-s", "20"]
    runs = meridian("bench", "replay", *flags, *(word for name in names for word in ("--policy", name)))["runs"]
    shown: list[str] = []
    for label, rate in PLAN_RATES.items():
        stock, *others = (mean_metrics(runs, rate, name.replace("=", " ")) for name in ("fcfs", *names))
        rows = [["8 of stock vLLM", *(f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in stock.values())]]
        for name, metrics in zip(names, others, strict=True):
            ratios = {key: metrics[key] / stock[key] for key in PLAN_COLUMNS}
            engines = "8 with `balanced`" if name == "balanced" else name.removeprefix("handoff=").replace(":", " + ")
            rows.append([engines, *(f"{x:,.0f}x" if x >= 100 else f"{x:.3g}x" for x in ratios.values())])
            if name == BEST_PLAN:
                for key, title in PLAN_COLUMNS.items():
                    yield Figure(f"plan, {label}, {name}: {title} over stock", ratios[key], "ratio")
        shown += [f"{label.capitalize()}, {rate:g} requests a second:", ""]
        shown += [*markdown(("engines", *PLAN_COLUMNS.values()), rows), ""]
    write_table("handoff", "plan", shown[:-1])


def mean_metrics(runs: list[dict[str, Any]], rate: float, policy: str) -> dict[str, float]:
    """A policy's metrics at a rate, mean over the seeds."""
    chosen = [run["metrics"] for run in runs if run["rate"] == rate and run["policy"] == policy]
    return {key: mean(metrics[key] for metrics in chosen) for key in PLAN_COLUMNS}


# Of each hostile component. A median is of what it costs, a longest one also of where the machine stopped it.
SHOWN = (
    "longest step, median of runs",
    "longest step",
    "median call",
    "p99 of the calls",
    "median start after a fault",
)
# A step with a fault: the deadline and its grain, and the longest start of a new instance, milliseconds.
STEP_MS = 2 + 2 * 0.5 + 5
# Both ends of the idle connections are in one process.
OPEN_FILES = 4096


def hostile(_: int, steps: int = 10_000) -> Iterator[Figure]:
    """Steps of each component that spends its time where nothing stops it, and as many calls as fit."""
    lines = example("bulk_figures", "decisions", str(steps))
    values = {line["name"]: line["value"] for line in lines}
    yield Figure("deadline of a decision", values["deadline"], "ms")
    # By instruction and memory, the longest over all sizes.
    longest: dict[str, float] = {}
    for line in lines:
        component, _, what = line["name"].partition(": ")
        if what in SHOWN:
            kind, memory = component.rsplit(" of ", 1)
            instruction = kind.removesuffix(" MiB").rstrip("0123456789 ").removesuffix(" over and over")
            name = f"{instruction} in {memory}: {what}"
            longest[name] = max(line["value"], longest.get(name, 0.0))
    bounds = {"longest step, median of runs": STEP_MS, "median call": values["deadline and its grain"]}
    for name, value in longest.items():
        limit = bounds.get(name.rpartition(": ")[2])
        yield Figure(name, value, "ms", None if limit is None else f"<= {limit}")


def endless(_: int) -> Iterator[Figure]:
    """Policies that never end, on a whole core."""
    lines = example("quota_figures")
    deadline = next(line["value"] for line in lines if line["name"] == "deadline")
    for line in lines:
        if line["name"] != "deadline":
            yield Figure(line["name"], line["value"], "ms", f"<= {3 * deadline}")


def attacked(what: str) -> list[dict[str, Any]]:
    """Rollbacks under one attack on the admin interface."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, hard))
    return example("admin_figures", what)


# A rollback is what an operator does when something is wrong: in less than a second, whatever else goes on.
ATTACKS = {"longest": "<= 1000", "reached who took it": "<= 0"}


@contextmanager
def collecting() -> Iterator[str]:
    """Takes spans and forgets them; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


def watched(pairs: int) -> Iterator[Figure]:
    """Throughput with metrics, explanations and spans on, over the same engine with all of them off, in turns. The
    collector of the spans runs on the same cores, so there is a figure without spans too."""

    def toml(name: str, prometheus: str = "", spans: str = "", admin: str = "") -> Path:
        path = WORK / f"watched-{name}.toml"
        path.write_text(f'[telemetry]\nprometheus = "{prometheus}"\n{spans}[admin]\nlisten = "{admin}"\n')
        return path

    def lost(what: str, config: Path) -> Iterator[Figure]:
        out = WORK / "watched.json"
        args = ("--requests", "240", "--in-flight", "24", "--pairs", str(pairs))
        driver = (sys.executable, "-m", "checks.engine.observed")
        output(*driver, "--toml", config, "--against", toml("off"), "--out", out, *args)
        found = json.loads(out.read_text())
        percent = [100 * (on / off - 1) for on, off in (x["times_s"] for x in found)]
        a_token = [1e6 * (x["times_s"][0] - x["times_s"][1]) / x["tokens"] for x in found]
        yield over_pairs(f"cost: throughput lost with {what}", percent, "%", "<= 1")
        yield over_pairs(f"cost: time a token with {what}", a_token, "us", "<= 1")

    metrics = f"127.0.0.1:{free_port()}"
    with collecting() as collector:
        spans = f'otlp_endpoint = "http://{collector}"\n'
        yield from lost("metrics and spans on", toml("on", metrics, spans, "127.0.0.1:0"))
    yield from lost("metrics on, without spans", toml("metrics", metrics))


FLEETS = ("host/fleet/src", "host/cli/src")
GUARDS = ("host/wasm/src", "host/core/src/slot", "host/core/src/guarded.rs")
HANDED_OUT = ("host/admin/src", "host/engine/src")

PARTS: dict[str, Part] = {
    "experiment": Part(experiment, (*FLEETS, "bench/src/sim", "bench/src/switchback.rs")),
    "predict": Part(predict, (*FLEETS, "bench/src/sim", "bench/src/predict")),
    "rollout": Part(rollout, (*FLEETS, "bench/src/rollout.rs"), lambda _: rollout(0, 3), 40),
    "rollout-many": Part(many, (*FLEETS, "bench/src/rollout.rs")),
    # 50 roll-backs with one of three engines stopped; six commands over a fleet with engines that lie in 20 ways.
    **{
        f"fleet-{what}": Part(printed(partial(example, "engines_figures", what)), FLEETS)
        for what in ("rollback", "lying")
    },
    "fabric": Part(fabric, ("host/memory/src/fabric",), fabric, 20),
    "fabric-kills": Part(fabric_kills, ("host/memory/src/fabric",)),
    "plan": Part(plan, ("bench/src/sim", "host/core/src/handoff", "host/core/src/plan*")),
    "hostile": Part(hostile, GUARDS, lambda _: hostile(0, 1000), 60),
    "endless": Part(endless, GUARDS, endless, 10),
    # Another process has the port; 2,000 connections send nothing; a component of another slot is compiled.
    **{
        f"admin-{what}": Part(printed(partial(attacked, what), "admin, ", ATTACKS), HANDED_OUT)
        for what in ("taken", "idle", "compile")
    },
    "watched": Part(watched, (*HANDED_OUT, "python/meridian/vllm")),
}
