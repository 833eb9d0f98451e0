"""One engine run as a child process: an engine is never built in the process that compares."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LOG_TAIL_LINES = 12
RUN_LIMIT_S = 900


class Failed(Exception):
    """A run failed; the message is one clear line, perhaps with the end of a log below it."""


def say(text: str) -> None:
    """One line of progress."""
    print(text, file=sys.stderr, flush=True)


def _environment() -> dict[str, str]:
    """This environment, plus the folder this package was imported from, unless it is installed."""
    env = dict(os.environ)
    folder = str(Path(__file__).resolve().parents[3])
    if folder not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, env.get("PYTHONPATH")]))
    return env


def run_logged(command: Sequence[str], log: Path, what: str, limit_s: float = RUN_LIMIT_S) -> None:
    """Run a child with its output in ``log``; raises ``Failed`` with the log's last lines."""
    with log.open("w") as out:
        try:
            child = subprocess.run(command, stdout=out, stderr=out, env=_environment(), timeout=limit_s)
        except subprocess.TimeoutExpired as e:
            raise Failed(f"{what} did not end within {limit_s:.0f} s, see {log}") from e
    if child.returncode:
        lines = log.read_text(errors="replace").splitlines()
        errors = [x for x in lines if x.startswith("error: ")]
        if errors:
            raise Failed(f"{what}: {errors[-1].removeprefix('error: ')}")
        tail = "\n".join(f"  | {x}" for x in lines[-LOG_TAIL_LINES:])
        raise Failed(f"{what} failed with exit code {child.returncode}; the end of {log}:\n{tail}")


def engine_run(
    stem: Path, what: str, args: Sequence[str], limit_s: float = RUN_LIMIT_S, *, driver: str
) -> dict[str, Any]:
    """One run of ``driver`` with these arguments; returns its document, kept beside its log at ``stem``.

    Raises:
        Failed: it did not end, or ended with an error.
    """
    out = Path(f"{stem}.json")
    command = [sys.executable, "-m", f"meridian.vllm.bench.{driver}", "--out", str(out), *args]
    run_logged(command, Path(f"{stem}.log"), what, limit_s)
    return json.loads(out.read_text())
