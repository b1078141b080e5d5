"""The command line. This file is what a process starts with, so that it imports next to nothing."""

import os
import signal
import sys

SERVE_COMMAND = "serve"


def main() -> None:
    """The `foredraft` command."""
    if SERVE_COMMAND in sys.argv[1:2]:
        exit_on_signals()
    from foredraft.cli.streams import open_streams

    open_streams()
    from foredraft.cli.commands import app

    app()


def exit_on_signals() -> None:
    """SIGTERM and Ctrl-C end the process with code 0 until the server has handlers of its own, and after that: nothing
    is to be finished then, and what runs at the time (an import, a library loading) need not be able to end early."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
