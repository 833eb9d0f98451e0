"""The `meridian` command."""

import os
import signal
import sys

from meridian._native import run_command


def main() -> None:
    """Run the command line and exit as it does."""
    # Ctrl-C ends a command as it ends any program: Python would wait until the command returns.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.setdefault("MERIDIAN_PYTHON", sys.executable)
    sys.exit(run_command(["meridian", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
