"""Token ids with a special meaning for a grammar, and the mask of the tokens that a grammar allows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class AllowedTokens:
    """Tokens that may follow one path."""

    mask: Tensor | None = None  # [V] bool; None = all, because the path violates the grammar or there are no end ids
    is_finished: bool = False  # the grammar is satisfied, and only end ids can follow
    error: str | None = None  # reason why no token is allowed


@dataclass(frozen=True)
class GrammarTokens:
    """Token ids of one request: those that its grammar can read, and those that end it."""

    vocab_size: int  # V of the logits
    parser_end_id: int  # llguidance's id for the end, larger than those of the tokenizer
    eos_ids: frozenset[int] = frozenset()  # ids that end the text and are no part of it
    end_ids: frozenset[int] = frozenset()  # those and stop_token_ids, which may be tokens of the grammar

    def can_read(self, tokens: Sequence[int]) -> bool:
        """Whether llguidance can be given these tokens: no end id, and no id beyond those of the tokenizer."""
        return not any(token in self.end_ids or token >= self.parser_end_id for token in tokens)

    def convert_bits(self, bits: Tensor) -> AllowedTokens | None:
        """Convert llguidance's mask to that of the vocabulary.

        Args:
            bits: [n] bool by token id, n > `parser_end_id`.

        Returns:
            The allowed tokens; None if there are none.
        """
        may_end = bool(bits[self.parser_end_id])
        mask = torch.zeros(self.vocab_size, dtype=torch.bool)
        size = min(self.vocab_size, self.parser_end_id)
        mask[:size] = bits[:size]
        mask[self._eos_tensor] = False
        is_finished = may_end and not bool(mask.any())
        if is_finished and not len(self._end_tensor):
            return AllowedTokens(is_finished=True)
        if may_end:
            mask[self._end_tensor] = True
        return AllowedTokens(mask, is_finished) if mask.any() else None

    @cached_property
    def _eos_tensor(self) -> Tensor:
        return self._list_known(self.eos_ids)

    @cached_property
    def _end_tensor(self) -> Tensor:
        return self._list_known(self.end_ids)

    def _list_known(self, ids: frozenset[int]) -> Tensor:
        return torch.tensor(sorted(i for i in ids if i < self.vocab_size), dtype=torch.int64)
