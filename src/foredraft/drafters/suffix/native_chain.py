"""Chains of suffix decoding, sampled in one native call with the tokens and q of `SuffixDrafter._grow_tree`."""

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from foredraft.drafters.suffix.automaton import SuffixMatch
from foredraft.drafters.suffix.native_automaton import load_handle, pack_matches
from foredraft.kernels.cpu.library import load_library
from foredraft.kernels.cpu.records import SuffixChainRecord
from foredraft.models.native.draft_plans import DraftPlan, PackedDrafts


@dataclass(frozen=True)
class SampledChain:
    """Chain of one request."""

    tokens: list[int]
    q: Tensor | None  # [1 + n, V] for n tokens, if the plan uses q and there are any
    expected_accepted: float  # expected accepted tokens by the probabilities of the contexts


@dataclass(frozen=True)
class NativeChainSampler:
    """Sampler of chains over V tokens (suffix_chain.h)."""

    vocab_size: int
    discount_table: "array[float]"

    def sample(self, matches: Sequence[SuffixMatch], plan: DraftPlan, min_confidence: float) -> SampledChain | None:
        """Sample a chain after the matches.

        Args:
            matches: matches in native automata.
            plan: sampling of the chain.
            min_confidence: the chain ends if its likeliest path is less likely.

        Returns:
            The chain; None if rounding decides one of its tokens.

        Raises:
            MemoryError: there was no memory to sample.
        """
        packed = PackedDrafts.pack([plan], 0, self.vocab_size)
        places = pack_matches(matches)
        places.extend(places)  # the second half is scratch
        expected = ctypes.c_double()
        record = SuffixChainRecord(
            packed.record,
            places.buffer_info()[0],
            self.discount_table.buffer_info()[0],
            ctypes.addressof(expected),
            min_confidence,
            len(matches),
        )
        found = packed.read(load_handle().fd_draft_suffix(record))
        if found is None:
            return None
        (tokens,) = found.tokens
        return SampledChain(tokens, found.get_q(0, plan) if tokens else None, expected.value)


def create_chain_sampler(vocab_size: int, discount_table: "array[float]") -> NativeChainSampler | None:
    """Make the sampler; None without the native library."""
    return None if load_library() is None else NativeChainSampler(vocab_size, discount_table)
