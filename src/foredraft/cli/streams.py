"""Set-up of the standard streams: open, in UTF-8 outside a terminal, and named in write errors."""

import io
import os
import sys

STDOUT = "standard output"


class NamedFile(io.FileIO):
    """File that is opened by its descriptor and has a title, which write errors name."""

    title: str

    def write(self, data: bytes) -> int:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError as error:
            error.filename = self.title
            raise


def open_streams() -> None:
    """Replace closed standard streams by the null device, and set the encoding of standard output and standard error.

    Python represents a closed stream by None. The next file or socket would get the free descriptor, and with it
    everything that native code writes to the standard stream.
    """
    for number in range(3):
        if not _is_open(number):
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free descriptor: `number`
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - open until the process ends
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    raw = NamedFile(1, "w", closefd=False)
    raw.title = STDOUT
    # A terminal keeps its encoding and is line-buffered.
    encoding = sys.stdout.encoding if sys.stdout is not None and raw.isatty() else "utf-8"
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), encoding, line_buffering=raw.isatty())
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that the encoding lacks must not raise
            stream.reconfigure(encoding=None if stream.isatty() else "utf-8", errors="backslashreplace")


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
