"""Entry point of the `meridian` command that the wheel installs."""

import sys

from meridian._native import run_cli


def main() -> int:
    """Run the command line with the process's arguments; returns the exit code."""
    return run_cli(["meridian", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
