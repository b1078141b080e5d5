"""Checkpoint of a drafter after reading: weights under internal names, and the shape that documents them."""

from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from foredraft.errors import ForedraftError

S = TypeVar("S")


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

    def require_shape(self, kind: type[S], title: str, hint: str = "") -> S:
        """Return the shape if it is of this class.

        Args:
            kind: Class of the shapes of a method.
            title: Name of the method's drafters without article, such as "EAGLE head".
            hint: End of the message.

        Raises:
            ForedraftError: for a checkpoint of another method.
        """
        if not isinstance(self.shape, kind):
            raise ForedraftError(f"{self.folder} holds no {title} but {self.format}{hint}")
        return self.shape
