"""One engine: how large its parts are, and in how many places components are started."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from checks.figures import Figure, Part
from checks.run import ROOT, output

LONGEST_FILE, LONGEST_BINDING = 500, 250
STARTS = re.compile(r"\bRuntime::new\(|component\.policy::<")


def size(_: int) -> Iterator[Figure]:
    """Lines by crate, long files, and the places that load policies; without tests, examples and benches."""
    paths = output("git", "ls-files", "*/src/*.rs", ":!policies", ":!examples").splitlines()
    texts = {path: (ROOT / path).read_text() for path in paths}
    lines = {path: text.count("\n") for path, text in texts.items()}
    crates: Counter[str] = Counter()
    for path, count in lines.items():
        crates[path.partition("/src/")[0]] += count
    for crate, count in sorted(crates.items()):
        yield Figure(f"lines of {crate}/src", count, "lines")
    long = sum(count > LONGEST_FILE for count in lines.values())
    yield Figure(f"files over {LONGEST_FILE} lines", long, "files", "<= 5")
    of_binding = [count for path, count in lines.items() if Path(path).is_relative_to("python")]
    long = sum(count > LONGEST_BINDING for count in of_binding)
    yield Figure(f"files of python/src over {LONGEST_BINDING} lines", long, "files", "<= 0")
    loaders = sum(bool(STARTS.search(text)) for path, text in texts.items() if not path.startswith("host/wasm/"))
    yield Figure("files that load and start components", loaders, "files", "<= 1")


PARTS: dict[str, Part] = {"size": size}
