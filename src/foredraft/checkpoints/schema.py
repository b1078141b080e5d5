"""Checkpoint of a drafter after reading: weights under internal names, and the shape that documents them."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class TargetInfo:
    """Sizes of the target that a drafter is checked against."""

    name: str
    hidden: int
    vocab_size: int
    num_layers: int


@dataclass(frozen=True)
class Checkpoint:
    """Weights of a drafter, under the names that its shape's class documents."""

    method: str
    format: str  # name of the layout, for messages
    folder: str
    shape: Any  # frozen dataclass of the method, in its folder
    tensors: dict[str, Tensor]
    config: dict[str, Any] = field(default_factory=dict)  # config.json as on disk
