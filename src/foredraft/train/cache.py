"""Cache of the target's states on disk, which runs on the same texts share.

States are stored by layer boundary and row, when a run first reads the row. Distributions are computed from the input
of the output matrix, so they need no room.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.drafters.losses import Trace
from foredraft.errors import ForedraftError
from foredraft.files.disk import convert_write_errors
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from foredraft.train.config import find_difference
from foredraft.train.trace import Tracer
from foredraft.train.windows import TokenWindows

MAX_DISK_SHARE = 0.95  # share of the free disk space that states may take
HEADER_FILE = "traces.json"
STORED = b"\1"  # mark of a stored row


@dataclass(frozen=True)
class TraceCache:
    """Folder with the target's states after the rows of a set of windows, in the target's dtype."""

    folder: Path
    windows: TokenWindows
    tracer: Tracer
    identity: Mapping[str, Any]  # settings that determine the states

    def prepare(self, log_line: Callable[[str], None], num_rows: int) -> None:
        """Create the folder, or check the one there is.

        Args:
            log_line: Receives a message with the disk space.
            num_rows: Rows that the run reads, with repetitions.

        Raises:
            ForedraftError: if the folder holds other states, or the disk has no room.
        """
        self._prepare_folder()
        rows = len(self.windows)
        num_rows = min(num_rows, rows)  # stored rows may be others
        size = sum(min(num_rows, rows - boundary.count_rows()) * boundary.row_bytes for boundary in self._boundaries)
        free = shutil.disk_usage(self.folder).free
        log_line(f"states of {num_rows:,} rows take up to {_format_size(size)} more in {self.folder}; "
            f"{_format_size(free)} are free")  # fmt: skip
        if size > MAX_DISK_SHARE * free:
            raise ForedraftError(
                f"states need {_format_size(size)} and {self.folder} has {_format_size(free)} free; leave --cache out"
            )

    def read(self, rows: Sequence[int], step: int) -> Trace:
        """Read the trace of rows; states that are missing are computed and stored."""
        self._store_missing(rows)
        tokens, mask, sources = self.windows.read_with_sources(rows)
        length, device = tokens.shape[1] - 1, self.tracer.target.device
        states = {
            boundary.layer: torch.stack([boundary.read(row)[:length] for row in rows]).to(device)
            for boundary in self._boundaries
        }
        layers = self.tracer.hidden_layers
        final = states[AFTER_FINAL_NORM]
        features = torch.cat([states[layer] for layer in layers], -1) if layers else final[..., :0]
        return Trace(tokens.to(device), features, self.tracer.compute_probs(final), mask.to(device), sources)

    def _store_missing(self, rows: Sequence[int]) -> None:
        boundaries = self._boundaries
        missing = [row for row in rows if not all(boundary.has_row(row) for boundary in boundaries)]
        if not missing:
            return
        # Rows with sources are stored whole: how far a batch of them is read depends on its longest row.
        states = self.tracer.compute_states(
            self.windows.read(missing)[0][:, :-1], [boundary.layer for boundary in boundaries],
            self.windows.get_sources(missing),
        )  # fmt: skip
        with convert_write_errors(
            self.folder, "make room or give another --cache; the same command continues with these rows"
        ):
            for boundary, values in zip(boundaries, states.chunk(len(boundaries), -1), strict=True):
                boundary.write(missing, values.cpu())

    @property
    def _boundaries(self) -> "list[StoredBoundary]":
        target = self.tracer.target
        layers = dict.fromkeys((*self.tracer.hidden_layers, AFTER_FINAL_NORM))
        shape = self.windows.context, target.hidden_size
        return [StoredBoundary(self.folder, layer, *shape, target.model.dtype) for layer in layers]

    def _prepare_folder(self) -> None:
        identity = json.loads(json.dumps(self.identity))
        header = self.folder / HEADER_FILE
        if header.exists():
            try:
                difference = find_difference(json.loads(header.read_text()), identity)
            except ValueError:
                difference = "the header is damaged"
            if difference is not None:
                raise ForedraftError(
                    f"the traces in {self.folder} have other settings: {difference}; give another --cache"
                )
        elif self.folder.exists() and any(self.folder.iterdir()):
            raise ForedraftError(f"--cache {self.folder} is not empty and holds no traces; give another folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        header.write_text(json.dumps(identity, indent=1) + "\n")


@dataclass(frozen=True)
class StoredBoundary:
    """States at one layer boundary: a file of rows [R, L, H], and a file with one byte per row that is stored.

    A row is marked after it is written, so several processes can share the files.
    """

    folder: Path
    layer: int
    context: int
    hidden: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Size of one row."""
        return self.context * self.hidden * self.dtype.itemsize

    @property
    def states_file(self) -> Path:
        """File of the rows; the rows that are not stored are holes."""
        name = "final" if self.layer == AFTER_FINAL_NORM else f"{self.layer:03}"
        return self.folder / f"boundary-{name}.states"

    @property
    def marks_file(self) -> Path:
        """File of the marks."""
        return self.states_file.with_suffix(".rows")

    def count_rows(self) -> int:
        """Return the number of stored rows."""
        return self.marks_file.read_bytes().count(STORED) if self.marks_file.exists() else 0

    def has_row(self, row: int) -> bool:
        """Return whether a row is stored."""
        if not self.marks_file.exists():
            return False
        with _open_file(self.marks_file, os.O_RDONLY) as file:
            return os.pread(file, 1, row) == STORED

    def read(self, row: int) -> Tensor:
        """Read a stored row, [L, H].

        Raises:
            ForedraftError: if the file is shorter than its marks say.
        """
        try:
            with _open_file(self.states_file, os.O_RDONLY) as file:
                data = os.pread(file, self.row_bytes, row * self.row_bytes)
        except FileNotFoundError:
            data = b""
        if len(data) < self.row_bytes:
            raise ForedraftError(
                f"the states in {self.states_file} are damaged; delete {self.marks_file.name}, and they are computed "
                "again"
            )
        return torch.frombuffer(bytearray(data), dtype=self.dtype).view(self.context, self.hidden)

    def write(self, rows: Sequence[int], states: Tensor) -> None:
        """Store rows, [R, L, H]."""
        values = states.to(self.dtype).contiguous().view(torch.uint8).flatten(1).numpy()
        with _open_file(self.states_file, os.O_RDWR | os.O_CREAT) as file:
            for row, data in zip(rows, values, strict=True):
                _write(file, data.tobytes(), row * self.row_bytes)
        with _open_file(self.marks_file, os.O_RDWR | os.O_CREAT) as file:
            for row in rows:
                _write(file, STORED, row)


@contextmanager
def _open_file(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags, 0o666)  # less the umask
    try:
        yield file
    finally:
        os.close(file)


def _write(file: int, data: bytes, offset: int) -> None:
    """Write all bytes; one call may write a part, on a disk that is nearly full."""
    while data:
        count = os.pwrite(file, data, offset)
        data, offset = data[count:], offset + count


def _format_size(size: float) -> str:
    """Format a number of bytes; sizes from 0.05 GB are given in GB."""
    return f"{size / 1e9:.1f} GB" if size >= 5e7 else f"{size / 1e6:.1f} MB"
