"""What followed what in one growing text, and the hashes that name a context. Knows no table and no request."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_MASK = (1 << 64) - 1
PRIME = 0x9E3779B97F4A7C15  # odd, so a step is a bijection of the hash of the shorter context
EMPTY = 0x2545F4914F6CDD1D  # the hash of the empty context


def suffix_hashes(tokens: Sequence[int], longest: int) -> list[int]:
    """[n]: 64-bit hash of the last n tokens, for n = 0 .. min(longest, len(tokens))."""
    state, result = EMPTY, [EMPTY]
    for token in tokens[: -longest - 1 : -1]:
        state = ((state ^ (token + 1)) * PRIME) & _MASK
        state ^= state >> 29
        result.append(state)
    return result


@dataclass(eq=False)
class Counts:
    """What followed what in one growing text: absolute discounting over contexts of every length below `order`.

    A token seen again after a context is not counted in the shorter ones (the update exclusion of PPM, Moffat 1990).
    Without any context the text's own counts stand against `base_weight` counts of the table's base.
    """

    vocab_size: int
    order: int
    discount: float
    base_weight: float
    tokens: list[int] = field(default_factory=list)
    # hash of a context -> counts of what followed; while that is one token once, the token alone: most contexts stay so
    _after: dict[int, int | dict[int, int]] = field(default_factory=dict)
    _bare: Floats = field(init=False)  # [V] counts after the empty context
    _num_bare: int = 0

    def __post_init__(self) -> None:
        self._bare = np.zeros(self.vocab_size)
        self._base: Floats | None = None  # the last answer of `base`, until a count changes

    def extend(self, tokens: Sequence[int]) -> None:
        """Learn from the text's next tokens: O(order) for each."""
        self._base = None if tokens else self._base
        for token in tokens:
            self._add(suffix_hashes(self.tokens, self.order - 1), token)
            self.tokens.append(token)

    def _add(self, hashes: list[int], token: int) -> None:
        for context in hashes[:0:-1]:
            after = self._after.get(context)
            if after is None:
                self._after[context] = token
                continue
            if isinstance(after, int):
                after = self._after[context] = {after: 1}
            is_known = token in after
            after[token] = after.get(token, 0) + 1
            if is_known:
                return
        self._bare[token] += 1
        self._num_bare += 1

    def after(self, context: int) -> dict[int, int] | None:
        """Counts of the tokens after a context, by its hash; None if it was not seen."""
        after = self._after.get(context)
        return {after: 1} if isinstance(after, int) else after

    def base(self, base: Floats) -> Floats:
        """[V] the law after the empty context, given the table's, which is always the same one."""
        if self._base is None:
            self._base = (base * self.base_weight + self._bare) / (self.base_weight + self._num_bare)
        return self._base


class Sparse:
    """Weighted counts of several contexts, added to a dense law at once."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.counts: list[int] = []
        self.sizes: list[int] = []
        self.weights: list[float] = []

    def add(self, after: dict[int, int], weight: float) -> None:
        self.tokens.extend(after)
        self.counts.extend(after.values())
        self.sizes.append(len(after))
        self.weights.append(weight)

    def add_to(self, q: Floats, discount: float) -> None:
        if self.tokens:
            np.add.at(q, self.tokens, (np.array(self.counts) - discount) * np.repeat(self.weights, self.sizes))
