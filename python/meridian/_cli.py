"""Entry point of the `meridian` command that the wheel installs.

`meridian bench vllm` needs vLLM and is Python; all other commands are the native ones.
"""

import sys

from meridian._native import run_cli


def main() -> int:
    """Run the command line with the process's arguments; returns the exit code."""
    args = sys.argv[1:]
    if args[:2] == ["bench", "vllm"]:
        from meridian.bench.compare import main as compare

        return compare(args[2:])
    return run_cli(["meridian", *args])


if __name__ == "__main__":
    sys.exit(main())
