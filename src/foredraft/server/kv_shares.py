"""Shares of the models of one server in the memory for KV caches."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from foredraft.errors import ForedraftError


@dataclass(frozen=True)
class KVShare:
    """KV memory of one model."""

    num_bytes: int | None = None  # None = the default size times `share`
    share: float = 1.0  # of the default size, above 0 and at most 1


@dataclass
class KVShares:
    """KV memory of all models, divided by their weights. Used by one thread at a time.

    A model keeps its share until it is unloaded: the engine sizes its memory once. With a total, a model that is loaded
    later gets its share by weight, but at most what is free.
    """

    total: int | None  # bytes; None = the default share of the free memory, measured when a model is loaded
    _weights: dict[str, float] = field(default_factory=dict)  # by model
    _bytes: dict[str, int] = field(default_factory=dict)  # by model, if there is a total

    def divide(self, weights: Mapping[str, float]) -> dict[str, KVShare]:
        """Give the first models their shares, which add up to the total.

        Args:
            weights: weight by model; all are above 0.
        """
        sum_weights = sum(weights.values())
        return {name: self._assign(name, weight, sum_weights, None) for name, weight in weights.items()}

    def assign(self, name: str, weight: float, num_bytes: int | None = None) -> KVShare:
        """Give a further model its share.

        Args:
            name: name of the model.
            weight: its weight, above 0.
            num_bytes: memory of the model beside the total. Default None = a share of it.

        Raises:
            ForedraftError: nothing of the total is free.
        """
        if self.total is not None and num_bytes is None and self.num_free == 0:
            raise ForedraftError(
                "all of --kv-memory is shared out; unload a model first, or give the new one kv_memory of its own"
            )
        return self._assign(name, weight, weight + sum(self._weights.values()), num_bytes)

    def release(self, name: str) -> None:
        """Take back the share of a model; nothing happens without one."""
        self._weights.pop(name, None)
        self._bytes.pop(name, None)

    @property
    def num_free(self) -> int:
        """Bytes of the total that no model has; 0 without a total."""
        return 0 if self.total is None else max(self.total - sum(self._bytes.values()), 0)

    def _assign(self, name: str, weight: float, sum_weights: float, num_bytes: int | None) -> KVShare:
        if num_bytes is not None:  # outside the total, so it has no part in the weights either
            return KVShare(num_bytes)
        self._weights[name] = weight
        share = weight / sum_weights
        if self.total is None:
            return KVShare(share=share)
        self._bytes[name] = min(math.ceil(self.total * share), self.num_free)  # rounded up, so that no rest stays free
        return KVShare(self._bytes[name])
