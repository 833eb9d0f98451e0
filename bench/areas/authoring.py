"""Policies in four languages: from nothing to a decision in the engine, the cost of a decision, the same keys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from areas.common import ROOT, Bound, Figure, bench_vllm, say

LANGUAGES = ("rust", "c", "python", "js")
# Those that bring an interpreter; `policy.toml` of a new folder has the same numbers.
INTERPRETED = ("python", "js")
MEMORY_MIB, DEADLINE_MS = 128, 10
CANDIDATES = (64, 256, 1024)
BATCHES = 10_000
PATIENT = ("--memory-mib", str(MEMORY_MIB), "--deadline-ms", "1000")
ADDS_A_COLUMN = "wit: a column of the tokens of the last step"
# 120 s and the time to kill; memory stays flat when no bomb's compilation is seen in it.
COMPILE_BOUNDS = {
    "longest time of a bomb": Bound(121),
    "processes left": Bound(0),
    "resident memory after the bombs, over before": Bound(64),
}
PULLS = 100
REGISTRY_BOUNDS = {
    f"{PULLS} pulls with faults: wrong policies active": Bound(0),
    "steps during pulls and swaps that waited longer than 1 ms for another thread": Bound(0),
    "steps during pulls and swaps beyond 1 ms for any reason, the machine included": Bound(0),
}


def meridian(folder: Path, *args: str, cache: Path | None = None) -> dict[str, Any]:
    """Run the command with a Rust that can build components; its last line of JSON."""
    script = f'. "$({ROOT}/scripts/setup-wasm32.sh)"; exec {ROOT}/target/release/meridian --json "$@"'
    env = os.environ | ({"MERIDIAN_CACHE": str(cache), "CARGO_TARGET_DIR": str(cache / "rust")} if cache else {})
    run = subprocess.run(("bash", "-c", script, "bash", *args), cwd=folder, env=env, stdout=subprocess.PIPE, text=True)
    if run.returncode:
        sys.exit(f"error: meridian {' '.join(args)}: {run.stdout}")
    return json.loads(run.stdout.splitlines()[-1])


def component(folder: Path, name: str) -> Path:
    return folder / name / "target" / "policies" / f"{name}.wasm"


def made(folder: Path, language: str, name: str, cache: Path | None = None) -> float:
    """Seconds that `policy new` and `policy build` take."""
    started = time.monotonic()
    meridian(folder, "policy", "new", name, "--lang", language)
    meridian(folder, "policy", "build", name, "--out", str(component(folder, name).parent), cache=cache)
    return time.monotonic() - started


def languages() -> Iterator[Figure]:
    """Each language: seconds to a decision in vLLM, size, start, and microseconds a decision."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for language in LANGUAGES:
            say(f"  {language}")
            fresh = made(folder, language, f"{language}-fresh", cache=folder / f"cache-{language}")
            made(folder, language, f"{language}-first")  # its toolchain is in the cache after this
            cached = made(folder, language, f"{language}-again")
            policy = component(folder, f"{language}-again")
            limits = ("--set", f"policy.dispatch.memory_mib={MEMORY_MIB}", "--set", "policy.dispatch.deadline_ms=1000")
            started = time.monotonic()
            found = bench_vllm(
                f"authoring-{language}",
                "--scenario",
                "loaded",
                "--requests",
                "8",
                "--without-stock",
                "--policy",
                str(policy),
                *limits,
            )
            served = time.monotonic() - started
            (comparison,) = found["comparisons"]
            (metrics,) = (run["metrics"] for run in comparison["runs"])
            yield Figure(f"{language}: from `policy new` to served requests in vLLM, cached", cached + served, "s")
            yield Figure(f"{language}: of these, `policy new` and `policy build`", cached, "s")
            yield Figure(f"{language}: the same two without a toolchain", fresh, "s")
            by_policy = metrics["decided_by_policy"] / metrics["decisions"]
            yield Figure(f"{language}: decisions in vLLM by the policy", by_policy, "share", Bound(1, at_most=False))
            yield Figure(f"{language}: faults in vLLM", metrics["faults"], "faults", Bound(0))
            yield Figure(f"{language}: component", policy.stat().st_size / 1e3, "kB")
            inspected = meridian(folder, "policy", "inspect", str(policy))
            yield Figure(f"{language}: compiling", inspected["load_ms"], "ms")
            yield Figure(f"{language}: starting an instance", inspected["start_ms"], "ms")
            counts = ",".join(map(str, CANDIDATES))
            for row in meridian(folder, "policy", "bench", str(policy), "--candidates", counts)["rows"]:
                yield Figure(
                    f"{language}: a decision over {row['candidates']} candidates", row["policy_ns"] / 1e3, "us"
                )


