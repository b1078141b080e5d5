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

from foredraft.errors import ForedraftError
from foredraft.files.disk import convert_write_errors
from foredraft.train.optimizer import SavedOptimizer
from foredraft.train.sharded_tensors import shard_like

FOLDER_PREFIX = "checkpoint-"
STATE_FILE = "state.json"
WEIGHTS_FILE = "weights.safetensors"
OPTIMIZER_FILE = "optimizer.pt"


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
    prefix: str = FOLDER_PREFIX  # of the names of the checkpoints' folders; the step follows

    def find_latest(self) -> Path | None:
        steps = [path.name.removeprefix(self.prefix) for path in self.folder.glob(f"{self.prefix}*")]
        latest = max((int(step) for step in steps if step.isdigit()), default=None)
        return None if latest is None else self.folder / f"{self.prefix}{latest}"

    def save(
        self, step: int, networks: Mapping[str, nn.Module], optimizer_state: Any, metadata: dict[str, Any]
    ) -> None:
        """Write a checkpoint and delete the previous one, which stays if the disk is full.

        Args:
            step: Number of completed steps.
            networks: Trained networks by name.
            optimizer_state: `state_dict` of the optimizer.
            metadata: Further state of the caller, as JSON.

        Raises:
            ForedraftError: if the checkpoint cannot be written.
        """
        final = self.folder / f"{self.prefix}{step}"
        partial = final.with_name(f"{final.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        tensors = {name: tensor.cpu().contiguous().clone() for name, tensor in collect_tensors(networks).items()}
        try:
            with convert_write_errors(
                self.folder, f"make room, and the same command goes on {self._describe_restart()}"
            ):
                partial.mkdir(parents=True)
                save_file(tensors, partial / WEIGHTS_FILE)
                torch.save(optimizer_state, partial / OPTIMIZER_FILE)
                (partial / STATE_FILE).write_text(json.dumps({"step": step, **metadata}, indent=1) + "\n")
        except ForedraftError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        old = [path for path in self.folder.glob(f"{self.prefix}*") if path != partial]
        if final.exists():  # this step was saved already, just before the run stopped
            shutil.rmtree(final)
        partial.rename(final)
        for path in old:
            if path != final:
                shutil.rmtree(path, ignore_errors=True)

    def _describe_restart(self) -> str:
        latest = self.find_latest()
        return "from the beginning" if latest is None else f"from {latest.name}"

    def read_state(self, path: Path) -> dict[str, Any]:
        """Return the metadata of a checkpoint, with the key `step`. Raises ForedraftError if it is damaged."""
        try:
            return json.loads((path / STATE_FILE).read_text())  # type: ignore[no-any-return]
        except (OSError, ValueError) as error:
            raise _describe_damage(path, error) from None

    def delete(self) -> None:
        """Delete all checkpoints, when the run is done."""
        for path in self.folder.glob(f"{self.prefix}*"):
            shutil.rmtree(path)

    def load(self, path: Path, networks: Mapping[str, nn.Module], optimizer: SavedOptimizer) -> dict[str, Any]:
        """Restore what `save` wrote.

        Returns:
            The metadata, with the key `step`.

        Raises:
            ForedraftError: if the checkpoint is damaged or of other networks.
        """
        state = self.load_weights(path, networks)
        self.load_optimizer(path, optimizer)
        return state

    def has_optimizer(self, path: Path) -> bool:
        """Return whether a checkpoint stores its optimizer. A copy without it is a fifth of the size."""
        return (path / OPTIMIZER_FILE).exists()

    def load_optimizer(self, path: Path, optimizer: SavedOptimizer) -> None:
        """Restore the optimizer that `save` wrote. Raises ForedraftError if it is damaged."""
        try:
            saved = torch.load(path / OPTIMIZER_FILE, weights_only=True, map_location="cpu")
        except (OSError, ValueError, RuntimeError) as error:
            raise _describe_damage(path, error) from None
        optimizer.load_state_dict(saved)

    def load_weights(self, path: Path, networks: Mapping[str, nn.Module]) -> dict[str, Any]:
        """Restore the networks that `save` wrote, but not their optimizer.

        Returns:
            The metadata, with the key `step`.

        Raises:
            ForedraftError: if the checkpoint is damaged or of other networks.
        """
        current = collect_tensors(networks)
        try:
            state = self.read_state(path)
            weights = load_file(path / WEIGHTS_FILE)
        except (OSError, ValueError, SafetensorError) as error:
            raise _describe_damage(path, error) from None
        if weights.keys() != current.keys() or any(weights[name].shape != current[name].shape for name in current):
            raise ForedraftError(f"the checkpoint {path} is of another model or drafter; give another --out")
        with torch.no_grad():
            for name, tensor in current.items():
                tensor.copy_(shard_like(weights[name], tensor))
        return state


def _describe_damage(path: Path, error: Exception) -> ForedraftError:
    return ForedraftError(f"the checkpoint {path} is damaged ({error}); delete it to begin again")
