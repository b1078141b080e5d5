"""Images in a pass through transformers' modules: rows in place of embeddings, and states added after layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from foredraft.models.hidden_states import find_decoder_layers
from foredraft.models.pass_images import PassImages


def make_input(model: Any, tokens: Tensor, images: PassImages | None) -> dict[str, Tensor]:
    """Return the argument of a model with the token ids of a pass, or with its embeddings [1, T, H] if it has images.

    Args:
        model: transformers model.
        tokens: token ids [1, T].
        images: rows of images of the pass; None = no request has images there.
    """
    if images is None:
        return {"input_ids": tokens}
    embeddings = model.get_input_embeddings()(tokens)
    rows = images.find_rows(embeddings.device)
    return {"inputs_embeds": embeddings.index_copy(1, rows, images.states[None].to(embeddings))}


@contextmanager
def add_layer_states(model: Any, images: PassImages | None) -> Iterator[None]:
    """Add states of images to the residual stream after the first layers, while the context is open."""
    if images is None or not images.layer_states or not len(images.states):
        yield
        return
    layers = find_decoder_layers(model)
    handles = [
        layers[i].register_forward_hook(partial(_add_states, images, states))
        for i, states in enumerate(images.layer_states)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _add_states(images: PassImages, states: Tensor, _module: nn.Module, _inputs: Any, output: Any) -> Any:
    hidden = output if isinstance(output, Tensor) else output[0]
    changed = hidden.index_add(1, images.find_rows(hidden.device), states[None].to(hidden))
    return changed if isinstance(output, Tensor) else (changed, *output[1:])
