"""Area `fabric`: KV blocks between two processes, beside memory, raw sockets and NIXL's own transfer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from areas import fabric_handoff
from areas.common import RESULTS, ROOT, Bound, Figure, over_pairs, say

BLOCKS, BLOCK_BYTES = 128, 2 << 20
# The fabric checks versions, layouts and every byte; that may cost a fifth of the rate.
SHARE = Bound(0.8, at_most=False)
ALL_EQUAL = Bound(0)
FUZZED = "fuzz of the wire: time of all processes"


def program() -> Path:
    """The example, built as the tests build it: another selection would compile wasmtime again."""
    targets = ["--bin", "kv-peer", "--example", "fabric_figures"]
    subprocess.run(["cargo", "build", "--release", "--locked", "-q", "--workspace", *targets], cwd=ROOT, check=True)
    return ROOT / "target" / "release" / "examples" / "fabric_figures"


def nixl_library() -> Path:
    """The library of the cached wheel."""
    found = subprocess.run([ROOT / "scripts" / "setup-nixl.sh"], stdout=subprocess.PIPE, text=True, check=True)
    return Path(found.stdout.strip())


def with_nixl(library: Path) -> dict[str, str]:
    """What NIXL and UCX must find in their environment: plugins, loopback."""
    own = {"NIXL_PLUGIN_DIR": str(library.parent / "plugins"), "UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp,sysv,posix,cma"}
    return os.environ | own | {"PYTHONPATH": str(library.parent.parent)}


def mooncake_command() -> str:
    """The command of Mooncake's process."""
    found = subprocess.run([ROOT / "scripts" / "setup-mooncake.sh"], stdout=subprocess.PIPE, text=True, check=True)
    return found.stdout.strip()


# Mooncake listens on every address: it runs where there is only loopback.
LOOPBACK_ONLY = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


def rows(command: list[str | Path], env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """The JSON lines that a program prints; NIXL logs to the same stream."""
    say(f"  {' '.join(Path(word).name for word in command)}")
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env, timeout=600, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


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
    yield Figure(f"{what}: blocks moved", float(len(ours) * BLOCKS), "blocks of 2 MiB")
    yield Figure(
        f"{what}: rounds whose bytes differ", float(sum(not row["equal"] for row in ours)), "rounds", ALL_EQUAL
    )


def of_tcp(rounds: int) -> Iterator[Figure]:
    """A fetch of 256 MiB, each round beside memcpy and raw sockets."""
    found = rows([program(), "tcp", *size(rounds)])
    by_name = rates(found)
    yield from moved(found, "tcp")
    for name, values in by_name.items():
        yield over_pairs(f"{name}, 256 MiB", values, "GB/s")
    for name in ("raw sockets, memory to memory", "raw sockets, one piece"):
        ratios = [ours / raw for ours, raw in zip(by_name["tcp"], by_name[name], strict=True)]
        # Raw sockets that move the same memory are the same work; one piece never leaves the cache.
        yield over_pairs(f"tcp over {name}", ratios, "ratio", SHARE if "memory" in name else None)


def of_nixl(rounds: int) -> Iterator[Figure]:
    """A fetch of 256 MiB, in turn with NIXL's own transfer of the same blocks."""
    library = nixl_library()
    env = with_nixl(library)
    example, pair = program(), ROOT / "bench" / "nixl_pair.py"
    ours: list[dict[str, Any]] = []
    own: list[float] = []
    each = 4
    for _ in range(rounds):
        ours += rows([example, "nixl", "--library", str(library), *size(each)], env)
        own.append(median(row["gb_s"] for row in rows([sys.executable, pair, *size(each)], env)))
    yield from moved(ours, "nixl")
    values = [row["gb_s"] for row in ours]
    medians = [median(values[at : at + each]) for at in range(0, len(values), each)]
    yield over_pairs("nixl, 256 MiB", medians, "GB/s")
    yield over_pairs("NIXL's own transfer, 256 MiB", own, "GB/s")
    ratios = [a / b for a, b in zip(medians, own, strict=True)]
    yield over_pairs("nixl over NIXL's own transfer", ratios, "ratio", SHARE)


def of_mooncake(rounds: int) -> Iterator[Figure]:
    """A fetch of 256 MiB over Mooncake."""
    command = mooncake_command()
    found = rows([*LOOPBACK_ONLY, program(), "mooncake", "--mooncake", command, *size(rounds)])
    yield from moved(found, "mooncake")
    yield over_pairs("mooncake, 256 MiB", rates(found)["mooncake"], "GB/s")


def of_manager(rounds: int) -> Iterator[Figure]:
    """`offload_block` and `ingest_block` of a block manager, one block of 2 MiB after the other."""
    library = nixl_library()
    example = program()
    tcp: list[str | Path] = [example, "manager", *size(rounds)]
    over_mooncake = [*LOOPBACK_ONLY, *tcp, "--mooncake", mooncake_command()]
    runs = ((tcp, None), ([*tcp, "--library", str(library)], with_nixl(library)), (over_mooncake, None))
    for command, env in runs:
        found = rows(command, env)
        for name, values in rates(found).items():
            yield from moved(found, name)
            yield over_pairs(name, values, "GB/s")


def of_kills() -> Iterator[Figure]:
    """200 peers, each killed at some moment of a transfer of 32 MiB; what was cut short is asked of the next peer."""
    options = ["--blocks", "16", "--block-bytes", str(BLOCK_BYTES), "--rounds", "200"]
    (row,) = rows([program(), "kills", *options])
    yield Figure("kills: peers killed", float(row["transfers"]), "peers")
    yield Figure("kills: transfers cut short", float(row["cut"]), "transfers")
    yield Figure("kills: transfers whose blocks were wrong or lost at last", float(row["lost"]), "transfers", ALL_EQUAL)
    yield Figure("kills: transfers that left a block in use", float(row["held"]), "transfers", ALL_EQUAL)


def of_fuzz() -> Iterator[Figure]:
    """The fuzz target of the wire, for as long as MERIDIAN_FUZZ_SECONDS says, with a process for each core."""
    seconds, workers = int(os.environ.get("MERIDIAN_FUZZ_SECONDS", "600")), os.cpu_count() or 1
    script = ROOT / "scripts" / "fuzz.sh"
    env = {**os.environ, "MERIDIAN_FUZZ_WORKERS": str(workers)}
    done = subprocess.run([script, str(seconds), "fabric"], stderr=subprocess.PIPE, text=True, env=env)
    say(done.stderr)
    # A run that finds something ends early: it counts for nothing.
    minutes = seconds * workers / 60 if done.returncode == 0 else 0.0
    kept = map(json.loads, (RESULTS / "fabric.jsonl").read_text().splitlines())
    before = sum(line["value"] for line in kept if line["name"] == FUZZED)
    yield Figure(FUZZED, minutes, "minutes")
    yield Figure("fuzz of the wire: time of all kept runs", before + minutes, "minutes", Bound(60, at_most=False))
    yield Figure("fuzz of the wire: inputs that were not withstood", float(done.returncode != 0), "inputs", ALL_EQUAL)


def parts(pairs: int) -> dict[str, Callable[[], Iterator[Figure]]]:
    """Parts of the area by name."""
    rounds = max(pairs, 2) * 2
    return {
        "tcp": lambda: of_tcp(rounds),
        "nixl": lambda: of_nixl(max(pairs, 2)),
        "mooncake": lambda: of_mooncake(max(pairs, 2)),
        "manager": lambda: of_manager(rounds),
        "kills": of_kills,
        "fuzz": of_fuzz,
        **fabric_handoff.PARTS,
    }
