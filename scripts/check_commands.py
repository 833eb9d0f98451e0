#!/usr/bin/env python3
"""Hold the shell blocks of README and the book against their marks.

usage: check_commands.py [--json]

Every block of shell commands in a Markdown file has a comment before it that says who runs it:

    <!-- commands: run -->                     python/tests/test_docs_commands.py, in a folder like a clone
    <!-- commands: run with an engine -->      the same, beside an engine with a token
    <!-- commands: ci, WHERE -->               another part of `make test` or of a release
    <!-- commands: hardware, WHY -->           nobody here: it needs a GPU, a model's weights, another machine
    <!-- commands: not run, WHY -->            nobody: it changes the system, or takes minutes

Exit codes: 0 all blocks are marked, 1 some are not (one line each).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUNS = ("run", "run with an engine")
WITH_REASON = ("ci", "hardware", "not run")
_BLOCK = re.compile(r"^(?P<before>[^\n]*)\n```(?:sh|bash|shell|console)\n(?P<text>.*?)^```$", re.M | re.S)
_MARK = re.compile(r"^<!-- commands: ([a-z ]+?)(?:, (.+))? -->$")


@dataclass(frozen=True)
class Block:
    """Shell commands of a Markdown file."""

    file: str
    line: int
    # One of RUNS or WITH_REASON; empty without a mark.
    mark: str
    reason: str
    text: str

    @property
    def is_marked(self) -> bool:
        """Whether the comment is one of those that mean something."""
        return self.mark in RUNS or (self.mark in WITH_REASON and bool(self.reason))


def blocks() -> list[Block]:
    """All shell blocks of the repository's Markdown files, in order."""
    listed = subprocess.run(
        ("git", "ls-files", "-co", "--exclude-standard", "*.md"), cwd=ROOT, check=True, capture_output=True, text=True
    )
    found = []
    for name in sorted(listed.stdout.split()):
        text = (ROOT / name).read_text()
        for block in _BLOCK.finditer(text):
            mark = _MARK.match(block["before"])
            line = text.count("\n", 0, block.start("text"))
            said, reason = (mark[1], mark[2] or "") if mark else ("", "")
            found.append(Block(name, line, said, reason, block["text"]))
    return found


def main() -> int:
    """Check, and print the counts."""
    found = blocks()
    for block in found:
        if not block.is_marked:
            print(f"{block.file}:{block.line}: commands without a mark, expected `<!-- commands: ... -->` before them")
    counts = Counter(block.mark for block in found)
    commands = sum(len([line for line in block.text.splitlines() if line.strip()]) for block in found)
    if "--json" in sys.argv:
        print(json.dumps({"blocks": len(found), "lines": commands, "by_mark": dict(counts)}))
    return 0 if all(block.is_marked for block in found) else 1


if __name__ == "__main__":
    sys.exit(main())
