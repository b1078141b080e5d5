"""Header of a safetensors file, checked against the rules of the format before any weight is read."""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.errors import ForedraftError
from foredraft.files.file_checks import check_regular_file

MAX_HEADER = 100 * 2**20  # bytes; limit of the safetensors format
LENGTH_BYTES = 8  # size of the little-endian integer before the header, which holds its length
# Bits per number, by the dtype name of the format.
BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32,
    "U16": 16, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class HeaderEntry:
    """Entry of one tensor in a header."""

    dtype: str  # name in the safetensors format
    shape: tuple[int, ...]
    start: int  # byte offsets after the header: [start, end)
    end: int


def read_header(file: Path, display_name: str) -> dict[str, HeaderEntry]:
    """Read the entries of all tensors in a safetensors file, by name.

    Args:
        file: File to read.
        display_name: Folder as the user wrote it, for messages.

    Raises:
        ForedraftError: if the file is cut off or no safetensors file, or if tensors overlap or leave gaps.
    """
    check_regular_file(file, display_name)
    size = file.stat().st_size
    with file.open("rb") as opened:
        prefix = opened.read(LENGTH_BYTES)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == LENGTH_BYTES else MAX_HEADER + 1
        text = opened.read(length) if length <= MAX_HEADER else b""
    if size < LENGTH_BYTES or (0 < length <= MAX_HEADER and len(text) < length):
        raise ForedraftError(f"{display_name}: {file.name} is cut off within its header; fetch it again")
    try:
        entries = _parse_entries(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise ForedraftError(f"{display_name}: {file.name} is not a safetensors file; fetch it again") from None
    end = _check_offsets(entries, f"{display_name}: {file.name}")
    expected_size = LENGTH_BYTES + length + end
    if size < expected_size:
        raise ForedraftError(
            f"{display_name}: {file.name} is cut off: {size} of {expected_size} bytes are there; fetch it again"
        )
    return entries


def _parse_entries(header: dict[str, Any]) -> dict[str, HeaderEntry]:
    return {
        name: HeaderEntry(
            str(entry["dtype"]), tuple(map(_check_count, entry["shape"])), *map(_check_count, entry["data_offsets"])
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _check_count(number: Any) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ValueError(number)
    return number


def _check_offsets(entries: dict[str, HeaderEntry], location: str) -> int:
    """Return the size of all tensors in bytes.

    Tensors must be adjacent, and each must be as long as its shape requires.
    """
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        bits = BITS.get(entry.dtype)
        has_expected_length = bits is None or 8 * (entry.end - entry.start) == bits * math.prod(entry.shape)
        if entry.start != end or entry.end < entry.start or not has_expected_length:
            raise ForedraftError(
                f"{location} is damaged: by its header {name} {list(entry.shape)} of {entry.dtype} lies in bytes "
                f"{entry.start} to {entry.end}, which overlaps another tensor, leaves a gap or is of another length; "
                "fetch it again"
            )
        end = entry.end
    return end
