"""Traces on disk, for runs that read the data more than once: safetensors shards, made before the first step."""

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

from foredraft.checkpoints.disk import convert_write_errors
from foredraft.drafters.losses import TargetLogProbs, Trace
from foredraft.errors import ForedraftError
from foredraft.train.config import find_difference
from foredraft.train.trace import Tracer
from foredraft.train.windows import TokenWindows

SHARD = 64  # rows of a file
TRACE_BATCH_ROWS = 8  # rows traced together
HEADER_FILE = "traces.json"


@dataclass(frozen=True)
class TraceCache:
    """A folder of traces of all rows of some windows. States are kept in bfloat16."""

    folder: Path
    windows: TokenWindows
    tracer: Tracer
    identity: Mapping[str, Any]  # whatever decides the traces

    def fill(self, log_line: Callable[[str], None]) -> None:
        """Make what is missing. Raises ForedraftError if the folder holds other traces or the disk has no room."""
        self._prepare_folder()
        shards = range(-(-len(self.windows) // SHARD))
        missing = [shard for shard in shards if not self._get_shard_path(shard).exists()]
        if not missing:
            return
        size = self._estimate_row_bytes() * SHARD * len(missing)
        free = shutil.disk_usage(self.folder).free
        log_line(f"traces of {len(self.windows):,} rows take {_format_size(size)} more in {self.folder}; "
            f"{_format_size(free)} are free")  # fmt: skip
        if size > 0.95 * free:
            raise ForedraftError(
                f"traces need {_format_size(size)} and {self.folder} has {_format_size(free)} free; lower --top, "
                "or leave "
                "--cache out"
            )
        for done, shard in enumerate(missing, 1):
            self._write_shard(shard)
            if done * 10 // len(missing) != (done - 1) * 10 // len(missing):
                log_line(f"{done} of {len(missing)} shards of traces written")

    def read(self, rows: Sequence[int], step: int) -> Trace:
        found = [self._read_row(row) for row in rows]
        stacked = {name: torch.stack([row[name] for row in found]) for name in found[0]}
        device = self.tracer.target.device
        ids = stacked.get("ids")
        probs = TargetLogProbs(stacked["logprobs"].to(device), None if ids is None else ids.long().to(device))
        tokens, mask = self.windows.read(rows)
        return Trace(tokens.to(device), stacked["features"].to(device), probs, mask.to(device))

    def _read_row(self, row: int) -> dict[str, Tensor]:
        file, place = self._get_shard_path(row // SHARD), row % SHARD
        try:
            with safe_open(file, "pt") as shard:
                return {name: shard.get_slice(name)[place] for name in shard.keys()}  # noqa: SIM118 (not a dict)
        except (OSError, SafetensorError) as error:
            raise ForedraftError(f"the shard of traces {file} is damaged ({error}); delete it") from None

    def _write_shard(self, shard: int) -> None:
        rows = range(shard * SHARD, min((shard + 1) * SHARD, len(self.windows)))
        parts: dict[str, list[Tensor]] = {"features": [], "logprobs": [], "ids": []}
        for first in range(rows.start, rows.stop, TRACE_BATCH_ROWS):
            trace = self.tracer.trace(*self.windows.read(range(first, min(first + TRACE_BATCH_ROWS, rows.stop))))
            parts["features"].append(trace.features.bfloat16().cpu())
            parts["logprobs"].append(trace.target_log_probs.logprobs.cpu())
            if trace.target_log_probs.token_ids is not None:
                parts["ids"].append(trace.target_log_probs.token_ids.int().cpu())
        tensors = {name: torch.cat(found) for name, found in parts.items() if found}
        partial = self._get_shard_path(shard).with_suffix(".partial")
        try:
            with convert_write_errors(
                self.folder, "make room or give another --cache; the same command goes on from this shard"
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
        own = json.loads(json.dumps(self.identity))
        header = self.folder / HEADER_FILE
        if header.exists():
            try:
                fault = find_difference(json.loads(header.read_text()), own)
            except ValueError:
                fault = "its header is damaged"
            if fault is not None:
                raise ForedraftError(f"the traces in {self.folder} are others: {fault}; give another --cache")
        elif self.folder.exists() and any(self.folder.iterdir()):
            raise ForedraftError(f"--cache {self.folder} is not empty and holds no traces; give another folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        header.write_text(json.dumps(own, indent=1) + "\n")


def _format_size(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 5e7 else f"{size / 1e6:.1f} MB"
