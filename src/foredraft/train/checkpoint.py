"""Checkpoints of a training run: weights, optimizer, step. A resumed run continues bit for bit.

Random numbers are no part of it: those of a step depend on the seed and the step alone. A folder appears under its
final name only when it is whole; the one before it goes after that.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from foredraft.checkpoints.disk import convert_write_errors
from foredraft.errors import ForedraftError
from foredraft.train.optimizer import GroupedOptimizer

FOLDER_PREFIX = "checkpoint-"


def collect_tensors(networks: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Collect the tensors that training changes: parameters with a gradient, and buffers."""
    found: dict[str, Tensor] = {}
    for part, network in networks.items():
        found |= {f"{part}.{name}": p.detach() for name, p in network.named_parameters() if p.requires_grad}
        found |= {f"{part}.{name}": buffer for name, buffer in network.named_buffers()}
    return found


@dataclass(frozen=True)
class TrainingCheckpoints:
    """The checkpoints of one output folder."""

    folder: Path

    def find_latest(self) -> Path | None:
        found = [
            path for path in self.folder.glob(f"{FOLDER_PREFIX}*") if path.name.removeprefix(FOLDER_PREFIX).isdigit()
        ]
        return max(found, key=lambda path: int(path.name.removeprefix(FOLDER_PREFIX)), default=None)

    def save(
        self, step: int, networks: Mapping[str, nn.Module], optimizer: GroupedOptimizer, metadata: dict[str, Any]
    ) -> None:
        """`about` is the caller's own, as JSON. Raises ForedraftError where the disk is full; the one before stays."""
        final = self.folder / f"{FOLDER_PREFIX}{step}"
        partial = final.with_name(f"{final.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        tensors = {name: tensor.cpu().contiguous().clone() for name, tensor in collect_tensors(networks).items()}
        try:
            with convert_write_errors(
                self.folder, f"make room, and the same command goes on {self._describe_restart()}"
            ):
                partial.mkdir(parents=True)
                save_file(tensors, partial / "weights.safetensors")
                torch.save(optimizer.state_dict(), partial / "optimizer.pt")
                (partial / "state.json").write_text(json.dumps({"step": step, **metadata}, indent=1) + "\n")
        except ForedraftError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        old = [path for path in self.folder.glob(f"{FOLDER_PREFIX}*") if path != partial]
        if final.exists():  # the same step again, after a stop just behind it
            shutil.rmtree(final)
        partial.rename(final)
        for path in old:
            if path != final:
                shutil.rmtree(path, ignore_errors=True)

    def _describe_restart(self) -> str:
        found = self.find_latest()
        return "from the beginning" if found is None else f"from {found.name}"

    def load(self, path: Path, networks: Mapping[str, nn.Module], optimizer: GroupedOptimizer) -> dict[str, Any]:
        """Restore everything that `save` wrote. Raises ForedraftError if the checkpoint is damaged or of another
        run."""
        held = collect_tensors(networks)
        try:
            about: dict[str, Any] = json.loads((path / "state.json").read_text())
            weights = load_file(path / "weights.safetensors")
            saved = torch.load(path / "optimizer.pt", weights_only=True, map_location="cpu")
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise ForedraftError(f"the checkpoint {path} is damaged ({error}); delete it to begin again") from None
        if weights.keys() != held.keys() or any(weights[name].shape != held[name].shape for name in held):
            raise ForedraftError(f"the checkpoint {path} is of another drafter; give another --out")
        with torch.no_grad():
            for name, tensor in held.items():
                tensor.copy_(weights[name])
        optimizer.load_state_dict(saved)
        return about
