#!/usr/bin/env python3
"""Stages of a long command, such as `make test`: what it is about to do, and in the end how long each took.

    stage.py NAME COMMAND...   announces the stage, runs the command, and exits as it does
    stage.py --table FILE      the stages that FILE has, as a table

MERIDIAN_STAGES names the file, which gets a JSON line for each stage: `stage`, `seconds`, `code`. Without it nothing is
kept. While a stage runs, a file FILE.now-ID has its name; MERIDIAN_STAGE_NOW names that to the stage, which may keep
what it is at in files of longer names. A table ends with them: a command that was ended says where it stood.
A stage that only compiles is called `..., compile`.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

KEPT = "MERIDIAN_STAGES"
NOW = "MERIDIAN_STAGE_NOW"


def run(name: str, command: list[str]) -> int:
    """Run a stage; its exit code."""
    print(f"\033[1m==>\033[0m {name}", file=sys.stderr, flush=True)
    since = time.monotonic()
    # Its own stages are not counted beside it.
    env = {key: value for key, value in os.environ.items() if key != KEPT}
    if path := os.environ.get(KEPT):
        env[NOW] = f"{path}.now-{os.getpid()}"
        Path(env[NOW]).write_text(name)
    process = subprocess.Popen(command, env=env)
    while True:
        # Ctrl-C reaches the command as well, which may have to clean up.
        with contextlib.suppress(KeyboardInterrupt):
            code = process.wait()
            break
    kept = {"stage": name, "seconds": round(time.monotonic() - since, 1), "code": code}
    if path:
        with open(path, "a") as file:
            print(json.dumps(kept), file=file)
        for now in (env[NOW], *glob.glob(glob.escape(env[NOW]) + "-*")):
            os.remove(now)
    if code < 0:
        # As if the command itself had been called.
        with contextlib.suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def table(path: Path) -> str:
    """The stages with their minutes, what compiles and what runs together, and stages that have not ended."""
    stages = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    compiling = sum(stage["seconds"] for stage in stages if stage["stage"].endswith(", compile"))
    total = sum(stage["seconds"] for stage in stages)
    rows = [
        (stage["stage"] + (f" (exit code {stage['code']})" if stage["code"] else ""), stage["seconds"])
        for stage in stages
    ]
    rows += [("compiling", compiling), ("everything else", total - compiling), ("together", total)]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {int(seconds) // 60:3d}:{int(seconds) % 60:02d}" for name, seconds in rows]
    lines.insert(len(stages), "-" * (width + 8))
    for now in map(Path, sorted(glob.glob(glob.escape(str(path)) + ".now-*"))):
        lines.append(f"not ended after {time.time() - now.stat().st_mtime:.0f} s: {now.read_text()}")
    return "\n".join(lines)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--table", path]:
            print(table(Path(path)))
        case [name, *command] if command and not name.startswith("-"):
            sys.exit(run(name, command))
        case _:
            sys.exit(f"usage:{(__doc__ or '').partition(chr(10) * 2)[2].partition(chr(10) * 2)[0]}")
