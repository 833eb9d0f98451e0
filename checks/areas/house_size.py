"""Counts of a tree: lines of source and tests by room, files, crates, public types."""

from __future__ import annotations

import fnmatch
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import tomllib

LONG_FILE = 500
CODE = (".rs", ".py")
# The unit tests at the end of a file.
UNIT_TESTS = re.compile(r"^#\[cfg\((?:all\()?test\b[^\n]*\n(?:#\[[^\n]*\n)*mod \w+ \{$", re.MULTILINE)
PUBLIC_TYPE = re.compile(r"^\s*pub (?:unsafe )?(?:struct|enum|trait|type|union) ", re.MULTILINE)
NOT_SOURCE = {"tests", "benches"}


@dataclass
class Size:
    """What a tree has. Lines are by room."""

    source: Counter[str] = field(default_factory=Counter)
    tests: Counter[str] = field(default_factory=Counter)
    files: int = 0
    long_files: int = 0
    long_tests: int = 0
    crates: int = 0
    public_types: int = 0


def of_folder(root: Path) -> dict[str, str]:
    """Texts by path, of the files that are tracked, or of all files of a folder that is no checkout."""
    listed = subprocess.run(("git", "ls-files", "-z"), cwd=root, capture_output=True, text=True)
    is_checkout = listed.returncode == 0 and (root / ".git").exists()
    paths = listed.stdout.split("\0") if is_checkout else (str(path.relative_to(root)) for path in root.rglob("*"))
    return {path: (root / path).read_text() for path in paths if _counts(path) and (root / path).is_file()}


def _counts(path: str) -> bool:
    return "target/" not in path and (path.endswith(CODE) or PurePosixPath(path).name == "Cargo.toml")


def size(texts: dict[str, str]) -> Size:
    """Count a tree."""
    found = Size(crates=sum(1 for _ in _crates(texts)))
    for path, text in texts.items():
        if not path.endswith(CODE):
            continue
        source, tests = _split(path, text)
        room = _room(path)
        found.source[room] += source.count("\n")
        found.tests[room] += tests.count("\n")
        found.files += 1
        found.long_files += source.count("\n") > LONG_FILE
        found.long_tests += not source and tests.count("\n") > LONG_FILE
        if path.endswith(".rs"):
            found.public_types += len(PUBLIC_TYPE.findall(source))
    return found


def _split(path: str, text: str) -> tuple[str, str]:
    """Source and tests of a file."""
    parts = PurePosixPath(path).parts
    if NOT_SOURCE & set(parts) or parts[-1] in ("tests.rs", "conftest.py"):
        return "", text
    begins = UNIT_TESTS.search(text) if path.endswith(".rs") else None
    return (text, "") if begins is None else (text[: begins.start()], text[begins.start() :])


def _room(path: str) -> str:
    first, *rest = PurePosixPath(path).parts
    if first == "host" and len(rest) > 1:
        return f"host/{rest[0]}"
    if first == "python":
        return "python (Rust)" if path.endswith(".rs") else "python (Python)"
    return first if rest else "the root"


def _crates(texts: dict[str, str]) -> Iterator[str]:
    """Folders of the members of each workspace."""
    manifests = {str(PurePosixPath(path).parent) for path in texts if path.endswith("Cargo.toml")}
    for path, text in texts.items():
        workspace = tomllib.loads(text).get("workspace") if path.endswith("Cargo.toml") else None
        for member in (workspace or {}).get("members", ()):
            folder = str(PurePosixPath(path).parent / member)
            yield from fnmatch.filter(manifests, folder)
