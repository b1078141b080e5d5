"""Successor counts of one growing sequence, and hashes of contexts. Counts are found by hash, not by tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_MASK = (1 << 64) - 1  # 64-bit arithmetic
PRIME = 0x9E3779B97F4A7C15  # odd, so for a fixed token one step is a bijection of the hash
EMPTY_HASH = 0x2545F4914F6CDD1D  # hash of the empty context
HASH_SHIFT = 29  # bits


def hash_suffixes(tokens: Sequence[int], max_length: int) -> list[int]:
    """Hash the last tokens of a sequence.

    Args:
        tokens: token ids.
        max_length: maximum number of tokens.

    Returns:
        Element n is the 64-bit hash of the last n tokens, for n = 0 .. min(max_length, len(tokens)).
    """
    state, result = EMPTY_HASH, [EMPTY_HASH]
    for token in tokens[: -max_length - 1 : -1]:
        state = ((state ^ (token + 1)) * PRIME) & _MASK
        state ^= state >> HASH_SHIFT
        result.append(state)
    return result


@dataclass(eq=False)
class SequenceCounts:
    """Successor counts of one growing sequence, for absolute discounting over contexts of length 0 to order - 1.

    A token that occurs again after a context is not counted for the shorter contexts (update exclusion of PPM, Moffat
    1990).
    """

    vocab_size: int
    order: int  # maximum number of tokens of an n-gram
    discount: float  # subtracted from every count
    base_weight: float  # weight of the table's `base` in counts, against the sequence's counts without context
    tokens: list[int] = field(default_factory=list)
    # Hash of a context -> counts by follower. If one token followed once, only its id: the case of most contexts.
    _followers: dict[int, int | dict[int, int]] = field(default_factory=dict)
    _unigram_counts: Floats = field(init=False)  # [V] counts after the empty context
    _num_unigrams: int = 0

    def __post_init__(self) -> None:
        self._unigram_counts = np.zeros(self.vocab_size)
        self._base_cache: Floats | None = None  # last result of `interpolate_base`, until a count changes

    def extend(self, tokens: Sequence[int]) -> None:
        """Count the next tokens of the sequence, in O(order) per token."""
        self._base_cache = None if tokens else self._base_cache
        for token in tokens:
            self._add(hash_suffixes(self.tokens, self.order - 1), token)
            self.tokens.append(token)

    def _add(self, hashes: list[int], token: int) -> None:
        for context in hashes[:0:-1]:
            followers = self._followers.get(context)
            if followers is None:
                self._followers[context] = token
                continue
            if isinstance(followers, int):
                followers = self._followers[context] = {followers: 1}
            is_repeated = token in followers
            followers[token] = followers.get(token, 0) + 1
            if is_repeated:
                return
        self._unigram_counts[token] += 1
        self._num_unigrams += 1

    def get_followers(self, context: int) -> dict[int, int] | None:
        """Return the counts by token after a context, given its hash; None if the context has not occurred."""
        followers = self._followers.get(context)
        return {followers: 1} if isinstance(followers, int) else followers

    def interpolate_base(self, base: Floats) -> Floats:
        """Return the distribution [V] after the empty context.

        Args:
            base: distribution [V] of the table. The result is cached, so every call must pass the same one.
        """
        if self._base_cache is None:
            self._base_cache = (base * self.base_weight + self._unigram_counts) / (
                self.base_weight + self._num_unigrams
            )
        return self._base_cache


class SparseCounts:
    """Weighted counts of several contexts, collected and added to a dense distribution in one call."""

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
