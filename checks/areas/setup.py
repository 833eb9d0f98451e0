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
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

from checks.figures import Figure, Part
from checks.report import latest_lines, markdown, write_table
from checks.run import POLICIES, ROOT, WORK, output, say

MINUTE = 60.0
# What a stage of the set-up announces (scripts/env.sh: say).
STAGE = re.compile(r"==>\S*\s+([a-z0-9-]+)[ :]")
# What cargo says of a dependency that it compiles, and the set-up of what it fetches. The crates of the workspace do
# not count: they are what a developer changes.
BUILT = re.compile(r"^ *Compiling \S+ v\S+$|==>.*(: installing |fetching|to fetch|building mdBook|vllm 1/)")
# Stages that are fetched and unpacked beside the compiler.
BESIDE = ("tools", "vllm")
# The head of the demo's first table.
TABLE = re.compile(r"^-{20,}")
BOUNDS = {("demo", "cold"): "<= 15", ("test", "cold"): "<= 45", ("test", "warm"): "<= 15"}
VERSIONS = {
    "0.30.0": "the engine on a CPU",
    "0.31.0": "the engine on a CPU",
    "0.32.0": "the engine on a CPU",
    "0.33.0": "scheduler and offloading, without a model",
}
CACHES = ("MERIDIAN_CACHE", "XDG_CACHE_HOME", "CARGO_HOME", "UV_CACHE_DIR", "PIP_CACHE_DIR", "npm_config_cache")


@dataclass
class Timed:
    """A run of a command of the makefile, in seconds; `built` counts crates and environments that it made."""

    total: float = 0.0
    first_table: float | None = None
    stages: dict[str, float] = field(default_factory=dict)
    built: int = 0


def timed(what: str, clone: Path, env: dict[str, str]) -> Timed:
    """Run `make WHAT`, with the stages of the set-up."""
    log, found = WORK / f"setup-{what}.log", Timed()
    stage, since, beside = "", 0.0, 0.0
    started = time.monotonic()
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
        for line in chain(process.stdout, ["==> end:\n"]):
            now = time.monotonic() - started
            kept.write(f"{now:8.1f} {line}")
            found.built += bool(BUILT.search(line))
            if found.first_table is None and TABLE.match(line):
                found.first_table = now
            if not (named := STAGE.search(line)):
                continue
            if named[1] in BESIDE:
                beside = now
                continue
            if stage:
                found.stages[stage] = found.stages.get(stage, 0.0) + now - since
            stage, since = named[1], now
    if beside:
        found.stages["vLLM and tools, beside the compiler"] = beside
    if process.wait():
        sys.exit(f"error: make {what} ended with {process.returncode}, see {log}")
    found.total = time.monotonic() - started
    return found


def times(what: str, state: str, _: int) -> Iterator[Figure]:
    """A command in a fresh clone without any cache; or in this checkout, once more if something had to be built."""
    with tempfile.TemporaryDirectory() as made:
        folder, env = ROOT, {}
        if state == "cold":
            folder, env = Path(made) / "clone", {name: f"{made}/{name.lower()}" for name in CACHES}
            output("git", "clone", "-q", str(ROOT), folder)
        say(f"  make {what}, {state}, in {folder}")
        run = timed(what, folder, env)
        if run.built and state == "warm":
            say(f"  once more: the first run built or installed {run.built} things in {run.total / MINUTE:.1f} min")
            run = timed(what, folder, env)
    name = f"make {what}, {state}"
    yield Figure(name, run.total / MINUTE, "min", BOUNDS.get((what, state)))
    if what == "demo" and run.first_table is not None:
        yield Figure(f"{name}: first table", run.first_table / MINUTE, "min", "<= 10" if state == "cold" else None)
    for stage, seconds in run.stages.items():
        yield Figure(f"{name}: {stage}", seconds / MINUTE, "min")


