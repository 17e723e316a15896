"""The ``dcp`` command; ``python -m distcp`` where another program of that name comes first."""

import signal
import sys

from distcp._native import run_command


def main() -> int:
    """Runs the command with the arguments of the process, and returns its exit code."""
    # Python would only note the signal and go on: the command has a handler of its own, which cleans up.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    return run_command(["dcp", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
