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
    r"^ *Compiling \S+ v\S+$|==>.*(: installing |fetching|to fetch|building mdBook|vllm 1/)", re.MULTILINE
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
    """A run of a command of the makefile: its stages with their seconds, and its log."""

    stages: dict[str, float]
    log: str

    @property
    def total(self) -> float:
        """Seconds of all stages."""
        return sum(self.stages.values())


def timed(what: str, clone: Path, env: dict[str, str]) -> Timed:
    """Run `make WHAT`."""
    log = WORK / f"setup-{what}.log"
    with log.open("w") as kept:
        done = subprocess.run(("make", what), cwd=clone, env=env, stdout=kept, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"error: make {what} ended with {done.returncode}, see {log}")
    name = what.replace("test-all", "test--all")
    lines = map(json.loads, (clone / "target" / "stages" / f"{name}.jsonl").read_text().splitlines())
    return Timed({line["stage"]: line["seconds"] for line in lines}, log.read_text(errors="replace"))


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
        clone = Path(made) / "clone"
        output("git", "clone", "-q", str(ROOT), clone)
        cargo = ("cargo", "test", "--release", "--locked", "--target-dir", ROOT / "target", "--workspace")
        # As the wheel has it, with the built module.
        package = Path(made) / "package" / "meridian"
        shutil.copytree(Path(meridian.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
        for kind in ("host", "python"):
            found = 0
            for mutation in described[kind]:
                inside = clone if kind == "host" else package.parents[0]
                path = inside / mutation["file"].removeprefix("" if kind == "host" else "python/")
                text = path.read_text()
                if text.count(mutation["before"]) != 1:
                    sys.exit(f"error: {mutation['file']}: expected once: {mutation['before']!r}")
                path.write_text(text.replace(mutation["before"], mutation["after"]))
                if kind == "host":
                    command, env = (*cargo, *mutation["test"]), None
                else:
                    options = ("-c", "python/pyproject.toml", "--rootdir", ".", "-x", "-m", "not exhaustive")
                    command = (sys.executable, "-m", "pytest", *options, mutation["test"])
                    env = {**os.environ, "PYTHONPATH": str(package.parent)}
                done = subprocess.run(
                    command, cwd=clone if kind == "host" else ROOT, env=env, capture_output=True, text=True
                )
                path.write_text(text)
                # A test that fails, and no source that does not compile.
                is_found = "test result: FAILED" in done.stdout if kind == "host" else done.returncode == 1
                say(f"  {mutation['what']}: {'found' if is_found else f'NOT FOUND, exit code {done.returncode}'}")
                found += is_found
            yield Figure(
                f"defects of {len(described[kind])} in the {kind} that tests find",
                found,
                "defects",
                f">= {len(described[kind])}",
            )


# The times take hours together.
PARTS: dict[str, Part] = {
    "wheel": wheel,
    "docs": docs,
    "mutations": mutations,
    **{f"matrix-{version.removesuffix('.0')}": partial(matrix, version) for version in VERSIONS},
    **{f"{what}-{state}": partial(times, what, state) for what in ("demo", "test") for state in ("cold", "warm")},
    "test-all-cold": partial(times, "test-all", "cold"),
}
