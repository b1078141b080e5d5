"""Writing to a disk that may be full: whole files or none, and errors of one line that say how to continue."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from foredraft.errors import ForedraftError

PARTIAL_FOLDER = ".partial"  # name of the subfolder that holds files while they are written
MAX_REASON_LENGTH = 160  # characters of the system's error message that are repeated


@contextmanager
def convert_write_errors(folder: Path, hint: str) -> Iterator[None]:
    """Convert errors of the disk to a ForedraftError with the folder and a hint.

    RuntimeError is converted too: torch's writer raises it if a file cannot be written.

    Args:
        folder: Folder that is written to.
        hint: How the user can continue.
    """
    try:
        yield
    except ForedraftError:
        raise
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).partition("\n")[0]
        raise ForedraftError(f"{folder} could not be written ({reason[:MAX_REASON_LENGTH]}); {hint}") from error


def replace_text(file: Path, text: str) -> None:
    """Write a small text file whole or not at all."""
    part = file.with_name(f".{file.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


def replace_files(folder: Path, write: Callable[[Path], None]) -> None:
    """Write a set of files whole or not at all.

    Args:
        folder: Folder whose files are replaced.
        write: Writes the files into the empty folder that it is given; they are moved once it returns.
    """
    partial = folder / PARTIAL_FOLDER
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        write(partial)
        for file in sorted(partial.iterdir()):
            os.replace(file, folder / file.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
