"""Writer of a drafter as a folder that `read` and the engines load; the trainer uses it."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from foredraft.checkpoints.layouts import CheckpointLayout
from foredraft.files.disk import convert_write_errors, replace_text


def save(
    folder: str | Path,
    layout: CheckpointLayout,
    config_extra: Mapping[str, Any] | None = None,
    hint: str = "make room and try again",
) -> None:
    """Write weights and config.json, each whole or not at all.

    config.json is written last, so a folder with a config.json has its weights.

    Args:
        folder: Folder to write to.
        layout: Tensors, config and file name.
        config_extra: Further entries of config.json; they do not override the layout's.
        hint: How to continue if the disk is full.

    Raises:
        ForedraftError: if the folder cannot be written.
    """
    path = Path(folder)
    weights = path / f".{layout.file}.part"
    with convert_write_errors(path, hint):
        try:
            path.mkdir(parents=True, exist_ok=True)
            _write_files(path, weights, layout, config_extra or {})
        finally:
            weights.unlink(missing_ok=True)


def _write_files(folder: Path, weights: Path, layout: CheckpointLayout, config_extra: Mapping[str, Any]) -> None:
    dtype = next(value.dtype for value in layout.tensors.values() if value.is_floating_point())
    dtype_name = str(dtype).removeprefix("torch.")
    config = {**config_extra, **layout.config, "dtype": dtype_name, "torch_dtype": dtype_name}
    if layout.file.endswith(".pt"):  # the code of some authors opens only this format
        torch.save(_separate_tensors(layout.tensors), weights)
    else:
        save_file(_separate_tensors(layout.tensors), weights, {"format": "pt"})
    os.replace(weights, folder / layout.file)
    replace_text(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")


def _separate_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Move tensors to the CPU, contiguous, with no shared memory, which safetensors forbids."""
    storages: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        copy = tensor.detach().to("cpu").contiguous()
        if copy.untyped_storage().data_ptr() in storages or copy.untyped_storage().nbytes() != copy.nbytes:
            copy = copy.clone(memory_format=torch.contiguous_format)
        storages.add(copy.untyped_storage().data_ptr())
        separate[name] = copy
    return separate
