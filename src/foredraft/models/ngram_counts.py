"""Successor counts in one growing sequence, and the hashes of contexts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_MASK = (1 << 64) - 1
PRIME = 0x9E3779B97F4A7C15  # odd, so a step is a bijection of the hash of the shorter context
EMPTY_HASH = 0x2545F4914F6CDD1D  # the hash of the empty context


def hash_suffixes(tokens: Sequence[int], max_length: int) -> list[int]:
    """[n]: 64-bit hash of the last n tokens, for n = 0 .. min(longest, len(tokens))."""
    state, result = EMPTY_HASH, [EMPTY_HASH]
    for token in tokens[: -max_length - 1 : -1]:
        state = ((state ^ (token + 1)) * PRIME) & _MASK
        state ^= state >> 29
        result.append(state)
    return result


@dataclass(eq=False)
class SequenceCounts:
    """Successor counts of one growing sequence: absolute discounting over contexts of every length below `order`.

    A token seen again after a context is not counted in the shorter ones (the update exclusion of PPM, Moffat 1990).
    Without any context the text's own counts stand against `base_weight` counts of the table's base.
    """

    vocab_size: int
    order: int
    discount: float
    base_weight: float
    tokens: list[int] = field(default_factory=list)
    # hash of a context -> counts of what followed; while that is one token once, the token alone: most contexts stay so
    _followers: dict[int, int | dict[int, int]] = field(default_factory=dict)
    _unigram_counts: Floats = field(init=False)  # [V] counts after the empty context
    _num_unigrams: int = 0

    def __post_init__(self) -> None:
        self._unigram_counts = np.zeros(self.vocab_size)
        self._base_cache: Floats | None = None  # the last answer of `base`, until a count changes

    def extend(self, tokens: Sequence[int]) -> None:
        """Learn from the text's next tokens: O(order) for each."""
        self._base_cache = None if tokens else self._base_cache
        for token in tokens:
            self._add(hash_suffixes(self.tokens, self.order - 1), token)
            self.tokens.append(token)

    def _add(self, hashes: list[int], token: int) -> None:
        for context in hashes[:0:-1]:
            after = self._followers.get(context)
            if after is None:
                self._followers[context] = token
                continue
            if isinstance(after, int):
                after = self._followers[context] = {after: 1}
            is_known = token in after
            after[token] = after.get(token, 0) + 1
            if is_known:
                return
        self._unigram_counts[token] += 1
        self._num_unigrams += 1

    def get_followers(self, context: int) -> dict[int, int] | None:
        """Counts of the tokens after a context, by its hash; None if it was not seen."""
        after = self._followers.get(context)
        return {after: 1} if isinstance(after, int) else after

    def interpolate_base(self, base: Floats) -> Floats:
        """Return the distribution [V] after the empty context. The table's argument is the same in every call."""
        if self._base_cache is None:
            self._base_cache = (base * self.base_weight + self._unigram_counts) / (
                self.base_weight + self._num_unigrams
            )
        return self._base_cache


class SparseCounts:
    """Weighted counts of several contexts, added to a dense distribution at once."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.counts: list[int] = []
        self.sizes: list[int] = []
        self.weights: list[float] = []

    def add(self, followers: dict[int, int], weight: float) -> None:
        self.tokens.extend(followers)
        self.counts.extend(followers.values())
        self.sizes.append(len(followers))
        self.weights.append(weight)

    def add_to(self, q: Floats, discount: float) -> None:
        if self.tokens:
            np.add.at(q, self.tokens, (np.array(self.counts) - discount) * np.repeat(self.weights, self.sizes))
