"""Checkpoints of a training run: weights, optimizer and step. A resumed run continues bit for bit.

Random state is not stored: the random numbers of a step depend only on the seed and the step. A folder gets its final
name once it is complete; then the previous checkpoint is deleted.
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
    tensors: dict[str, Tensor] = {}
    for prefix, network in networks.items():
        tensors |= {f"{prefix}.{name}": p.detach() for name, p in network.named_parameters() if p.requires_grad}
        tensors |= {f"{prefix}.{name}": buffer for name, buffer in network.named_buffers()}
    return tensors


@dataclass(frozen=True)
class TrainingCheckpoints:
    """Checkpoints in the output folder of a run."""

    folder: Path

    def find_latest(self) -> Path | None:
        candidates = [
            path for path in self.folder.glob(f"{FOLDER_PREFIX}*") if path.name.removeprefix(FOLDER_PREFIX).isdigit()
        ]
        return max(candidates, key=lambda path: int(path.name.removeprefix(FOLDER_PREFIX)), default=None)

    def save(
        self, step: int, networks: Mapping[str, nn.Module], optimizer: GroupedOptimizer, metadata: dict[str, Any]
    ) -> None:
        """Write a checkpoint and delete the previous one, which stays if the disk is full.

        Args:
            step: Number of completed steps.
            networks: Trained networks by name.
            optimizer: Optimizer of the networks.
            metadata: Further state of the caller, as JSON.

        Raises:
            ForedraftError: if the checkpoint cannot be written.
        """
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
        if final.exists():  # this step was saved already, just before the run stopped
            shutil.rmtree(final)
        partial.rename(final)
        for path in old:
            if path != final:
                shutil.rmtree(path, ignore_errors=True)

    def _describe_restart(self) -> str:
        latest = self.find_latest()
        return "from the beginning" if latest is None else f"from {latest.name}"

    def load(self, path: Path, networks: Mapping[str, nn.Module], optimizer: GroupedOptimizer) -> dict[str, Any]:
        """Restore what `save` wrote.

        Returns:
            The metadata, with the key `step`.

        Raises:
            ForedraftError: if the checkpoint is damaged or of another drafter.
        """
        current = collect_tensors(networks)
        try:
            state: dict[str, Any] = json.loads((path / "state.json").read_text())
            weights = load_file(path / "weights.safetensors")
            saved = torch.load(path / "optimizer.pt", weights_only=True, map_location="cpu")
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise ForedraftError(f"the checkpoint {path} is damaged ({error}); delete it to begin again") from None
        if weights.keys() != current.keys() or any(weights[name].shape != current[name].shape for name in current):
            raise ForedraftError(f"the checkpoint {path} is of another drafter; give another --out")
        with torch.no_grad():
            for name, tensor in current.items():
                tensor.copy_(weights[name])
        optimizer.load_state_dict(saved)
        return state