def wheel(_: int) -> Iterator[Figure]:
    """The wheel that was built last: size, tag, and what runs where only it is installed."""
    (found,) = (ROOT / "target" / "wheels").glob("meridian-*.whl")
    yield Figure("wheel", found.stat().st_size / 1e6, "MB", "<= 30")
    with zipfile.ZipFile(found) as opened:
        sizes = {entry.filename: entry.file_size / 1e6 for entry in opened.infolist()}
    plugin = sum(size for name, size in sizes.items() if name.startswith("meridian/"))
    yield Figure("plugin, unpacked", plugin, "MB", "<= 25")
    yield Figure("command, unpacked", sum(size for name, size in sizes.items() if "/scripts/" in name), "MB")
    glibc = re.search(r"manylinux_2_(\d+)", found.name)
    yield Figure("glibc 2.x that the wheel needs", int(glibc[1]) if glibc else 99, "", "<= 34")
    with tempfile.TemporaryDirectory() as made:
        folder, programs = Path(made), Path(made) / "environment" / "bin"
        output(sys.executable, "-m", "venv", programs.parent)
        started = time.monotonic()
        output(programs / "pip", "install", "-q", "--no-index", found)
        yield Figure("pip install into an empty environment", time.monotonic() - started, "s")
        shutil.copy(POLICIES / "srpt.wasm", folder)
        # Without cargo, a compiler or anything else but the environment.
        env = {"PATH": str(programs), "HOME": made}
        for args in (
            ("--version",),
            ("policy", "check", "srpt.wasm"),
            ("bench", "replay", "--workload", "reasoning-chat", "--requests", "200", "--policy", "srpt.wasm"),
        ):
            done = subprocess.run((programs / "meridian", *args), cwd=folder, env=env, capture_output=True, text=True)
            say(f"  meridian {' '.join(args)}: {done.returncode} {done.stderr}")
            yield Figure(f"exit code of `meridian {' '.join(args[:2])}` there", done.returncode, "", "<= 0")


def docs(_: int) -> Iterator[Figure]:
    """Commands and links of README and the book."""
    command = (sys.executable, "scripts/check_commands.py", "--json")
    counts = json.loads(output(*command, most_code=1).splitlines()[-1])
    by_mark = counts["by_mark"]
    yield Figure("blocks of commands in the documentation", counts["blocks"], "blocks")
    yield Figure("lines in them", counts["lines"], "lines")
    run = sum(count for mark, count in by_mark.items() if mark.startswith("run"))
    yield Figure("blocks that a test runs as they are", run, "blocks")
    yield Figure("blocks that another part of the tests runs", by_mark.get("ci", 0), "blocks")
    yield Figure("blocks that need hardware", by_mark.get("hardware", 0), "blocks")
    yield Figure("blocks that nobody runs", by_mark.get("not run", 0), "blocks")
    yield Figure("blocks without a mark", by_mark.get("", 0), "blocks", "<= 0")
    checked = subprocess.run(("scripts/check-docs.sh",), cwd=ROOT, stdout=sys.stderr)
    yield Figure("broken links, exit code of scripts/check-docs.sh", checked.returncode, "", "<= 0")
    yield Figure("lines of README", len((ROOT / "README.md").read_text().splitlines()), "lines", "<= 120")


def matrix(version: str, _: int) -> Iterator[Figure]:
    """The engine tests on a vLLM with a CPU build, or those of the seams on one without."""
    report = ROOT / "target" / "matrix" / f"{version}.xml"
    # That of an earlier run says nothing of this one.
    report.unlink(missing_ok=True)
    subprocess.run(("scripts/test-matrix.sh", version), cwd=ROOT, stdout=sys.stderr)
    if not report.exists():
        sys.exit(f"error: {report} is missing: scripts/test-matrix.sh {version} did not run")
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    tests, failures, errors, skipped = (
        sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "failures", "errors", "skipped")
    )
    yield Figure(f"vLLM {version}: tests", tests, "tests", ">= 1")
    yield Figure(f"vLLM {version}: tests that fail", failures + errors, "tests", "<= 0")
    yield Figure(f"vLLM {version}: tests skipped", skipped, "tests")
    # The latest run of each version, in the page of what is supported.
    latest, rows = latest_lines("setup"), []
    for each, what in VERSIONS.items():
        names = [f"vLLM {each}: {count}" for count in ("tests", "tests that fail", "tests skipped")]
        if all(name in latest for name in names):
            rows.append([each, what, *(f"{latest[x]['value']:.0f}" for x in names), latest[names[0]]["commit"]])
    write_table("install", "matrix", markdown(("vLLM", "what runs", "tests", "failed", "skipped", "measured at"), rows))


# The four times take over an hour together.
PARTS: dict[str, Part] = {
    "wheel": wheel,
    "docs": docs,
    **{f"matrix-{version.removesuffix('.0')}": partial(matrix, version) for version in VERSIONS},
    **{f"{what}-{state}": partial(times, what, state) for what in ("demo", "test") for state in ("cold", "warm")},
}
