"""Entry point of the command line.

Every process imports this file first, so it imports only the standard library at the top.
"""

import os
import signal
import sys

SERVE_COMMAND = "serve"


def main() -> None:
    """Run the `foredraft` command."""
    if SERVE_COMMAND in sys.argv[1:2]:
        exit_on_signals()
    from foredraft.cli.streams import open_streams

    open_streams()
    from foredraft.cli.commands import app

    app()


def exit_on_signals() -> None:
    """Exit with code 0 on SIGTERM and Ctrl-C, outside the time in which the server installs its own handlers.

    Before and after that time no request is in progress. `os._exit` ends the process even during an import or while a
    library loads.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
