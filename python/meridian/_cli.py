"""Entry point of the `meridian` command that the wheel installs."""

import os
import sys

from meridian._native import run_cli


def main() -> int:
    """Run the command line with the process's arguments, and return the exit code."""
    # `meridian bench vllm` starts engines in this Python, unless the variable names another.
    os.environ.setdefault("MERIDIAN_PYTHON", sys.executable)
    return run_cli(["meridian", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
