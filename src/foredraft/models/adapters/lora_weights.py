"""Matrices of a LoRA adapter in PEFT's format."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.files.file_checks import read_json
from foredraft.models.adapters.lora_config import MERGE, LoraConfig
from foredraft.models.lora import CONFIG_FILE, WEIGHTS_FILE, check_lora_folder

PREFIX = "base_model.model."  # of PEFT's names
A_NAME, B_NAME = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True)
class LoraMatrices:
    """Change of one linear module: y += B (A x)."""

    a: Tensor  # [rank, k]
    b: Tensor  # [n, rank] float32, with the adapter's scale


@dataclass(frozen=True)
class LinearShape:
    """A linear module of a model."""

    path: str
    n: int  # outputs
    k: int  # inputs


def read_lora(
    folder: str | Path, linears: Sequence[LinearShape], head: str | None, dtype: torch.dtype, model_name: str
) -> dict[str, LoraMatrices]:
    """Read the matrices of an adapter by the paths of the modules that it changes.

    Args:
        folder: folder of the adapter.
        linears: linear modules of the model.
        head: path of the output matrix, or None.
        dtype: dtype of the matrices A: that of the model.
        model_name: name of the model in errors.

    Raises:
        ForedraftError: the folder holds no LoRA adapter, or one of another model, or one that changes more than linear
            modules.
    """
    path, name = check_lora_folder(folder), str(folder)
    config = LoraConfig.parse(read_json(path / CONFIG_FILE, name, "an adapter"), name)
    try:
        stored = load_file(path / WEIGHTS_FILE)
    except (SafetensorError, OSError) as error:
        raise ForedraftError(f"{name}: {WEIGHTS_FILE} cannot be read ({error}); fetch it again") from None
    shapes = {linear.path: linear for linear in linears}
    chosen = config.choose(shapes, head)
    if not chosen:
        raise ForedraftError(
            f"the adapter {name} does not fit {model_name} (no linear layer matches its target_modules); give that of "
            "this model"
        )
    if head in chosen:
        raise ForedraftError(f"the adapter {name} changes the output matrix {head}, which all requests share; {MERGE}")
    _check_names(stored, chosen, name, model_name)
    return {key: _read_module(stored, shapes[key], config, dtype, name, model_name) for key in chosen}


def _check_names(stored: dict[str, Tensor], chosen: Sequence[str], name: str, model_name: str) -> None:
    """Raise ForedraftError for tensors that are missing or left over."""
    expected = {f"{PREFIX}{path}{end}" for path in chosen for end in (A_NAME, B_NAME)}
    if missing := sorted(expected - set(stored)):
        raise ForedraftError(
            f"the adapter {name} lacks weights that its {CONFIG_FILE} names, such as {missing[0]}; fetch it again"
        )
    if unused := sorted(set(stored) - expected):
        raise ForedraftError(
            f"the adapter {name} has weights such as {unused[0]} that are not of a linear layer of {model_name}, or "
            f"that its {CONFIG_FILE} does not name; give the adapter of this model, or {MERGE}"
        )


def _read_module(
    stored: dict[str, Tensor], shape: LinearShape, config: LoraConfig, dtype: torch.dtype, name: str, model_name: str
) -> LoraMatrices:
    """Read the matrices of one module."""
    a, b = stored[f"{PREFIX}{shape.path}{A_NAME}"], stored[f"{PREFIX}{shape.path}{B_NAME}"]
    rank = config.find_rank(shape.path)
    expected = [(rank, shape.k), (shape.n, rank)]
    if [tuple(a.shape), tuple(b.shape)] != expected:
        raise ForedraftError(
            f"the adapter {name} does not fit {model_name} ({shape.path} has matrices of {list(a.shape)} and "
            f"{list(b.shape)}, and needs {list(expected[0])} and {list(expected[1])}); give that of this model"
        )
    if not bool(a.isfinite().all() and b.isfinite().all()):
        raise ForedraftError(f"the adapter {name} has NaN or infinite weights in {shape.path}; fetch it again")
    wide = torch.promote_types(dtype, torch.float32)
    return LoraMatrices(a.to(dtype), b.to(wide) * config.find_scale(shape.path))
