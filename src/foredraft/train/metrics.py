"""Metrics of a run as JSON Lines, one object per entry, and optionally in TensorBoard."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.errors import ForedraftError
from foredraft.files.disk import convert_write_errors, replace_text
from foredraft.train.publish import DISK_FULL_HINT


@dataclass(frozen=True)
class MetricsWriter:
    """Writer of metrics in the order of the steps. Nothing is written if `file` is None."""

    file: Path | None
    tensorboard: Any = None  # SummaryWriter

    @classmethod
    def open(cls, folder: Path, step: int, has_tensorboard: bool = False) -> "MetricsWriter":
        """Open the metrics of a run to continue after a step.

        Entries of later steps are removed: the run computes these steps again.

        Args:
            folder: Output folder of the run.
            step: Number of completed steps.
            has_tensorboard: Whether to write TensorBoard files too.

        Raises:
            ForedraftError: if TensorBoard is not installed, or the disk is full.
        """
        file = folder / "metrics.jsonl"
        if file.exists():
            lines = [line for line in file.read_text(encoding="utf-8").splitlines() if _read_step(line) <= step]
            with convert_write_errors(folder, DISK_FULL_HINT):
                replace_text(file, "".join(f"{line}\n" for line in lines))
        return cls(file, _open_tensorboard(folder, step) if has_tensorboard else None)

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        """Write one entry."""
        if self.file is None:
            return
        with convert_write_errors(self.file.parent, DISK_FULL_HINT), self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        if self.tensorboard is not None:
            for name, value in _flatten(values).items():
                self.tensorboard.add_scalar(name, value, step)

    def close(self) -> None:
        if self.tensorboard is not None:
            self.tensorboard.close()


def _read_step(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # an incomplete last line
        return float("inf")


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    flat: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}/")
        elif isinstance(value, list | tuple):
            flat |= _flatten({str(i): x for i, x in enumerate(value, 1)}, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            flat[prefix + name] = float(value)
    return flat


def _open_tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ForedraftError("--tensorboard needs the library: pip install tensorboard") from None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
