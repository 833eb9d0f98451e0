"""`python -m meridian`: the `meridian` command of this Python, a binary beside it."""

import os
import sys
from importlib.metadata import PackageNotFoundError, files


def main() -> None:
    """Become the command that was installed with this package."""
    try:
        installed = files("meridian") or []
    except PackageNotFoundError:
        installed = []
    for file in installed:
        # The record of the installation knows the folder of scripts, whichever scheme the installer used.
        if file.name == "meridian":
            os.environ.setdefault("MERIDIAN_PYTHON", sys.executable)
            binary = os.fspath(file.locate())
            os.execv(binary, [binary, *sys.argv[1:]])
    sys.exit(
        "error: python -m meridian: this installation has no meridian command, expected one from a wheel: "
        "build it with `cargo install --locked --path host/cli` in Meridian's source"
    )


if __name__ == "__main__":
    main()
