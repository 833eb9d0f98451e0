"""The `meridian` command."""

import os
import signal
import sys

from meridian._native import run_command


def main() -> None:
    """Run the command line and exit as it does."""
    # Ctrl-C ends a command as it ends any program: Python would wait until the command returns. A shell may have it
    # ignored, for a command in the background.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.setdefault("MERIDIAN_PYTHON", sys.executable)
    sys.exit(run_command(["meridian", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
