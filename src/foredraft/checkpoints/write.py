"""A drafter as a folder that `read` and the engines load: what the trainer leaves behind."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from foredraft.checkpoints.disk import convert_write_errors, replace_text
from foredraft.checkpoints.layouts import CheckpointLayout, make_layout
from foredraft.checkpoints.schema import DrafterShape
from foredraft.errors import ForedraftError


def write(
    folder: str | Path,
    method: str,
    shape: DrafterShape,
    tensors: Mapping[str, Tensor],
    config_extra: Mapping[str, Any] | None = None,
) -> None:
    """Tensors under the names of `base` into the published layout; `config_extra` adds to config.json, no more."""
    made = make_layout(shape, tensors)
    if made.method != method:
        raise ForedraftError(f"{type(shape).__name__} is the shape of a {made.method} drafter, not of {method}")
    save(folder, made, config_extra)


def save(
    folder: str | Path,
    layout: CheckpointLayout,
    config_extra: Mapping[str, Any] | None = None,
    hint: str = "make room and try again",
) -> None:
    """Both files appear whole or not at all, the config last: a folder with a config has its weights.

    then: what to do where the disk is full. Raises ForedraftError.
    """
    place = Path(folder)
    weights = place / f".{layout.file}.part"
    with convert_write_errors(place, hint):
        try:
            place.mkdir(parents=True, exist_ok=True)
            _write_files(place, weights, layout, config_extra or {})
        finally:
            weights.unlink(missing_ok=True)


def _write_files(folder: Path, weights: Path, layout: CheckpointLayout, config_extra: Mapping[str, Any]) -> None:
    dtype = next(value.dtype for value in layout.tensors.values() if value.is_floating_point())
    said = str(dtype).removeprefix("torch.")
    config = {**config_extra, **layout.config, "dtype": said, "torch_dtype": said}
    if layout.file.endswith(".pt"):  # what some authors' own code opens
        torch.save(_separate_tensors(layout.tensors), weights)
    else:
        save_file(_separate_tensors(layout.tensors), weights, {"format": "pt"})
    os.replace(weights, folder / layout.file)
    replace_text(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")


def _separate_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, contiguous, and no two over the same memory, which the format forbids."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        held = tensor.detach().to("cpu").contiguous()
        if held.untyped_storage().data_ptr() in seen or held.untyped_storage().nbytes() != held.nbytes:
            held = held.clone(memory_format=torch.contiguous_format)
        seen.add(held.untyped_storage().data_ptr())
        found[name] = held
    return found
