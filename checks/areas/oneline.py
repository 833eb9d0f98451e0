"""Policies in four languages: from nothing to a decision in the engine, the cost of a decision; and what compiling
hostile components and pulling from a broken registry do to an engine."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from checks.figures import Figure, Part, printed
from checks.run import authored, bench_vllm, example, fetched, say

LANGUAGES = ("rust", "c", "python", "js")
# `policy.toml` of a new folder has the same memory for the languages that bring an interpreter.
MEMORY_MIB = 128
# 120 s and the time to kill; memory stays flat when no bomb's compilation is seen in it.
COMPILE_BOUNDS = {
    "longest time of a bomb": "<= 121",
    "processes left": "<= 0",
    "resident memory after the bombs, over before": "<= 64",
}
REGISTRY_BOUNDS = {
    "wrong policies active": "<= 0",
    "that waited longer than 1 ms for another thread": "<= 0",
    "beyond 1 ms for any reason, the machine included": "<= 0",
}


def component(folder: Path, name: str) -> Path:
    return folder / name / "target" / "policies" / f"{name}.wasm"


def made(folder: Path, language: str, name: str, cache: Path | None = None) -> float:
    """Seconds that `policy new` and `policy build` take."""
    env = {"MERIDIAN_CACHE": str(cache), "CARGO_TARGET_DIR": str(cache / "rust")} if cache else {}
    started = time.monotonic()
    authored("policy", "new", name, "--lang", language, cwd=folder)
    authored("policy", "build", name, "--out", component(folder, name).parent, cwd=folder, env=env)
    return time.monotonic() - started


def languages(_: int, chosen: tuple[str, ...] = LANGUAGES) -> Iterator[Figure]:
    """Each language: seconds to a decision in vLLM, size, start, and microseconds a decision."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for language in chosen:
            say(f"  {language}")
            fresh = made(folder, language, f"{language}-fresh", cache=folder / f"cache-{language}")
            made(folder, language, f"{language}-first")  # its toolchain is in the cache after this
            cached = made(folder, language, f"{language}-again")
            policy = component(folder, f"{language}-again")
            started = time.monotonic()
            args = ["--scenario", "loaded", "--requests", "8", "--without-stock", "--policy", str(policy)]
            args += ["--set", f"policy.dispatch.memory_mib={MEMORY_MIB}", "--set", "policy.dispatch.deadline_ms=1000"]
            (comparison,) = bench_vllm(f"authoring-{language}", *args)["comparisons"]
            served = time.monotonic() - started
            (metrics,) = (run["metrics"] for run in comparison["runs"])
            yield Figure(f"{language}: from `policy new` to served requests in vLLM, cached", cached + served, "s")
            yield Figure(f"{language}: of these, `policy new` and `policy build`", cached, "s")
            yield Figure(f"{language}: the same two without a toolchain", fresh, "s")
            by_policy = metrics["decided_by_policy"] / metrics["decisions"]
            yield Figure(f"{language}: decisions in vLLM by the policy", by_policy, "share", ">= 1")
            yield Figure(f"{language}: faults in vLLM", metrics["faults"], "faults", "<= 0")
            yield Figure(f"{language}: component", policy.stat().st_size / 1e3, "kB")
            inspected = authored("policy", "inspect", policy)
            yield Figure(f"{language}: compiling", inspected["load_ms"], "ms")
            yield Figure(f"{language}: starting an instance", inspected["start_ms"], "ms")
            for row in authored("policy", "bench", policy, "--candidates", "64,256,1024")["rows"]:
                name = f"{language}: a decision over {row['candidates']} candidates"
                yield Figure(name, row["policy_ns"] / 1e3, "us")


def compiling() -> list[dict[str, Any]]:
    """Components that are hard to compile: each ends within the limit, and the engine's memory stays flat."""
    return [line for what in ("bombs", "overhead") for line in example("compile_figures", what)]


def registry(pulls: int) -> list[dict[str, Any]]:
    """Pulls from a registry that fails in every way, while an engine decides: no wrong policy, no step that waits."""
    fetched("registry")
    return example("registry_figures", str(pulls))


SDKS = ("host/cli/src", "host/wasm/src", "policies/sdk", "wit")

PARTS: dict[str, Part] = {
    "languages": Part(languages, SDKS, lambda _: languages(0, ("c",)), 70),
    "compile": Part(printed(compiling, bounds=COMPILE_BOUNDS), ("host/wasm/src",)),
    "registry": Part(printed(partial(registry, 100), bounds=REGISTRY_BOUNDS), ("host/cli/src", "host/engine/src")),
}
