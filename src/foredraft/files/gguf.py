"""Header of a GGUF file: metadata and the places of its tensors, checked before any weight is read."""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.errors import ForedraftError
from foredraft.files.file_checks import check_regular_file

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32  # bytes; tensors start at multiples of it
MAX_DIMENSIONS = 4
STRING, ARRAY = 8, 9  # types of metadata with a length
# Format of the other types of metadata by their number.
NUMBER_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class BlockFormat:
    """Size of a block of weights."""

    name: str
    weights: int
    size: int  # bytes


# Formats that are decoded, by their number in a file.
BLOCK_FORMATS = {
    0: BlockFormat("F32", 1, 4), 1: BlockFormat("F16", 1, 2), 30: BlockFormat("BF16", 1, 2),
    2: BlockFormat("Q4_0", 32, 18), 3: BlockFormat("Q4_1", 32, 20), 6: BlockFormat("Q5_0", 32, 22),
    7: BlockFormat("Q5_1", 32, 24), 8: BlockFormat("Q8_0", 32, 34), 10: BlockFormat("Q2_K", 256, 84),
    11: BlockFormat("Q3_K", 256, 110), 12: BlockFormat("Q4_K", 256, 144),
    13: BlockFormat("Q5_K", 256, 176), 14: BlockFormat("Q6_K", 256, 210),
}  # fmt: skip


@dataclass(frozen=True)
class GgufTensor:
    """Place of a tensor in a file."""

    format: BlockFormat
    shape: tuple[int, ...]  # as in torch: the last dimension is contiguous
    start: int  # byte of the file

    @property
    def size(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) // self.format.weights * self.format.size


@dataclass(frozen=True)
class GgufHeader:
    """Metadata and tensors of a GGUF file."""

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """Name of the architecture; it is the prefix of the model's own metadata."""
        return str(self.metadata.get("general.architecture", ""))


class GgufCursor:
    """Position in the bytes of a file. A read beyond the end raises struct.error."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def read(self, form: str) -> tuple[Any, ...]:
        """Read numbers by a format of `struct`, little-endian."""
        values = struct.unpack_from(f"<{form}", self.data, self.position)
        self.position += struct.calcsize(f"<{form}")
        return values

    def read_text(self) -> str:
        (length,) = self.read("Q")
        self._check_room(length)
        self.position += length
        return self.data[self.position - length : self.position].decode("utf-8", errors="replace")

    def read_value(self, kind: int) -> Any:
        """Read a value of metadata of a type."""
        if kind == STRING:
            return self.read_text()
        if kind != ARRAY:
            return self.read(NUMBER_FORMATS[kind])[0]
        item, count = self.read("IQ")
        self._check_room(count)  # an item has at least one byte
        if item in NUMBER_FORMATS:
            return list(self.read(f"{count}{NUMBER_FORMATS[item]}"))
        return [self.read_value(item) for _ in range(count)]

    def _check_room(self, size: int) -> None:
        if size > len(self.data) - self.position:
            raise struct.error("beyond the end")


def find_gguf(name: str) -> Path | None:
    """Find the GGUF file of a name: the file itself, or the only one of a folder without config.json.

    Raises:
        ForedraftError: the folder has several GGUF files.
    """
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf" and path.exists() and not path.is_dir():
        return path
    if not path.is_dir() or (path / "config.json").exists() or any(path.glob("*.safetensors")):
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise ForedraftError(f"{name} holds {len(files)} GGUF files; give one of them, such as {path / files[0].name}")
    return next(iter(files), None)


def read_gguf_header(file: Path, display_name: str) -> GgufHeader:
    """Read metadata and places of tensors.

    Args:
        file: file to read.
        display_name: name as the user wrote it, for messages.

    Raises:
        ForedraftError: the file is no GGUF file, is cut off, is one of several parts, or has formats without decoder.
    """
    check_regular_file(file, display_name)
    size = file.stat().st_size
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header, end = _parse_header(GgufCursor(data), file, display_name)
    except ForedraftError:
        raise
    except (struct.error, KeyError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
        raise ForedraftError(
            f"{display_name} is no GGUF file, or is cut off within its header; fetch it again"
        ) from error
    if end > size:
        raise ForedraftError(f"{display_name} is cut off: {size} of {end} bytes are there; fetch it again")
    return header


def _parse_header(cursor: GgufCursor, file: Path, name: str) -> tuple[GgufHeader, int]:
    """Return the header and the number of bytes that the file has at least."""
    magic, version, num_tensors, num_values = cursor.read("4sIQQ")
    if magic != MAGIC:
        raise ValueError(magic)
    if version not in VERSIONS:
        raise ForedraftError(f"{name} is GGUF of version {version}, and versions 2 and 3 are read; convert it again")
    metadata = {}
    for _ in range(num_values):
        key = cursor.read_text()
        metadata[key] = cursor.read_value(*cursor.read("I"))
    if metadata.get("split.count", 0) > 1:
        raise ForedraftError(f"{name} is one of {metadata['split.count']} parts; join them by llama-gguf-split --merge")
    entries = [_parse_entry(cursor, name) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    begin = -(-cursor.position // alignment) * alignment
    tensors = {key: GgufTensor(form, shape, begin + offset) for key, form, shape, offset in entries}
    return GgufHeader(file, metadata, tensors), max((each.start + each.size for each in tensors.values()), default=0)


def _parse_entry(cursor: GgufCursor, name: str) -> tuple[str, BlockFormat, tuple[int, ...], int]:
    key = cursor.read_text()
    (count,) = cursor.read("I")
    if not 0 < count <= MAX_DIMENSIONS:
        raise ValueError(count)
    shape = tuple(reversed(cursor.read(f"{count}Q")))
    kind, offset = cursor.read("IQ")
    form = BLOCK_FORMATS.get(kind)
    if form is None:
        known = ", ".join(sorted(each.name for each in BLOCK_FORMATS.values()))
        raise ForedraftError(
            f"{name}: {key} has the GGUF format number {kind}, and only {known} are decoded; use a file of the kind "
            "Q8_0, Q6_K, Q5_K_M, Q4_K_M or Q4_0"
        )
    if shape[-1] % form.weights:
        raise ValueError(shape)
    return key, form, shape, offset