def same_keys() -> Iterator[Figure]:
    """The templates of the dispatch slot, the same policy in each language, on random batches."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for language in LANGUAGES:
            made(folder, language, f"same-{language}")
        for language in LANGUAGES[1:]:
            say(f"  {language} against rust")
            args = ("--same-as", str(component(folder, "same-rust")), "--batches", str(BATCHES), *PATIENT)
            tested = meridian(folder, "policy", "test", str(component(folder, f"same-{language}")), *args)
            (same,) = (found for found in tested["slots"][0]["properties"] if "same answers as" in found["name"])
            differing = 0 if same["failure"] is None else int(same["failure"].split()[0])
            what = f"{language}: batches of {BATCHES} answered otherwise than by rust"
            yield Figure(what, differing, "batches", Bound(0))


def contract() -> Iterator[Figure]:
    """Components and recordings of the version before, and what adding a column touched."""
    fixtures = ROOT / "host" / "wasm" / "tests" / "contract-0.2"
    differing = decisions = 0
    for recording in sorted(fixtures.glob("*.arrow")):
        policy = str(recording.with_suffix(".wasm"))
        replayed = meridian(ROOT, "replay", str(recording), "--policy", policy)
        decisions += replayed["decisions"]
        differing += replayed["different"]
        now = ROOT / "target" / "policies" / f"{recording.stem}.wasm"
        tested = meridian(ROOT, "policy", "test", policy, "--same-as", str(now), "--batches", "1000", *PATIENT)
        (same,) = (found for found in tested["slots"][0]["properties"] if "same answers as" in found["name"])
        otherwise = 0 if same["failure"] is None else int(same["failure"].split()[0])
        yield Figure(
            f"0.1 {recording.stem}: batches of 1000 answered otherwise than by 0.2", otherwise, "batches", Bound(0)
        )
    yield Figure("recordings of 0.1: decisions replayed", decisions, "decisions")
    yield Figure("recordings of 0.1: decisions that differ", differing, "decisions", Bound(0))
    touched = subprocess.run(
        ("git", "log", "-1", "--numstat", "--format=", f"--grep={ADDS_A_COLUMN}", "--fixed-strings"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.split("\n")
    rows = [line.split("\t") for line in touched if line]
    code = [(int(added), int(removed)) for added, removed, path in rows if not is_told(path)]
    yield Figure("files of code touched by the commit that adds a column", len(code), "files", Bound(2))
    yield Figure("lines of code touched by it", sum(map(sum, code)), "lines")


def is_told(path: str) -> bool:
    """Whether a change of this file tells of a column, or tests it, and does not make it."""
    return path.startswith("docs/") or path == "CHANGELOG.md" or "/tests/" in path


def example(name: str, *args: str, bounds: dict[str, Bound]) -> Iterator[Figure]:
    """Run an example of the workspace that prints a figure a line."""
    subprocess.run(["cargo", "build", "--release", "--locked", "-q", "--workspace", "--examples"], cwd=ROOT, check=True)
    say(f"  {' '.join((name, *args))}")
    program = ROOT / "target" / "release" / "examples" / name
    done = subprocess.run([program, *args], stdout=subprocess.PIPE, text=True, check=True)
    for line in map(json.loads, done.stdout.splitlines()):
        yield Figure(line["name"], line["value"], line["unit"], bounds.get(line["name"]))


def compiling() -> Iterator[Figure]:
    """Components that are hard to compile: each ends within the limit, and the engine's memory stays flat."""
    for what in ("bombs", "overhead"):
        yield from example("compile_figures", what, bounds=COMPILE_BOUNDS)


def registry() -> Iterator[Figure]:
    """Pulls from a registry that fails in every way, while an engine decides: no wrong policy, no step that waits."""
    subprocess.run([ROOT / "scripts" / "setup-registry.sh"], stdout=subprocess.DEVNULL, check=True)
    yield from example("registry_figures", str(PULLS), bounds=REGISTRY_BOUNDS)


def parts(pairs: int) -> dict[str, Callable[[], Iterator[Figure]]]:
    """The parts of the area."""
    del pairs
    return {
        "languages": languages,
        "same-keys": same_keys,
        "contract": contract,
        "compile": compiling,
        "registry": registry,
    }
