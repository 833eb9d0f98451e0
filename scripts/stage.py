#!/usr/bin/env python3
"""Stages of a long command, such as `make test`: what it is about to do, and in the end how long each took.

    stage.py NAME COMMAND...   announces the stage, runs the command, and exits as it does
    stage.py --table FILE      the stages that FILE has, as a table

MERIDIAN_STAGES names the file, which gets a JSON line for each stage: `stage`, `seconds`, `code`. Without it nothing is
kept.
A stage that only compiles is called `..., compile`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path


def run(name: str, command: list[str]) -> int:
    """Run a stage; its exit code."""
    print(f"\033[1m==>\033[0m {name}", file=sys.stderr, flush=True)
    since = time.monotonic()
    try:
        code = subprocess.call(command)
    except KeyboardInterrupt:
        code = 130
    kept = {"stage": name, "seconds": round(time.monotonic() - since, 1), "code": code}
    if path := os.environ.get("MERIDIAN_STAGES"):
        with open(path, "a") as file:
            print(json.dumps(kept), file=file)
    # A process that a signal has ended, as a shell says it.
    return code if code >= 0 else 128 - code


def table(path: Path) -> str:
    """The stages with their minutes, and what compiles and what runs together."""
    stages = [json.loads(line) for line in path.read_text().splitlines()]
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
    return "\n".join(lines)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--table", path]:
            print(table(Path(path)))
        case [name, *command] if command and not name.startswith("-"):
            sys.exit(run(name, command))
        case _:
            sys.exit(f"usage:{(__doc__ or '').partition(chr(10) * 2)[2].partition(chr(10) * 2)[0]}")
