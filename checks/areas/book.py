"""The book: its size, its sentences, the commands that a test runs; and the age of README's figures."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator

from checks.figures import Figure, Part
from checks.report import age
from checks.run import DOCS, ROOT, output

# What is no prose: comments, generated tables, commands, other tables, headings; and the marks of links and code.
_TABLES = re.compile(r"<!-- ([a-z-]+(?::[\w-]+)?) -->.*?<!-- /\1 -->", re.S)
_NO_PROSE = re.compile(r"^```.*?^```$|<!--.*?-->|^\|.*?$|^#.*?$|^!\[.*?$", re.M | re.S)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_SENTENCE = re.compile(r"(?<=[.!?:])\s+|\n\s*\n|^\s*(?:[-*]|\d+\.) ", re.M)


def guide() -> list[str]:
    """The pages of the book before its reference, in order."""
    before, reference, _ = (DOCS / "SUMMARY.md").read_text().partition("# Reference")
    if not reference:
        sys.exit("error: docs/src/SUMMARY.md has no part Reference")
    return [(DOCS / name).read_text() for name in re.findall(r"\]\(([\w-]+\.md)\)", before)]


def size(_: int) -> Iterator[Figure]:
    """Pages, words and sentences of the guide."""
    pages = guide()
    yield Figure("pages of the guide", len(pages), "pages", "<= 14")
    words = sum(len(_TABLES.sub("", page).split()) for page in pages)
    yield Figure("words of the guide, without generated tables", words, "words", "<= 22000")
    prose = (_LINK.sub(r"\1", _NO_PROSE.sub("\n\n", _TABLES.sub("", page))) for page in pages)
    sentences = [len(found.split()) for page in prose for found in _SENTENCE.split(page) if found.split()]
    yield Figure("sentences of the guide", len(sentences), "sentences")
    yield Figure("sentences over 25 words", sum(words > 25 for words in sentences), "sentences")


def commands(_: int) -> Iterator[Figure]:
    """The blocks of commands in README and book, by who runs them."""
    said = json.loads(output(sys.executable, ROOT / "scripts" / "check_commands.py", "--json"))["by_mark"]
    run = sum(count for mark, count in said.items() if mark.startswith(("run", "ci")))
    total = sum(count for mark, count in said.items() if mark != "hardware")
    yield Figure("blocks of commands that need no hardware", total, "blocks")
    yield Figure("of these, run by a test", run / total, "share", ">= 0.8")


MOST_BEHIND, MOST_LINES = 30, 7000


def figures(_: int) -> Iterator[Figure]:
    """Figures themselves: README's rows and their commits, and the size of what measures them."""
    found = age()
    yield Figure("rows of README that are stale or were not measured", found["left_out"], f"of {found['rows']}", "<= 0")
    yield Figure("commits that README's figures are of", found["commits"], "commits", "<= 1")
    yield Figure("commits since the oldest of them", found["behind"], "commits", f"<= {MOST_BEHIND}")
    lines = sum(path.read_text().count("\n") for path in (ROOT / "checks").rglob("*.py"))
    yield Figure("lines of checks/", lines, "lines", f"<= {MOST_LINES}")


PAGES = ("docs/src", "README.md")

PARTS: dict[str, Part] = {
    "size": Part(size, PAGES, size, 1),
    "commands": Part(commands, (*PAGES, "scripts/check_commands.py"), commands, 2),
    "figures": Part(figures, ("checks",), figures, 2),
}
