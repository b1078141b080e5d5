"""Tracebacks of test processes that crash, printed at the end of the run.

pytest-xdist says which test a process ran when it crashed, and no more.
"""

import faulthandler
import tempfile
from pathlib import Path

import pytest
from xdist.workermanage import WorkerController

KEY = "crash_report"  # name in the input of a process of the path to its report


class CrashReports:
    """Plugin of the process that starts the others."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="foredraft-crashes-")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: WorkerController) -> None:
        node.workerinput[KEY] = str(Path(self._folder.name) / node.gateway.id)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for path in sorted(Path(self._folder.name).iterdir()):
            if text := path.read_text(errors="replace"):
                terminalreporter.section(f"crash of {path.name}")
                terminalreporter.write_line(text)

    def pytest_unconfigure(self) -> None:
        self._folder.cleanup()


def write_crashes(path: str) -> None:
    """Let a crash of this process write the tracebacks of all threads to a file."""
    faulthandler.enable(Path(path).open("w"), all_threads=True)  # noqa: SIM115  open until the process ends
