"""One engine: how large the parts are and what is there twice, before the crate `meridian-engine` and now."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator

from areas.common import ROOT, Bound, Figure

# The commit before the crate.
BEFORE = "d71ca9fe4643"
CRATES = ("host/core", "host/wasm", "host/runtime", "host/engine", "host/cli", "bench", "python")
LONGEST_FILE = 500
LONGEST_BINDING = 250


def _files(commit: str) -> dict[str, str]:
    """Texts of the Rust sources at a commit by path, without tests, examples and benches."""
    listed = subprocess.run(
        ["git", "ls-tree", "-r", "--name-only", commit], cwd=ROOT, capture_output=True, text=True, check=True
    )
    paths = [x for x in listed.stdout.splitlines() if x.endswith(".rs") and "/src/" in x and x.startswith(CRATES)]
    names = "".join(f"{commit}:{path}\n" for path in paths).encode()
    batch = subprocess.run(["git", "cat-file", "--batch"], cwd=ROOT, capture_output=True, check=True, input=names)
    texts, rest = {}, batch.stdout
    for path in paths:
        head, _, rest = rest.partition(b"\n")
        size = int(head.split()[2])
        texts[path] = rest[:size].decode()
        rest = rest[size + 1 :]
    return texts


def size() -> Iterator[Figure]:
    """Lines by crate, long files, and the places that load policies."""
    before, now = _files(BEFORE), _files("HEAD")

    def lines(texts: dict[str, str]) -> Counter[str]:
        counted: Counter[str] = Counter()
        for path, text in texts.items():
            counted[next(crate for crate in CRATES if path.startswith(crate + "/"))] += text.count("\n")
        return counted

    was, are = lines(before), lines(now)
    for crate in CRATES:
        yield Figure(f"lines of {crate}/src before", was[crate], "lines")
        yield Figure(f"lines of {crate}/src", are[crate], "lines")

    def over(texts: dict[str, str], limit: int, within: str = "") -> int:
        return sum(text.count("\n") > limit for path, text in texts.items() if path.startswith(within))

    yield Figure(f"files over {LONGEST_FILE} lines before", over(before, LONGEST_FILE), "files")
    most = over(before, LONGEST_FILE) - 1
    yield Figure(f"files over {LONGEST_FILE} lines", over(now, LONGEST_FILE), "files", Bound(most))
    yield Figure(
        f"files of python/src over {LONGEST_BINDING} lines before", over(before, LONGEST_BINDING, "python/"), "files"
    )
    yield Figure(
        f"files of python/src over {LONGEST_BINDING} lines", over(now, LONGEST_BINDING, "python/"), "files", Bound(0)
    )

    def loaders(texts: dict[str, str]) -> int:
        starts = re.compile(r"\bRuntime::new\(|component\.policy::<")
        return sum(bool(starts.search(text)) for path, text in texts.items() if not path.startswith("host/wasm/"))

    yield Figure("files that load and start components before", loaders(before), "files")
    yield Figure("files that load and start components", loaders(now), "files", Bound(1))


def parts(_pairs: int) -> dict[str, Callable[[], Iterator[Figure]]]:
    """Parts of the area by name."""
    return {"size": size}
