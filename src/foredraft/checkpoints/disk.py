"""Writing to a disk that may be full: whole files or none, and one line that says how to go on."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from foredraft.errors import ForedraftError

PARTIAL_FOLDER = ".partial"  # a folder of this name holds what is being written


@contextmanager
def convert_write_errors(folder: Path, hint: str) -> Iterator[None]:
    """Errors of the disk become a ForedraftError with the folder and what to do then.

    RuntimeError is among them: torch's writer raises it where a file cannot be written.
    """
    try:
        yield
    except ForedraftError:
        raise
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).partition("\n")[0]
        raise ForedraftError(f"{folder} could not be written ({reason[:160]}); {hint}") from error


def replace_text(file: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    part = file.with_name(f".{file.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


def replace_files(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder beside the files of `folder`, and put them in their place once all are whole."""
    partial = folder / PARTIAL_FOLDER
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        write(partial)
        for file in sorted(partial.iterdir()):
            os.replace(file, folder / file.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
