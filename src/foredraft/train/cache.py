"""Cache of traces on disk, for runs that read the data more than once.

Traces are stored in safetensors shards, all of them before the first step.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from foredraft.drafters.losses import TargetLogProbs, Trace
from foredraft.errors import ForedraftError
from foredraft.files.disk import convert_write_errors
from foredraft.train.config import find_difference
from foredraft.train.trace import Tracer
from foredraft.train.windows import TokenWindows

SHARD = 64  # rows per file
TRACE_BATCH_ROWS = 8  # rows traced in one batch
MAX_DISK_SHARE = 0.95  # share of the free disk space that traces may take
PROGRESS_MESSAGES = 10  # messages while shards are written
HEADER_FILE = "traces.json"


@dataclass(frozen=True)
class TraceCache:
    """Folder with traces of all rows of a set of windows. States are stored in bfloat16."""

    folder: Path
    windows: TokenWindows
    tracer: Tracer
    identity: Mapping[str, Any]  # settings that determine the traces

    def fill(self, log_line: Callable[[str], None]) -> None:
        """Compute the shards that are missing.

        Args:
            log_line: Receives progress messages.

        Raises:
            ForedraftError: if the folder holds other traces, or the disk has no room.
        """
        self._prepare_folder()
        shards = range(-(-len(self.windows) // SHARD))
        missing = [shard for shard in shards if not self._get_shard_path(shard).exists()]
        if not missing:
            return
        size = self._estimate_row_bytes() * SHARD * len(missing)
        free = shutil.disk_usage(self.folder).free
        log_line(f"traces of {len(self.windows):,} rows take {_format_size(size)} more in {self.folder}; "
            f"{_format_size(free)} are free")  # fmt: skip
        if size > MAX_DISK_SHARE * free:
            raise ForedraftError(
                f"traces need {_format_size(size)} and {self.folder} has {_format_size(free)} free; lower --top, "
                "or leave --cache out"
            )
        for done, shard in enumerate(missing, 1):
            self._write_shard(shard)
            if done * PROGRESS_MESSAGES // len(missing) != (done - 1) * PROGRESS_MESSAGES // len(missing):
                log_line(f"{done} of {len(missing)} shards of traces written")

    def read(self, rows: Sequence[int], step: int) -> Trace:
        tokens, mask, sources = self.windows.read_with_sources(rows)
        length = tokens.shape[1] - 1
        records = [self._read_row(row) for row in rows]
        stacked = {name: torch.stack([row[name][:length] for row in records]) for name in records[0]}
        device = self.tracer.target.device
        ids = stacked.get("ids")
        probs = TargetLogProbs(stacked["logprobs"].to(device), None if ids is None else ids.long().to(device))
        return Trace(tokens.to(device), stacked["features"].to(device), probs, mask.to(device), sources)

    def _read_row(self, row: int) -> dict[str, Tensor]:
        file, index = self._get_shard_path(row // SHARD), row % SHARD
        try:
            with safe_open(file, "pt") as shard:
                return {name: shard.get_slice(name)[index] for name in shard.keys()}  # noqa: SIM118 (not a dict)
        except (OSError, SafetensorError) as error:
            raise ForedraftError(f"the shard of traces {file} is damaged ({error}); delete it") from None

    def _write_shard(self, shard: int) -> None:
        rows = range(shard * SHARD, min((shard + 1) * SHARD, len(self.windows)))
        parts: dict[str, list[Tensor]] = {"features": [], "logprobs": [], "ids": []}
        for first in range(rows.start, rows.stop, TRACE_BATCH_ROWS):
            batch = range(first, min(first + TRACE_BATCH_ROWS, rows.stop))
            trace = self.tracer.trace(*self.windows.read(batch), self.windows.get_sources(batch))
            parts["features"].append(trace.features.bfloat16().cpu())
            parts["logprobs"].append(trace.target_log_probs.logprobs.cpu())
            if trace.target_log_probs.token_ids is not None:
                parts["ids"].append(trace.target_log_probs.token_ids.int().cpu())
        tensors = {name: torch.cat(pieces) for name, pieces in parts.items() if pieces}
        partial = self._get_shard_path(shard).with_suffix(".partial")
        try:
            with convert_write_errors(
                self.folder, "make room or give another --cache; the same command continues with this shard"
            ):
                save_file(tensors, partial)
                partial.replace(self._get_shard_path(shard))
        finally:
            partial.unlink(missing_ok=True)

    def _get_shard_path(self, shard: int) -> Path:
        return self.folder / f"traces-{shard:06}.safetensors"

    def _estimate_row_bytes(self) -> int:
        target, top = self.tracer.target, self.tracer.top
        is_whole = top is None or top >= target.vocab_size
        probs_bytes = 4 * target.vocab_size if is_whole else 8 * (top or 0)
        return self.windows.context * (2 * target.hidden_size * len(self.tracer.hidden_layers) + probs_bytes)

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


def _format_size(size: float) -> str:
    """Format a number of bytes; sizes from 0.05 GB are given in GB."""
    return f"{size / 1e9:.1f} GB" if size >= 5e7 else f"{size / 1e6:.1f} MB"
