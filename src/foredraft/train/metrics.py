"""The figures of a run as JSON Lines, one object per entry, and in TensorBoard if it is asked for."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.checkpoints.disk import convert_write_errors, replace_text
from foredraft.errors import ForedraftError
from foredraft.train.publish import DISK_FULL_HINT


@dataclass(frozen=True)
class MetricsWriter:
    """Entries in the order of their steps. Nothing is written where `file` is None."""

    file: Path | None
    tensorboard: Any = None  # a SummaryWriter

    @classmethod
    def open(cls, folder: Path, step: int, has_tensorboard: bool = False) -> "MetricsWriter":
        """Go on after `step`: what a stopped run noted beyond it will be noted again, and is taken out."""
        file = folder / "metrics.jsonl"
        if file.exists():
            lines = [line for line in file.read_text(encoding="utf-8").splitlines() if _read_step(line) <= step]
            with convert_write_errors(folder, DISK_FULL_HINT):
                replace_text(file, "".join(f"{line}\n" for line in lines))
        return cls(file, _open_tensorboard(folder, step) if has_tensorboard else None)

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        """One entry."""
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
    except (ValueError, KeyError, TypeError):  # the end of a line that was cut off
        return float("inf")


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _flatten(value, f"{prefix}{name}/")
        elif isinstance(value, list | tuple):
            found |= _flatten({str(i): x for i, x in enumerate(value, 1)}, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            found[prefix + name] = float(value)
    return found


def _open_tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ForedraftError("--tensorboard needs the library: pip install tensorboard") from None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
