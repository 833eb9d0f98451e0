"""The book: its size, its sentences, the commands that a test runs, and the names that its reference explains."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator

from checks.figures import Figure, Part
from checks.run import DOCS, MERIDIAN, ROOT, output

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


def _sections(page: str, title: str) -> dict[str, str]:
    """The texts of a page of the reference by their headings, which are code that matches `title`."""
    found = re.findall(rf"^##+ `({title})`.*?$(.*?)(?=^##+ `|\Z)", (DOCS / page).read_text(), re.M | re.S)
    return dict(found)


def names(_: int) -> Iterator[Figure]:
    """Names that a user can write, as the command itself lists them, in the pages that explain them.

    Defaults and limits are generated into these pages; tests compare them, metrics, routes and fields of requests.
    """
    sys.path.insert(0, str(ROOT / "python" / "tests"))
    from surface import named  # pyright: ignore[reportMissingImports]

    shipped = (ROOT / "policies" / "shipped" / "README.md").read_text()
    commands = _sections("command-line.md", r"meridian[^`]*")
    tables = _sections("configuration.md", r"\[[^`]*")
    # The page begins with the options that every command has.
    commands["meridian"] = (DOCS / "command-line.md").read_text().partition("\n## ")[0] + "".join(commands.values())
    found = named(MERIDIAN)
    groups = {" ".join(name.split()[1:-1]) for name in found if name.startswith("command ")}
    total, absent = 0, []
    for name in found:
        kind, what = name.split(" ", 1)
        last = what.split()[-1]
        owner = what.removesuffix(last).rstrip()
        if kind == "option":
            # Options of a group are those of its commands.
            of_group = "".join(text for command, text in commands.items() if command.startswith(f"{owner} "))
            text = commands.get(owner) or (of_group if owner in groups else "")
            explained = re.search(rf"(?<![\w-]){re.escape(last)}(?![\w-])", text) is not None
        elif kind == "config":
            path, *values = what.split(" = ")
            *inside, field = path.split(".")
            text = "".join(text for title, text in tables.items() if title.startswith("[" + ".".join(inside)))
            is_field = f"`{field}`" in text and all(value in text for value in values)
            explained = is_field or any(f"[{what}" in title for title in tables)
        elif kind == "policy":
            explained = f"\n### {last.removeprefix('native:')}\n" in shipped
        else:
            continue
        total += 1
        absent += [] if explained else [name]
    yield Figure("options, fields and policies of the code", total, "names")
    yield Figure("of these, not in the page that explains them", len(absent), "names", "<= 0")
    for name in absent:
        print(f"not explained: {name}", file=sys.stderr)


PARTS: dict[str, Part] = {"size": size, "commands": commands, "names": names}
