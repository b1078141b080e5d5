"""String-level exact match (SLEM): a draft model of another vocabulary writes text, encoded in the target's tokens.

The draft tokens are deterministic (q is one-hot), so the output keeps the target's distribution. The target accepts
such a token with its probability p, so the draft model's likeliest token is the best choice at any temperature.

Reference: 2502.05202, algorithm 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from foredraft.drafters.common.tree_builder import TreeSpec
from foredraft.drafters.draft import Draft
from foredraft.drafters.draft_model.cross_vocab.base import CrossVocabDrafter, CrossVocabState
from foredraft.drafters.draft_model.cross_vocab.vocab_map import VocabMap
from foredraft.models.forward_batch import Span
from foredraft.sampling.filters import argmax_tokens
from foredraft.tokenization.token_bytes import strip_partial_character

# draft-model tokens beyond the depth: the last target token may merge with the next bytes, so it is not drafted
EXTRA_DRAFT_TOKENS = 1


@dataclass(eq=False)
class SlemChain:
    """Draft of one request while it grows."""

    state: CrossVocabState
    vocab_map: VocabMap
    tokens: list[int] = field(default_factory=list)  # draft-model tokens
    draft_bytes: bytes = b""
    target_tokens: list[int] = field(default_factory=list)  # the draft in target tokens
    is_finished: bool = False
    probability: float = 1.0  # of the draft, by the draft model

    def push(self, token: int) -> None:
        """Append a draft-model token. A control token ends the draft; it is a draft token if the target has it too."""
        token_bytes = self.vocab_map.draft.token_bytes
        piece = token_bytes[token] if token < len(token_bytes) else None
        if piece is None:
            self.target_tokens = self._encode_for_target() + (
                [self.vocab_map.target_controls[token]] if token in self.vocab_map.target_controls else []
            )
            self.is_finished = True
            return
        self.tokens.append(token)
        self.draft_bytes += piece
        # the last token may merge with the next bytes
        self.target_tokens = self._encode_for_target()[:-1]
        depth = self.state.tree_spec.max_depth
        self.is_finished = len(self.target_tokens) >= depth or len(self.tokens) >= depth + EXTRA_DRAFT_TOKENS

    def build_span(self) -> Span:
        """Build the span of the newest token."""
        start = self.state.num_tokens + len(self.tokens) - 1
        return Span(self.state.pages, start, self.tokens[-1:], range(1))

    def _encode_for_target(self) -> list[int]:
        """Encode the draft in target tokens, up to the first byte that the target has no token for."""
        tail = self.state.retokenizer.last_bytes
        data = self.draft_bytes[: max(len(strip_partial_character(tail + self.draft_bytes)) - len(tail), 0)]
        ids = self.vocab_map.target.encode_continuation(tail, data) if data else []
        return ids[: next((i for i, token in enumerate(ids) if token < 0), len(ids))]


class SlemDrafter(CrossVocabDrafter):
    """Drafter of chains of deterministic draft tokens by SLEM."""

    vocab_option = "slem"

    def count_written_tokens(self, tree_spec: TreeSpec) -> int:
        return tree_spec.max_depth + EXTRA_DRAFT_TOKENS

    def draft_batch(self, states: Sequence[CrossVocabState]) -> list[Draft]:
        chains = [SlemChain(h, self.vocab_map) for h in states]
        logits, growing = self.prefill(states), chains
        while True:
            min_confidence = self.tree_spec.min_confidence
            logits = logits if logits.dtype == torch.float64 else logits.float()
            max_probs = logits.softmax(-1).amax(-1).tolist() if min_confidence else [1.0] * len(growing)
            for chain, token, max_prob in zip(growing, argmax_tokens(logits), max_probs, strict=True):
                chain.probability *= max_prob
                if token < 0 or chain.probability < min_confidence:
                    chain.is_finished = True
                else:
                    chain.push(token)
            growing = [chain for chain in growing if not chain.is_finished and self._has_room(chain)]
            if not growing:
                break
            logits = self.forward([chain.build_span() for chain in growing], last_only=True)
        for chain in chains:  # the newest token has no KV yet
            written = chain.tokens[:-1]
            chain.state.retokenizer.append_draft(written, chain.state.num_tokens + len(written))
        return [Draft.from_chain(chain.target_tokens[: chain.state.tree_spec.max_depth]) for chain in chains]

    def _has_room(self, chain: SlemChain) -> bool:
        return chain.state.num_tokens + len(chain.tokens) <= self.lm.context_length
