"""Content of a drafter's folder before it is written, and the check of its tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class CheckpointLayout:
    """Content of a checkpoint folder that is not written yet."""

    method: str
    tensors: dict[str, Tensor]
    config: dict[str, Any]
    file: str = "model.safetensors"


def check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Check that the tensors are exactly those of a shape; a mismatch is a programming error, not a user error.

    Args:
        tensors: Weights by internal name.
        expected: Sizes by internal name, as tuples or `ExpectedTensor`.
        prefix: Start of the stored names.

    Returns:
        The tensors by stored name.

    Raises:
        ValueError: if a tensor is missing, left over or misshaped.
    """
    if tensors.keys() != expected.keys():
        raise ValueError(f"tensors {sorted(tensors.keys() ^ expected.keys())} do not fit the drafter's shape")
    for name, tensor_shape in expected.items():
        size = tuple(getattr(tensor_shape, "shape", tensor_shape))
        if tuple(tensors[name].shape) != size:
            raise ValueError(f"{name} is {list(tensors[name].shape)} and has to be {list(size)}")
    return {prefix + name: tensor for name, tensor in tensors.items()}
