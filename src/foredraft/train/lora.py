"""LoRA on a model in training, with the library peft. The model keeps its class; its linear layers are wrapped."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from foredraft.drafters.joint_training import LoraAdapters, make_missing_peft_error
from foredraft.errors import ForedraftError
from foredraft.models.hidden_states import find_decoder_layers

ADAPTER = "default"  # peft's name of the adapter


def add_adapters(model: Any, lora: LoraAdapters, name: str) -> None:
    """Wrap linear layers of a model in place. Afterwards only the adapters take gradients; they change no output yet.

    Args:
        model: transformers model.
        lora: size and place of the adapters.
        name: name of the model, for errors.

    Raises:
        ForedraftError: if peft is missing, or the model has none of the layers.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise make_missing_peft_error() from None
    names = _find_linear_layers(model, lora, name)
    # Conv1D, a linear layer of GPT-2, has the transposed matrix.
    is_transposed = isinstance(model.get_submodule(names[0]), Conv1D)
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=names, fan_in_fan_out=is_transposed)
    inject_adapter_in_model(config, model, ADAPTER)


def _find_linear_layers(model: Any, lora: LoraAdapters, name: str) -> list[str]:
    """Find the layers to adapt, by full name. Embeddings and the output matrix are in no decoder layer and stay."""
    layers = find_decoder_layers(model)
    (prefix,) = (key for key, module in model.named_modules() if module is layers)
    found = [key for key, module in layers.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    kinds = sorted({key.rpartition(".")[2] for key in found})
    for kind in kinds if lora.modules is None else lora.modules:
        if kind not in kinds:
            raise ForedraftError(
                f"lora_modules: no linear layer in the decoder layers of {name} is named {kind!r}; they have: "
                f"{', '.join(kinds)}"
            )
    if not found:
        raise ForedraftError(f"the decoder layers of {name} have no linear layers for LoRA; leave lora_rank out")
    return [f"{prefix}.{key}" for key in found if lora.modules is None or key.rpartition(".")[2] in lora.modules]


@torch.no_grad()
def merge_adapters(model: Any) -> dict[nn.Module, tuple[nn.Module, Tensor]]:
    """Return the wrapped layers of a model with their original layer and the merged matrix in float32.

    The model is not changed.
    """
    from peft.tuners.lora import LoraLayer

    merged = {}
    for module in model.modules():
        if isinstance(module, LoraLayer):
            original = module.get_base_layer()
            merged[module] = original, original.weight.float() + module.get_delta_weight(ADAPTER).float()
    return merged
