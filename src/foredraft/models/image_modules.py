"""Images in a pass through transformers' modules: rows in place of embeddings, and states added after layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from foredraft.models.hidden_states import find_decoder_layers
from foredraft.models.pass_images import PassImages


@contextmanager
def place_images(model: Any, images: PassImages | None) -> Iterator[None]:
    """Put states of images into the input of a model's decoder and after its first layers, while the context is open.

    The model itself makes embeddings, and whatever else its layers read, of the token ids. Its placeholders may have
    others than the embedding matrix has, in prompts as in outputs.

    Args:
        model: transformers model.
        images: rows of images of the pass; None = no request has images there.
    """
    if images is None or not len(images.states):
        yield
        return
    layers = find_decoder_layers(model)
    handles = [
        layers[i].register_forward_hook(partial(_add_states, images, states))
        for i, states in enumerate(images.layer_states)
    ]
    handles.append(model.get_decoder().register_forward_pre_hook(partial(_replace_rows, images), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _replace_rows(images: PassImages, _module: nn.Module, args: Any, inputs: dict[str, Any]) -> Any:
    embeddings = inputs["inputs_embeds"]  # [1, T, H]
    rows = images.find_rows(embeddings.device)
    changed = embeddings.index_copy(1, rows, images.states[None].to(embeddings))
    return args, inputs | {"inputs_embeds": changed}


def _add_states(images: PassImages, states: Tensor, _module: nn.Module, _inputs: Any, output: Any) -> Any:
    hidden = output if isinstance(output, Tensor) else output[0]
    changed = hidden.index_add(1, images.find_rows(hidden.device), states[None].to(hidden))
    return changed if isinstance(output, Tensor) else (changed, *output[1:])
