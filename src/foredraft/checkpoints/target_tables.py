"""A target whose layers stay on the disk: embedding, final norm and head are loaded, the rest is on device meta.

A drafter is trained with these tables alone, if another process computes the hidden states.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from foredraft.checkpoints.tensors import TensorFiles, open_tensors
from foredraft.errors import ForedraftError
from foredraft.files import hub
from foredraft.models.folder import build_on_meta
from foredraft.models.loading import parse_dtype
from foredraft.models.truncated_modules import find_final_norm

GENERATION_FILE = "generation_config.json"


def load_tables(name: str, dtype: str | torch.dtype, device: torch.device) -> Any:
    """Load the tables of a causal LM.

    Args:
        name: model folder or hub id.
        dtype: dtype of the tables or its name; "auto" = as stored.
        device: device of the tables.

    Returns:
        A transformers model that cannot run: the weights of its layers are on device meta.

    Raises:
        ForedraftError: the model is no causal LM, or its tables are not found.
    """
    folder = hub.find_folder(name)
    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    if config.is_encoder_decoder:
        raise ForedraftError(f"{name} is an encoder-decoder model, whose states no server sends; give a causal LM")
    model = build_on_meta(AutoModelForCausalLM, config)
    model.tie_weights()
    if (folder / GENERATION_FILE).exists():
        model.generation_config = GenerationConfig.from_pretrained(str(folder))
    files = open_tensors(Path(folder), name)
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    for module, attribute, key in _list_tables(model, is_tied):
        tensor = _read(files, key, model.base_model_prefix)
        chosen = tensor.to(device, parse_dtype(dtype) or tensor.dtype)
        setattr(module, attribute, nn.Parameter(chosen, requires_grad=False))
    if is_tied:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    return model.eval()


def _list_tables(model: Any, is_tied: bool) -> Iterator[tuple[nn.Module, str, str]]:
    """List (module, attribute, name) of every parameter outside of the layers that a drafter may read."""
    modules = [model.get_input_embeddings(), find_final_norm(model)]
    modules += [] if is_tied else [model.get_output_embeddings()]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in modules:
        for attribute, parameter in [] if module is None else list(module.named_parameters(recurse=False)):
            yield module, attribute, names[id(parameter)]


def _read(files: TensorFiles, key: str, prefix: str) -> torch.Tensor:
    """Read a tensor, whose stored name may lack the prefix of the base model."""
    for name in (key, key.removeprefix(f"{prefix}."), f"{prefix}.{key}"):
        if name in files.stored_tensors:
            return files.read([name])[name]
    raise files.refuse(f"it has no tensor {key}; its tables cannot be loaded alone")
