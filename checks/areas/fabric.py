"""KV blocks between two processes, beside memory, raw sockets and NIXL's own transfer; and requests that change engines
between thinking and answering."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from checks.figures import Figure, Part, Row, over_pairs, table
from checks.report import latest_lines, markdown, write_table
from checks.run import RELEASE, ROOT, SERVEGEN, build, engine, example, fetched, lines, meridian, seeds

BLOCKS, BLOCK_BYTES = 128, 2 << 20
# The fabric checks versions, layouts and every byte; that may cost a fifth of the rate.
SHARE = ">= 0.8"
# Mooncake listens on every address: it runs where there is only loopback.
LOOPBACK_ONLY = ("unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
FUZZED = "fuzz of the wire: time of all processes"


def with_nixl() -> tuple[str, dict[str, str]]:
    """NIXL's library, and what it and UCX must find in their environment: plugins, loopback."""
    library = Path(fetched("nixl"))
    own = {"NIXL_PLUGIN_DIR": str(library.parent / "plugins"), "UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp,sysv,posix,cma"}
    return str(library), own | {"PYTHONPATH": f"{library.parent.parent}:{ROOT}"}


def alone(*args: str) -> list[dict[str, Any]]:
    """The example where there is only loopback."""
    build()
    return lines(*LOOPBACK_ONLY, RELEASE / "examples" / "fabric_figures", *args)


def size(rounds: int) -> list[str]:
    return ["--blocks", str(BLOCKS), "--block-bytes", str(BLOCK_BYTES), "--rounds", str(rounds)]


def rates(found: list[dict[str, Any]]) -> dict[str, list[float]]:
    """GB/s of each round by name."""
    by_name: dict[str, list[float]] = {}
    for row in found:
        by_name.setdefault(row["name"], []).append(row["gb_s"])
    return by_name


def moved(found: list[dict[str, Any]], what: str) -> Iterator[Figure]:
    """How much moved, and how much of it was not equal."""
    ours = [row for row in found if row["name"].endswith(what)]
    yield Figure(f"{what}: blocks moved", len(ours) * BLOCKS, "blocks of 2 MiB")
    yield Figure(f"{what}: rounds whose bytes differ", sum(not row["equal"] for row in ours), "rounds", "<= 0")


def tcp(pairs: int) -> Iterator[Figure]:
    """A fetch of 256 MiB, each round beside memcpy and raw sockets."""
    found = example("fabric_figures", "tcp", *size(2 * pairs))
    by_name = rates(found)
    yield from moved(found, "tcp")
    for name, values in by_name.items():
        yield over_pairs(f"{name}, 256 MiB", values, "GB/s")
    for name in ("raw sockets, memory to memory", "raw sockets, one piece"):
        ratios = [ours / raw for ours, raw in zip(by_name["tcp"], by_name[name], strict=True)]
        # Raw sockets that move the same memory are the same work; one piece never leaves the cache.
        yield over_pairs(f"tcp over {name}", ratios, "ratio", SHARE if "memory" in name else None)


def nixl(pairs: int) -> Iterator[Figure]:
    """A fetch of 256 MiB, in turn with NIXL's own transfer of the same blocks."""
    library, env = with_nixl()
    found: list[dict[str, Any]] = []
    medians, own = [], []
    for _ in range(pairs):
        rows = example("fabric_figures", "nixl", "--library", library, *size(4), env=env)
        theirs = lines(sys.executable, "-m", "checks.nixl_pair", *size(4), env=env)
        medians.append(median(row["gb_s"] for row in rows))
        own.append(median(row["gb_s"] for row in theirs))
        found += rows
    yield from moved(found, "nixl")
    yield over_pairs("nixl, 256 MiB", medians, "GB/s")
    yield over_pairs("NIXL's own transfer, 256 MiB", own, "GB/s")
    yield over_pairs(
        "nixl over NIXL's own transfer", [a / b for a, b in zip(medians, own, strict=True)], "ratio", SHARE
    )


def mooncake(pairs: int) -> Iterator[Figure]:
    """A fetch of 256 MiB over Mooncake."""
    found = alone("mooncake", "--mooncake", fetched("mooncake"), *size(pairs))
    yield from moved(found, "mooncake")
    yield over_pairs("mooncake, 256 MiB", rates(found)["mooncake"], "GB/s")


def manager(pairs: int) -> Iterator[Figure]:
    """`offload_block` and `ingest_block` of a block manager, one block of 2 MiB after the other."""
    args = ("manager", *size(2 * pairs))
    library, env = with_nixl()
    for run in (
        partial(example, "fabric_figures", *args),
        partial(example, "fabric_figures", *args, "--library", library, env=env),
        partial(alone, *args, "--mooncake", fetched("mooncake")),
    ):
        found = run()
        for name, values in rates(found).items():
            yield from moved(found, name)
            yield over_pairs(name, values, "GB/s")


