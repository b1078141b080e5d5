"""Folders of LoRA adapters with random matrices, and models with an adapter added to their weights."""

import copy
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")


def write_adapter(
    folder: Path,
    model: Any,
    modules: Sequence[str] = ALL,
    rank: int = 4,
    seed: int = 0,
    std: float = 0.1,
    **config: Any,
) -> Path:
    """Write an adapter for the linear modules of a model whose paths end with these names.

    Args:
        folder: folder to make.
        model: transformers model.
        modules: last parts of the paths; those that the model lacks are left out.
        rank: rank of the matrices.
        seed: of the random numbers.
        std: of matrix B; large enough to change outputs.
        config: further fields of adapter_config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        if type(module) in (nn.Linear, Conv1D) and path.rpartition(".")[2] in modules:
            n, k = module.weight.T.shape if type(module) is Conv1D else module.weight.shape
            tensors[f"base_model.model.{path}.lora_A.weight"] = torch.randn(rank, k, generator=generator) / k**0.5
            tensors[f"base_model.model.{path}.lora_B.weight"] = torch.randn(n, rank, generator=generator) * std
    assert tensors, "no module of the model has one of these names"
    found = sorted({re.split(r"\.lora_", name)[0].rpartition(".")[2] for name in tensors})
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": found, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merge_adapter(model: Any, folder: Path) -> Any:
    """Copy a model with the product of an adapter's matrices added to its weights: scale = alpha / r."""
    merged = copy.deepcopy(model)
    tensors = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    with torch.no_grad():
        for name, a in tensors.items():
            if ".lora_A." not in name:
                continue
            b = tensors[name.replace(".lora_A.", ".lora_B.")]
            change = config["lora_alpha"] / config["r"] * (b.double() @ a.double())
            module = merged.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            module.weight += (change.T if isinstance(module, Conv1D) else change).to(module.weight.dtype)
    return merged
