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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import meridian
import tomllib

from checks.figures import Figure, Part
from checks.report import latest_lines, markdown, write_table
from checks.run import POLICIES, ROOT, WORK, output, say

MINUTE = 60.0
# Crates that cargo compiled.
CRATE = re.compile(r"^ *(?:Compiling|Checking) (\S+) v", re.MULTILINE)
# What is built again only after a change: crates of others, and what is fetched.
BUILT = re.compile(
    r"^ *Compiling \S+ v\S+$|==>.*(: installing |: fetching|to fetch|building mdBook|vllm 1/)", re.MULTILINE
)
# The last stage before the demo's first table.
FIRST_TABLE = "simulated day"
BOUNDS = {
    ("demo", "cold"): "<= 10",
    ("test", "cold"): "<= 45",
    ("test", "warm"): "<= 14",
    ("test-all", "cold"): "<= 120",
}
VERSIONS = {
    "0.30.0": "the engine on a CPU",
    "0.31.0": "the engine on a CPU",
    "0.32.0": "the engine on a CPU",
    "0.33.0": "scheduler and offloading, without a model",
}


@dataclass
class Timed:
    """A run of a command of the makefile: its seconds, those of its stages, and its log."""

    total: float
    stages: dict[str, float]
    log: str


def timed(what: str, clone: Path, env: dict[str, str]) -> Timed:
    """Run `make WHAT`."""
    log, began = WORK / f"setup-{what}.log", time.monotonic()
    with log.open("w") as kept:
        done = subprocess.run(("make", what), cwd=clone, env=env, stdout=kept, stderr=subprocess.STDOUT)
    total = time.monotonic() - began
    if done.returncode:
        sys.exit(f"error: make {what} ended with {done.returncode}, see {log}")
    name = what.replace("test-all", "test--all")
    lines = map(json.loads, (clone / "target" / "stages" / f"{name}.jsonl").read_text().splitlines())
    return Timed(total, {line["stage"]: line["seconds"] for line in lines}, log.read_text(errors="replace"))


def times(what: str, state: str, _: int) -> Iterator[Figure]:
    """A command in a fresh clone with an empty home folder; or in this checkout, once more if it built something."""
    with tempfile.TemporaryDirectory() as made:
        folder, env = ROOT, dict(os.environ)
        if state == "cold":
            folder, env = Path(made) / "clone", empty_home(Path(made) / "home")
            output("git", "clone", "-q", str(ROOT), folder)
        say(f"  make {what}, {state}, in {folder}")
        run = timed(what, folder, env)
        if (built := BUILT.findall(run.log)) and state == "warm":
            say(f"  once more: the first run built or installed {len(built)} things in {run.total / MINUTE:.1f} min")
            run = timed(what, folder, env)
    name = f"make {what}, {state}"
    yield Figure(name, run.total / MINUTE, "min", BOUNDS.get((what, state)))
    if what == "demo":
        until = list(run.stages).index(FIRST_TABLE) + 1
        first = sum(list(run.stages.values())[:until])
        yield Figure(f"{name}: first table", first / MINUTE, "min", "<= 6" if state == "cold" else None)
    yield Figure(f"{name}: crates compiled", len(CRATE.findall(run.log)), "crates")
    for stage, seconds in run.stages.items():
        yield Figure(f"{name}: {stage}", seconds / MINUTE, "min")


def empty_home(home: Path) -> dict[str, str]:
    """The environment of someone who has never run anything here, but has the same Rust."""
    home.mkdir()
    rustup = os.environ.get("RUSTUP_HOME", str(Path.home() / ".rustup"))
    caches = ("MERIDIAN_CACHE", "XDG_CACHE_HOME", "UV_CACHE_DIR", "PIP_CACHE_DIR", "npm_config_cache")
    kept = {name: value for name, value in os.environ.items() if name not in caches}
    return kept | {"HOME": str(home), "CARGO_HOME": str(home / ".cargo"), "RUSTUP_HOME": rustup}


def wheel(_: int) -> Iterator[Figure]:
    """The wheel that was built last: size, tag, and what runs where only it is installed."""
    (found,) = (ROOT / "target" / "wheels").glob("meridian-*.whl")
    yield Figure("wheel", found.stat().st_size / 1e6, "MB", "<= 18")
    with zipfile.ZipFile(found) as opened:
        sizes = {entry.filename: entry.file_size / 1e6 for entry in opened.infolist()}
    yield Figure("wheel, installed", sum(sizes.values()), "MB", "<= 25")
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


def mutations(_: int) -> Iterator[Figure]:
    """Defects of `mutations.toml`, each in a copy of the sources: how many the tests find."""
    described = tomllib.loads((ROOT / "checks" / "mutations.toml").read_text())
    with tempfile.TemporaryDirectory() as made:
        clone, package = Path(made) / "clone", Path(made) / "package"
        output("git", "clone", "-q", str(ROOT), clone)
        # As it is installed, beside the built module.
        shutil.copytree(Path(meridian.__file__).parent, package / "python" / "meridian")

        def passes(kind: str, test: Any) -> bool:
            if kind == "host":
                command = ("cargo", "test", "--release", "--locked", "--target-dir", ROOT / "target", *test)
                done = subprocess.run(command, cwd=clone, capture_output=True, text=True)
                is_wrong = "could not compile" in done.stderr
            else:
                options = ("-c", "python/pyproject.toml", "--rootdir", ".", "-x", "-m", "not exhaustive")
                env = {**os.environ, "PYTHONPATH": str(package / "python")}
                command = (sys.executable, "-m", "pytest", *options, test)
                done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
                is_wrong = done.returncode > 1
            if is_wrong:
                sys.exit(f"error: {test}: did not run: {(done.stderr or done.stdout)[-2000:]}")
            return done.returncode == 0

        for kind, folder in (("host", clone), ("python", package)):
            for test in {str(each["test"]): each["test"] for each in described[kind]}.values():
                if not passes(kind, test):
                    sys.exit(f"error: {test}: fails without a defect; `make test` builds what it needs")
            found, count = 0, len(described[kind])
            for mutation in described[kind]:
                path = folder / mutation["file"]
                text = path.read_text()
                if text.count(mutation["before"]) != 1:
                    sys.exit(f"error: {mutation['file']}: expected once: {mutation['before']!r}")
                path.write_text(text.replace(mutation["before"], mutation["after"]))
                is_found = not passes(kind, mutation["test"])
                path.write_text(text)
                say(f"  {mutation['what']}: {'found' if is_found else 'NOT FOUND'}")
                found += is_found
            yield Figure(f"defects of {count} in the {kind} that tests find", found, "defects", f">= {count}")


BUILD = ("Makefile", "scripts", "Cargo.toml", "Cargo.lock", "host", "python")
# The times take hours together.
PARTS: dict[str, Part] = {
    "wheel": Part(wheel, BUILD, wheel, 30),
    "docs": Part(docs, ("README.md", "docs/src", "scripts"), docs, 15),
    "mutations": Part(mutations, (*BUILD, "checks/mutations.toml")),
    **{f"matrix-{version.removesuffix('.0')}": Part(partial(matrix, version), BUILD) for version in VERSIONS},
    **{
        f"{what}-{state}": Part(partial(times, what, state), BUILD)
        for what, state in (
            ("demo", "cold"),
            ("demo", "warm"),
            ("test", "cold"),
            ("test", "warm"),
            ("test-all", "cold"),
        )
    },
}
