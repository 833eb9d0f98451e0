"""Loops in thinking: planted ones end, ordinary thoughts do not, and what it costs to look."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from areas.bench import TRACES
from areas.common import ROOT, WORK, Bound, Figure, say

PLANTED = 500
THOUGHTS = 2000


def loops() -> Iterator[Figure]:
    """Through the budgets of an engine, token by token."""
    tokenizers = os.environ.get("MERIDIAN_TOKENIZERS") or _printed(str(ROOT / "scripts" / "setup-tokenizers.sh"))
    WORK.mkdir(parents=True, exist_ok=True)
    thoughts = WORK / "ordinary-thoughts.jsonl"
    say(f"  ordinary_thoughts.py --thoughts {THOUGHTS}")
    script = ROOT / "bench" / "vllm" / "ordinary_thoughts.py"
    folders = ["--tokenizer", str(Path(tokenizers) / "qwen3"), "--traces", str(TRACES)]
    _printed(sys.executable, str(script), "--thoughts", str(THOUGHTS), *folders, "--out", str(thoughts))
    # The whole workspace, as the tests build it: another selection would compile wasmtime again.
    subprocess.run(["cargo", "build", "--release", "--locked", "-q", "--workspace", "--examples"], cwd=ROOT, check=True)
    say("  loop_figures")
    example = ROOT / "target" / "release" / "examples" / "loop_figures"
    for line in map(json.loads, _printed(str(example), str(thoughts)).splitlines()):
        yield Figure(line["name"], line["value"], line["unit"], _bound(line["name"]))


def _bound(name: str) -> Bound | None:
    if name.endswith("ended within 64 tokens of certainty"):
        return Bound(PLANTED, False)
    if name.endswith("ordinary thoughts") and name.startswith("false alarms"):
        return Bound(THOUGHTS, False)
    if name.startswith("ordinary thoughts"):
        return Bound(1, below=True)
    if name.startswith("false alarms") or name.endswith("before certainty"):
        return Bound(0)
    if name.endswith("memory at most"):
        return Bound(16 * 1024)
    return None


def _printed(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {command[0]} failed with exit code {done.returncode}: {done.stderr.strip()[-400:]}")
    return done.stdout.strip()
