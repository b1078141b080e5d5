"""A LoRA adapter in memory, in the form in which the passes of its model apply it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from foredraft.kernels.low_rank import LowRankLayers

LowRankProduct = Callable[
    [Tensor], Tensor
]  # input rows [T, k] of a module -> what the adapter adds to its output [T, n]


@dataclass(frozen=True, eq=False)  # compared by identity
class LoadedAdapter:
    """Adapter of one model. A request keeps a reference, so it may be removed from its model while requests run."""

    name: str
    key: bytes  # random: part of the salt of its requests' prefix pages
    num_bytes: int  # of its matrices
    native: LowRankLayers | None = field(default=None, repr=False)  # for a model that runs as native code
    modules: Mapping[str, LowRankProduct] = field(default_factory=dict, repr=False)  # otherwise, by path of the module
