"""Tensors of which every process has a part, and whole ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def shard_like(whole: Tensor, example: Tensor) -> Tensor:
    """Return this process's part of a tensor, without communication.

    Args:
        whole: tensor that every process has.
        example: tensor of the same shape, sharded or whole.

    Returns:
        `whole`, sharded as the example is.
    """
    if not isinstance(example, DTensor):
        return whole
    return distribute_tensor(
        whole.to(example.device, example.dtype), example.device_mesh, example.placements, src_data_rank=None
    )


def gather_tensors(state: Any) -> Any:
    """Replace every sharded tensor in nested dicts and lists by the whole one. All processes call this together."""
    if isinstance(state, dict):
        return {key: gather_tensors(value) for key, value in state.items()}
    if isinstance(state, list):
        return [gather_tensors(value) for value in state]
    return state.full_tensor() if isinstance(state, DTensor) else state


@contextmanager
def use_whole_parameters(module: nn.Module) -> Iterator[None]:
    """Replace the sharded parameters of a module by whole ones within a block. All processes enter it together."""
    places: list[tuple[dict[str, Any], str, Any]] = [
        (owner._parameters, name, part)
        for owner in module.modules()
        for name, part in owner._parameters.items()
        if isinstance(part, DTensor)
    ]
    parts = {id(part): part for _, _, part in places}  # tied parameters have several places
    whole = {key: nn.Parameter(part.full_tensor(), part.requires_grad) for key, part in parts.items()}
    for parameters, name, part in places:
        parameters[name] = whole[id(part)]
    try:
        yield
    finally:
        for parameters, name, part in places:
            parameters[name] = part
