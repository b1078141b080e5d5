"""Checks of files in a folder from an untrusted source: only regular files are opened, and JSON is limited in size."""

import json
from pathlib import Path
from typing import Any

from foredraft.errors import ForedraftError
from foredraft.files import hub

MAX_JSON = 100 * 2**20  # bytes of the largest JSON file that is read


def check_regular_file(file: Path, display_name: str) -> None:
    """Raise ForedraftError for a folder, a pipe, a device or a broken link.

    Opening a pipe would block without end.
    """
    if file.is_file():
        return
    kind = "a folder" if file.is_dir() else "a broken link" if not file.exists() else "a pipe or a device"
    raise ForedraftError(f"{display_name}: {file.name} is {kind}, not a file; fetch it again")


def read_json(file: Path, display_name: str, expected_kind: str = "a drafter's folder") -> dict[str, Any]:
    """Read a JSON object from a file.

    Args:
        file: File to read.
        display_name: Folder as the user wrote it, for messages.
        expected_kind: Kind of folder that was expected, for messages.

    Raises:
        ForedraftError: if the file is missing, too large, unreadable or not a JSON object.
    """
    if not file.is_symlink() and not file.exists():
        raise ForedraftError(
            f"{display_name} is a folder without a {file.name}; {hub.explain_folder(file.parent, expected_kind)}"
        )
    check_regular_file(file, display_name)
    if file.stat().st_size > MAX_JSON:
        raise ForedraftError(f"{display_name}: its {file.name} is larger than {MAX_JSON >> 20} MiB; fetch it again")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise ForedraftError(f"{display_name}: its {file.name} is not valid JSON; fetch it again") from None
    except OSError as error:
        raise ForedraftError(
            f"{display_name}: its {file.name} cannot be read ({error.strerror}); fetch it again"
        ) from None
    if not isinstance(content, dict):
        raise ForedraftError(f"{display_name}: its {file.name} is not a JSON object; fetch it again")
    return content
