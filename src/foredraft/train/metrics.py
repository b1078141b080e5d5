"""The figures of a run as JSON Lines, one object per entry, and in TensorBoard if it is asked for."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.checkpoints.disk import replace_text, writing
from foredraft.errors import ForedraftError
from foredraft.train.publish import FULL


@dataclass(frozen=True)
class Metrics:
    """Entries in the order of their steps. Nothing is written where `file` is None."""

    file: Path | None
    board: Any = None  # a SummaryWriter

    @classmethod
    def open(cls, folder: Path, step: int, has_board: bool = False) -> "Metrics":
        """Go on after `step`: what a stopped run noted beyond it will be noted again, and is taken out."""
        file = folder / "metrics.jsonl"
        if file.exists():
            lines = [line for line in file.read_text(encoding="utf-8").splitlines() if _step(line) <= step]
            with writing(folder, FULL):
                replace_text(file, "".join(f"{line}\n" for line in lines))
        return cls(file, _board(folder, step) if has_board else None)

    def note(self, step: int, figures: Mapping[str, Any]) -> None:
        """One entry."""
        if self.file is None:
            return
        with writing(self.file.parent, FULL), self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **figures}) + "\n")
        if self.board is not None:
            for name, value in _flat(figures).items():
                self.board.add_scalar(name, value, step)

    def close(self) -> None:
        if self.board is not None:
            self.board.close()


def _step(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # the end of a line that was cut off
        return float("inf")


def _flat(figures: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in figures.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}/")
        elif isinstance(value, list | tuple):
            found |= _flat({str(i): x for i, x in enumerate(value, 1)}, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            found[prefix + name] = float(value)
    return found


def _board(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ForedraftError("--tensorboard needs the library: pip install tensorboard") from None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
