"""The first ten minutes: times of the two commands, the wheel by itself, versions of vLLM, the documentation."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from areas.bench import write_between
from areas.common import RESULTS, ROOT, WORK, Bound, Figure, say

MINUTE = 60.0
# What a stage of the set-up announces (scripts/env.sh: say).
_STAGE = re.compile(r"==>\S*\s+([a-z0-9-]+)[ :]")
# What cargo says of a dependency that it compiles, and a set-up script of what it fetches. The crates of the workspace
# do not count: they are what a developer changes.
_BUILT = re.compile(r"^ *Compiling \S+ v\S+$|==>.*(: installing |fetching|to fetch|building mdBook|vllm 1/)")
# Stages that are fetched and unpacked beside the compiler.
_BESIDE = ("tools", "vllm")
# The head of the demo's first table.
_TABLE = re.compile(r"^-{20,}")
ENGINE_VERSIONS, SEAM_VERSIONS = ("0.30.0", "0.31.0", "0.32.0"), ("0.33.0",)


def _clone(folder: Path) -> Path:
    subprocess.run(("git", "clone", "-q", str(ROOT), str(folder / "clone")), check=True)
    return folder / "clone"


def _no_caches(folder: Path) -> dict[str, str]:
    """An environment in which nothing has been fetched or built."""
    names = ("MERIDIAN_CACHE", "XDG_CACHE_HOME", "CARGO_HOME", "UV_CACHE_DIR", "PIP_CACHE_DIR", "npm_config_cache")
    return {name: str(folder / name.lower()) for name in names}


class Timed(NamedTuple):
    """A run of a command of the makefile, in seconds."""

    total: float
    first_table: float | None
    stages: dict[str, float]
    # Crates that it compiled, and environments that it installed.
    built: int


def _timed(what: str, clone: Path, env: dict[str, str]) -> Timed:
    """Run `make WHAT`, with the stages of the set-up."""
    log = WORK / f"start-{what}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    table, stage, since, built = None, "", started, 0
    beside: list[float] = []
    stages: dict[str, float] = {}
    with log.open("w") as kept:
        process = subprocess.Popen(
            ("make", what),
            cwd=clone,
            env=os.environ | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        for line in process.stdout:
            now = time.monotonic()
            kept.write(f"{now - started:8.1f} {line}")
            built += bool(_BUILT.search(line))
            if table is None and _TABLE.match(line):
                table = now - started
            if not (found := _STAGE.search(line)):
                continue
            if found[1] in _BESIDE:
                beside.append(now)
            else:
                if stage:
                    stages[stage] = stages.get(stage, 0.0) + now - since
                stage, since = found[1], now
    if stage:
        stages[stage] = stages.get(stage, 0.0) + time.monotonic() - since
    if beside:
        stages["vLLM and tools, beside the compiler"] = beside[-1] - started
    if process.wait():
        sys.exit(f"error: make {what} ended with {process.returncode}, see {log}")
    return Timed(time.monotonic() - started, table, stages, built)


def times(what: str, is_cold: bool) -> Iterator[Figure]:
    """A command in a fresh clone without any cache; or in this checkout, once more if something had to be built."""
    state = "cold" if is_cold else "warm"
    with tempfile.TemporaryDirectory() as made:
        folder, env = ROOT, {}
        if is_cold:
            folder, env = _clone(Path(made)), _no_caches(Path(made))
        say(f"  make {what}, {state}, in {folder}")
        total, table, stages, built = _timed(what, folder, env)
        if built and not is_cold:
            say(f"  once more: the first run built or installed {built} things in {total / MINUTE:.1f} min")
            total, table, stages, built = _timed(what, folder, env)
    most = {("demo", "cold"): 15, ("test", "cold"): 45, ("test", "warm"): 15}.get((what, state))
    yield Figure(f"make {what}, {state}", total / MINUTE, "min", Bound(most) if most else None)
    if what == "demo" and table is not None:
        yield Figure(f"make demo, {state}: first table", table / MINUTE, "min", Bound(10) if is_cold else None)
    for name, seconds in stages.items():
        yield Figure(f"make {what}, {state}: {name}", seconds / MINUTE, "min")


def wheel() -> Iterator[Figure]:
    """The wheel that was built last: size, tag, and what runs where only it is installed."""
    (found,) = (ROOT / "target" / "wheels").glob("meridian-*.whl")
    yield Figure("wheel", found.stat().st_size / 1e6, "MB", Bound(30))
    yield Figure("binary", (ROOT / "target" / "release" / "meridian").stat().st_size / 1e6, "MB")
    glibc = re.search(r"manylinux_2_(\d+)", found.name)
    yield Figure("glibc 2.x that the wheel needs", int(glibc[1]) if glibc else 99, "", Bound(34))
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        environment = folder / "environment"
        subprocess.run((sys.executable, "-m", "venv", str(environment)), check=True)
        started = time.monotonic()
        pip = (str(environment / "bin" / "pip"), "install", "-q", "--no-index", str(found))
        subprocess.run(pip, check=True, stdout=sys.stderr)
        yield Figure("pip install into an empty environment", time.monotonic() - started, "s")
        shutil.copy(ROOT / "target" / "policies" / "srpt.wasm", folder)
        # Without cargo, a compiler or anything else but the environment.
        env = {"PATH": str(environment / "bin"), "HOME": made}
        commands = (
            ("--version",),
            ("policy", "check", "srpt.wasm"),
            ("bench", "replay", "--workload", "reasoning-chat", "--requests", "200", "--policy", "srpt.wasm"),
        )
        for args in commands:
            started = time.monotonic()
            meridian = str(environment / "bin" / "meridian")
            done = subprocess.run((meridian, *args), cwd=folder, env=env, capture_output=True, text=True)
            say(f"  meridian {' '.join(args)}: {done.returncode} in {time.monotonic() - started:.1f} s {done.stderr}")
            yield Figure(f"exit code of `meridian {' '.join(args[:2])}` there", done.returncode, "", Bound(0))


def docs() -> Iterator[Figure]:
    """Commands and links of README and the book."""
    done = subprocess.run(
        (sys.executable, "scripts/check_commands.py", "--json"), cwd=ROOT, capture_output=True, text=True
    )
    counts = json.loads(done.stdout.splitlines()[-1])
    by_mark = counts["by_mark"]
    yield Figure("blocks of commands in the documentation", counts["blocks"], "blocks")
    yield Figure("lines in them", counts["lines"], "lines")
    run = sum(count for mark, count in by_mark.items() if mark.startswith("run"))
    yield Figure("blocks that a test runs as they are", run, "blocks")
    yield Figure("blocks that another part of the tests runs", by_mark.get("ci", 0), "blocks")
    yield Figure("blocks that need hardware", by_mark.get("hardware", 0), "blocks")
    yield Figure("blocks that nobody runs", by_mark.get("not run", 0), "blocks")
    yield Figure("blocks without a mark", by_mark.get("", 0), "blocks", Bound(0))
    checked = subprocess.run(("scripts/check-docs.sh",), cwd=ROOT, stdout=sys.stderr)
    yield Figure("broken links, exit code of scripts/check-docs.sh", checked.returncode, "", Bound(0))
    yield Figure("lines of README", len((ROOT / "README.md").read_text().splitlines()), "lines", Bound(120))


def matrix(version: str) -> Iterator[Figure]:
    """The engine tests on a vLLM with a CPU build, or those of the seams on one without."""
    report = ROOT / "target" / "matrix" / f"{version}.xml"
    # That of an earlier run says nothing of this one.
    report.unlink(missing_ok=True)
    subprocess.run(("scripts/test-matrix.sh", version), cwd=ROOT, stdout=sys.stderr)
    if not report.exists():
        sys.exit(f"error: {report} is missing: scripts/test-matrix.sh {version} did not run")
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    keys = ("tests", "failures", "errors", "skipped")
    count = {key: sum(int(suite.get(key, 0)) for suite in suites) for key in keys}
    yield Figure(f"vLLM {version}: tests", count["tests"], "tests", Bound(1, at_most=False))
    yield Figure(f"vLLM {version}: tests that fail", count["failures"] + count["errors"], "tests", Bound(0))
    yield Figure(f"vLLM {version}: tests skipped", count["skipped"], "tests")
    matrix_table()


def matrix_table() -> None:
    """The latest run of each version, in the page of what is supported."""
    kept = (RESULTS / "start.jsonl").read_text().splitlines()
    latest = {line["name"]: line for line in map(json.loads, kept)}
    rows = ["", "| vLLM | what runs | tests | failed | skipped | measured at |", "|---|---|---|---|---|---|"]
    for version in (*ENGINE_VERSIONS, *SEAM_VERSIONS):
        names = [f"vLLM {version}: {what}" for what in ("tests", "tests that fail", "tests skipped")]
        if not all(name in latest for name in names):
            continue
        counts = " | ".join(f"{latest[name]['value']:.0f}" for name in names)
        what = "the engine on a CPU" if version in ENGINE_VERSIONS else "scheduler and offloading, without a model"
        rows.append(f"| {version} | {what} | {counts} | {latest[names[0]]['commit']} |")
    write_between(ROOT / "docs" / "src" / "support.md", "matrix", rows)


def parts(pairs: int) -> dict[str, Callable[[], Iterator[Figure]]]:
    """The parts of the area. The four times take up to an hour together."""
    del pairs
    versions = (*ENGINE_VERSIONS, *SEAM_VERSIONS)
    return {
        "wheel": wheel,
        "docs": docs,
        **{f"matrix-{version.removesuffix('.0')}": partial(matrix, version) for version in versions},
        "demo-cold": lambda: times("demo", is_cold=True),
        "demo-warm": lambda: times("demo", is_cold=False),
        "test-cold": lambda: times("test", is_cold=True),
        "test-warm": lambda: times("test", is_cold=False),
    }
