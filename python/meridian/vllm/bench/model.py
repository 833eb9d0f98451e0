"""The small model with random weights, made in the cache on first use from the repository's script.

As a script, prints its folder; with ``--reasoner`` that of the bundled reasoner.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

MAKE = Path("models") / "tiny-random" / "make.py"
REASONER = Path("models") / "arith-reasoner"
LOG_TAIL_LINES = 12


class NoModel(Exception):
    """There is no model to run; the message is one clear line, perhaps with the end of a log below it."""


def _in_checkout(path: Path) -> Path | None:
    """A file of the checkout that this package lies in or, for an installed one, of the current directory's."""
    here, current = Path(__file__).resolve(), Path.cwd()
    for folder in (here.parents[4], current, *current.parents):
        if (folder / path).is_file():
            return folder / path
    return None


def _script() -> Path:
    found = _in_checkout(MAKE)
    if found is None:
        raise NoModel(
            f"--model DIR is needed: the small model is made by {MAKE} of Meridian's repository, not found here"
        )
    return found


def reasoner_dir() -> Path:
    """Folder of the bundled reasoner, which solves the problems of `arith`.

    Raises:
        NoModel: this is not the repository.
    """
    config = _in_checkout(REASONER / "config.json")
    if config is None:
        raise NoModel(f"--model DIR is needed: the reasoner is {REASONER} of Meridian's repository, not found here")
    return config.parent


def model_dir() -> Path:
    """The model's folder; its name changes with the script that makes it.

    Raises:
        NoModel: this is not the repository, or the script failed.
    """
    script = _script()
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meridian"
    cache = Path(os.environ.get("MERIDIAN_CACHE") or default)
    model = cache / "models" / f"tiny-random-{hashlib.sha256(script.read_bytes()).hexdigest()[:12]}"
    if not (model / ".complete").exists():
        print(f"model: making {model}", file=sys.stderr, flush=True)
        done = subprocess.run([sys.executable, str(script), str(model)], capture_output=True, text=True)
        if done.returncode:
            tail = "\n".join(f"  | {x}" for x in done.stderr.splitlines()[-LOG_TAIL_LINES:])
            raise NoModel(f"making the model failed:\n{tail}")
    return model


def main(argv: Sequence[str]) -> int:
    """Command line; exit code 1 with one clear line when there is no model."""
    try:
        print(reasoner_dir() if list(argv) == ["--reasoner"] else model_dir())
    except NoModel as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
