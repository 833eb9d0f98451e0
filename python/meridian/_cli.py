"""Entry point of the `meridian` command that the wheel installs.

`meridian bench vllm` needs vLLM and is Python; all other commands are the native ones.
"""

import sys

from meridian._native import run_cli

BENCH_HELP = """
With the Python wheel also:
  vllm   Compare stock vLLM's scheduler with Meridian's in the real engine (meridian bench vllm --help)"""


def main() -> int:
    """Run the command line with the process's arguments; returns the exit code."""
    args = sys.argv[1:]
    if args[:2] == ["bench", "vllm"]:
        from meridian.bench.compare import main as compare

        return compare(args[2:])
    code = run_cli(["meridian", *args])
    if args in (["bench", "--help"], ["bench", "-h"], ["bench", "help"], ["help", "bench"]):
        print(BENCH_HELP, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
