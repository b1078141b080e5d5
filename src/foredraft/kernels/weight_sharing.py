"""Packed weights that several models share: a weight with equal numbers is stored once."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foredraft.kernels.arena import Arena
from foredraft.kernels.linear import PackedWeight
from foredraft.kernels.quantize import PackWeight

KEY_NUMBERS = 32  # numbers at the start of a weight that are looked up, before whole weights are compared

WeightKey = tuple[int, int, int, int, tuple[float, ...]]  # n, k, kind, group, and the first numbers


@dataclass(frozen=True)
class WeightIndex:
    """Packed weights of a loaded model, found by their numbers."""

    by_key: Mapping[WeightKey, Sequence[PackedWeight]]

    @classmethod
    def from_weights(cls, weights: Iterable[PackedWeight]) -> "WeightIndex":
        by_key: dict[WeightKey, list[PackedWeight]] = defaultdict(list)
        for weight in weights:
            by_key[_make_key(weight)].append(weight)
        return cls(dict(by_key))

    def find(self, weight: PackedWeight) -> PackedWeight | None:
        """Return the weight of the index that equals `weight`; None if there is none."""
        return next((other for other in self.by_key.get(_make_key(weight), ()) if _is_equal(weight, other)), None)

    def share(self, pack: PackWeight) -> PackWeight:
        """Return a function that packs as `pack` does, and returns the weight of the index if it has an equal one."""

        def pack_or_share(weight: Tensor, bias: Tensor | None, arena: Arena) -> PackedWeight:
            # A weight that is not kept would stay in the mapping of `arena`, so each is packed in memory of its own.
            packed = pack(weight, bias, Arena())
            return self.find(packed) or replace(packed, data=arena.copy(packed.data))

        return pack_or_share


def _make_key(weight: PackedWeight) -> WeightKey:
    return weight.n, weight.k, weight.kind, weight.group, tuple(weight.data.flatten()[:KEY_NUMBERS].tolist())


def _is_equal(a: PackedWeight, b: PackedWeight) -> bool:
    return torch.equal(a.data, b.data) and _is_equal_or_none(a.bias, b.bias) and _is_equal_or_none(a.scale, b.scale)


def _is_equal_or_none(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))