def fuzz(_: int) -> Iterator[Figure]:
    """The fuzz target of the wire, for as long as MERIDIAN_FUZZ_SECONDS says, with a process for each core."""
    seconds, workers = int(os.environ.get("MERIDIAN_FUZZ_SECONDS", "600")), os.cpu_count() or 1
    env = {**os.environ, "MERIDIAN_FUZZ_WORKERS": str(workers)}
    done = subprocess.run([ROOT / "scripts" / "fuzz.sh", str(seconds), "fabric"], stdout=sys.stderr, env=env)
    # A run that finds something ends early: it counts for nothing.
    minutes = seconds * workers / 60 if done.returncode == 0 else 0.0
    total = "fuzz of the wire: time of all kept runs"
    before = latest_lines("fabric").get(total, {"value": 0.0})["value"]
    yield Figure(FUZZED, minutes, "minutes")
    yield Figure(total, before + minutes, "minutes", ">= 60")
    yield Figure("fuzz of the wire: inputs that were not withstood", done.returncode != 0, "inputs", "<= 0")


REQUESTS, KILLED = 500, 200
ITL = {
    "output_itl_p99_ms": "p99 output ITL",
    "output_itl_p50_ms": "median output ITL",
    "ttot_p50_ms": "median time from the end of thinking to the next token",
    "tokens_per_s": "tokens a second",
}
handoff = table(
    # Tokens beside those of one engine, the gaps between the tokens of an answer, and the cost in throughput.
    lambda _: [engine("handoff", part="equal", requests=REQUESTS)],
    Row("handoff: requests", "requests", "requests", f">= {REQUESTS}"),
    Row("handoff: requests lost", "lost", "requests", "<= 0"),
    Row("handoff: outputs that differ from one engine's", "differing", "requests", "<= 0"),
    Row("handoff: answers written by the second engine", "handed_over", "requests"),
    *(
        Row(
            f"handoff: {name} over one stock engine of both cores",
            lambda m, key=key: m["handoff"][key] / m["stock"][key],
            "ratio",
        )
        for key, name in ITL.items()
    ),
    Row("handoff: p99 output ITL of the stock engine", "stock.output_itl_p99_ms", "ms"),
    Row("handoff: tokens a second of the stock engine", "stock.tokens_per_s", "tokens/s"),
)

# Engines of the plan, and the ratio whose figures are kept.
PLANNED, BEST_PLAN = 8, "handoff=6:2"
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
    rates = {"below capacity": 4.0, "above capacity": 8.0}
    names = ("balanced", *(f"handoff={think}:{PLANNED - think}" for think in range(PLANNED - 1, PLANNED // 2 - 1, -1)))
    flags = ["--trace", str(SERVEGEN), "--requests", "3000", "--engines", str(PLANNED), "--engine", "32b-h200"]
    flags += ["--rate", ",".join(map(str, rates.values())), "--seeds", seeds(3), "--transfer-gb-s", "20"]
    runs = meridian("bench", "replay", *flags, *(word for name in names for word in ("--policy", name)))["runs"]
    shown: list[str] = []
    for label, rate in rates.items():
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


PARTS: dict[str, Part] = {
    "tcp": tcp,
    "nixl": nixl,
    "mooncake": mooncake,
    "manager": manager,
    # 200 peers, each killed at some moment of a transfer of 32 MiB; what was cut short is asked of the next peer.
    "kills": table(
        lambda _: example(
            "fabric_figures", "kills", "--blocks", "16", "--block-bytes", str(BLOCK_BYTES), "--rounds", "200"
        ),
        Row("kills: peers killed", "transfers", "peers"),
        Row("kills: transfers cut short", "cut", "transfers"),
        Row("kills: transfers whose blocks were wrong or lost at last", "lost", "transfers", "<= 0"),
        Row("kills: transfers that left a block in use", "held", "transfers", "<= 0"),
    ),
    "fuzz": fuzz,
    "handoff": handoff,
    # Answers whose engine is killed while others are pulled.
    "handoff-kills": table(
        lambda _: [engine("handoff", part="kills", killed=KILLED)],
        Row("handoff: answers that a kill cut", "cut", "answers", f">= {KILLED}"),
        Row("handoff: requests lost by kills", "lost", "requests", "<= 0"),
        Row("handoff: outputs that kills changed", "differing", "requests", "<= 0"),
    ),
    "plan": plan,
}
