"""Programs that figures are measured with, and where things are."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
WORK = ROOT / "target" / "figures"
POLICIES = ROOT / "target" / "policies"
RELEASE = ROOT / "target" / "release"
MERIDIAN = RELEASE / "meridian"
DOCS = ROOT / "docs" / "src"
# Random sequences of vLLM's scheduler and KV cache manager, without a model.
DRIVES = ROOT / "python" / "tests" / "vllm"
# Recorded traces are not part of the repository.
TRACES = Path(os.environ.get("MERIDIAN_TRACES") or ROOT.parent / "shared" / "data")
SERVEGEN = TRACES / "servegen_r1.csv"


def say(text: str) -> None:
    """Tell whoever waits."""
    print(text, file=sys.stderr, flush=True)


def output(*command: str | Path, env: Mapping[str, str] | None = None, cwd: Path = ROOT, most_code: int = 0) -> str:
    """What a program prints. Ends this one when the exit code is greater than `most_code`."""
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **(env or {})}, stdout=subprocess.PIPE, text=True)
    if not 0 <= done.returncode <= most_code:
        sys.exit(f"error: {command[0]}: exit code {done.returncode}: {done.stdout.strip()[-2000:] or 'see above'}")
    return done.stdout.strip()


def lines(*command: str | Path, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> list[dict[str, Any]]:
    """The JSON lines that a program prints; others may log to the same stream."""
    say(f"  {' '.join(Path(word).name for word in command)}")
    return [json.loads(line) for line in output(*command, env=env, cwd=cwd).splitlines() if line.startswith("{")]


@cache
def build() -> None:
    """Build programs and examples: the whole workspace, as the tests do; another selection compiles wasmtime again."""
    output("cargo", "build", "--release", "--locked", "-q", "--workspace", "--bins", "--examples")


def example(name: str, *args: str | Path, env: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """The lines of an example of the workspace."""
    build()
    return lines(RELEASE / "examples" / name, *args, env=env)


def fetched(name: str) -> str:
    """What `scripts/fetch.sh` prints for a tool, once it is there."""
    return output(ROOT / "scripts" / "fetch.sh", name)


def engine(module: str, environment: Mapping[str, str] | None = None, **options: Any) -> dict[str, Any]:
    """What a module of `checks.engine` measures on the real engine, in a process of its own."""
    given = [f"{key}={json.dumps(value, default=str)}" for key, value in options.items()]
    return lines(sys.executable, "-m", "checks.engine", module, *given, env=environment)[-1]


def tests(label: str, *args: str | Path) -> tuple[int, int]:
    """Run tests of pytest; returns how many passed, and of how many."""
    report = WORK / f"{label}.xml"
    options = ("-q", "-c", ROOT / "python" / "pyproject.toml", "--rootdir", ROOT, "--junitxml", report)
    env = {"MERIDIAN_TOKENIZERS": fetched("tokenizers")}
    output(sys.executable, "-m", "pytest", *options, *args, env=env, most_code=1)
    counts = next(ElementTree.parse(report).iter("testsuite")).attrib
    ran = int(counts["tests"]) - int(counts["skipped"])
    return ran - int(counts["failures"]) - int(counts["errors"]), ran


def meridian(*args: str | Path) -> dict[str, Any]:
    """The command's JSON object."""
    shown = " ".join(Path(word).name if str(word).startswith("/") else str(word) for word in args)
    say(f"  meridian {shown}")
    return json.loads(output(MERIDIAN, "--json", *args))


def authored(*args: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The command, with a Rust that can build components."""
    script = f'. "$({ROOT}/scripts/fetch.sh wasm32)"; exec {MERIDIAN} --json "$@"'
    return json.loads(output("bash", "-c", script, "bash", *args, env=env, cwd=cwd).splitlines()[-1])


def bench_vllm(label: str, *args: str | Path) -> dict[str, Any]:
    """`meridian bench vllm`: its JSON object. The rows of every run stay in a folder of that name."""
    say(f"  {label}: meridian bench vllm {' '.join(map(str, args))}")
    command = (sys.executable, "-m", "meridian", "--json", "bench", "vllm", "--out", WORK / label, *args)
    # 1 is also the code of runs in which a policy faulted: who asks judges how often.
    said = output(*command, most_code=1)
    if not said.startswith("{"):
        sys.exit(f"error: {label}: {said[-2000:] or 'see above'}")
    return json.loads(said)


def compared(label: str, *args: str | Path) -> list[dict[str, Any]]:
    """The comparisons of `meridian bench vllm`."""
    said = bench_vllm(label, *args)
    if "comparisons" not in said:
        sys.exit(f"error: {label}: {said.get('error', 'see above')}")
    return said["comparisons"]


def metrics_of(comparison: Mapping[str, Any], policy: str) -> list[dict[str, Any]]:
    """The metrics of a policy's runs, a seed each."""
    return [run["metrics"] for run in comparison["runs"] if run["policy"] == policy]


def recorded(label: str, policy: str) -> tuple[Path, dict[str, Any]]:
    """The file of the one run of a policy under that label, and what it recorded."""
    found = [p for p in (WORK / label).glob(f"*-{policy}.json") if not p.name.endswith(".job.json")]
    if len(found) != 1:
        sys.exit(f"error: {label}: {len(found)} recorded runs of {policy} in {WORK / label}, expected one")
    return found[0], json.loads(found[0].read_text())


def seeds(count: int) -> str:
    """So many seeds, for the command line."""
    return ",".join(str(i + 1) for i in range(count))


def preemptions(metrics: Mapping[str, Any]) -> float:
    """In all phases together."""
    return sum(metrics[f"preemptions_{phase}"] for phase in ("prefill", "think", "output"))


def before() -> Path | None:
    """`MERIDIAN_BEFORE`: a folder with builds of the commit to compare with. It has the package (`meridian/`, or a copy
    of `python/meridian` named `py` with the library beside it as `lib_native.so`) and the command (`meridian`, or
    `bin/meridian` beside a package)."""
    given = os.environ.get("MERIDIAN_BEFORE")
    return Path(given).resolve() if given else None


def package_of(folder: Path) -> Path:
    """What `PYTHONPATH` must be for the package of that folder."""
    if (folder / "meridian" / "__init__.py").is_file():
        return folder
    made = WORK / "package-before"
    shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(folder / "py", made / "meridian")
    shutil.copy(folder / "lib_native.so", made / "meridian" / "_native.abi3.so")
    return made


def command_of(folder: Path) -> Path:
    """The command of that folder."""
    found = folder / "meridian"
    return found if found.is_file() else folder / "bin" / "meridian"


@cache
def provenance() -> dict[str, str]:
    """Commit and machine of a measurement."""
    # Results of this very run, and the tables that it writes, do not make the tree another one.
    results = ("bench/results/", "docs/src/", "README.md")
    paths = [line.split(maxsplit=1)[1] for line in output("git", "status", "--porcelain").splitlines()]
    changed = any(not path.startswith(results) for path in paths)
    models = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
    cpu = models[0].partition(":")[2].strip() if models else "unknown"
    return {
        "commit": output("git", "rev-parse", "--short=12", "HEAD") + ("+changes" if changed else ""),
        "machine": f"{os.cpu_count()} cores of {cpu}",
        "measured": time.strftime("%Y-%m-%d", time.gmtime()),
    }
