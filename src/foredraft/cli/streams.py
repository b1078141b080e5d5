"""Standard streams of the process: there, in UTF-8 wherever they go, and named in the error of a failed write."""

import io
import os
import sys

STDOUT = "standard output"


class NamedFile(io.FileIO):
    """A file opened by number, whose errors say what it is."""

    title: str

    def write(self, data: bytes) -> int:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError as error:
            error.filename = self.title
            raise


def open_streams() -> None:
    """Put the null device in place of a standard stream that the caller closed, and set how text is written.

    A closed stream is None in Python, and the next file that is opened, a socket for one, would get its number and
    whatever native code writes there.
    """
    for number in range(3):
        if not _is_open(number):
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it takes the lowest free number: this one
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for as long as the process runs
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    raw = NamedFile(1, "w", closefd=False)
    raw.title = STDOUT
    # a terminal keeps its encoding, and shows whole lines at once
    encoding = sys.stdout.encoding if sys.stdout is not None and raw.isatty() else "utf-8"
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), encoding, line_buffering=raw.isatty())
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # nothing an encoding lacks may raise
            stream.reconfigure(encoding=None if stream.isatty() else "utf-8", errors="backslashreplace")


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
