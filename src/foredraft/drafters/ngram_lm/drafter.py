"""Drafting with an n-gram language model: counts of the running sequence, backed off to a trained table.

Unlike prompt lookup it has a distribution q. So it follows temperature and penalties, shares the target's noise under
`match`, and stops if its confidence is low. The table is optional; `table.py` has table and blend.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.drafters.draft import Draft, draft_noise_key
from foredraft.drafters.method import DrafterContext
from foredraft.drafters.ngram_lm.counts import Floats, SequenceCounts
from foredraft.drafters.ngram_lm.table import NgramModel
from foredraft.drafters.token_drafter import TokenDrafter
from foredraft.request import Request
from foredraft.sampling import rng
from foredraft.sampling.distribution import distribution


@dataclass(frozen=True)
class Config:
    """Options of the n-gram model.

    Attributes:
        min_confidence: a chain ends before the product of the largest probabilities of q falls below this value. The
            product depends on earlier tokens alone, so the draft length is independent of the next draft token.
        order: order of the sequence's own counts: contexts of up to order - 1 tokens; 1 = single tokens only.
        discount: subtracted from each of these counts, between 0 and 1.
        base_weight: weight of the table's single-token distribution, in tokens of the sequence.
    """

    min_confidence: float = 0.1
    order: int = 7
    discount: float = 0.6
    base_weight: float = 100.0


@dataclass
class NgramLMChain:
    """Draft of one request while it grows."""

    request: Request
    counts: SequenceCounts
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    draft_probs: list[Tensor] = field(default_factory=list)  # q [V] per token, if the verification needs q
    confidence: float = 1.0

    @property
    def is_plain_greedy(self) -> bool:
        """True if the likeliest token is the draft, without penalties or other changes of the logits."""
        sampling = self.request.spec.sampling
        return sampling.is_greedy and not sampling.shapes_logits

    @property
    def needs_q(self) -> bool:
        """True if the verification reads q and q is not one-hot, as a greedy q is."""
        spec = self.request.spec
        return spec.rule.uses_q and not spec.sampling.is_greedy

    def compute_q(self, model: NgramModel) -> Floats:
        """Compute the model's distribution [V] after the tokens drafted so far."""
        context_length = max(self.counts.order, model.order) - 1
        context = self.counts.tokens[-context_length:] + self.tokens if context_length else []
        return model.compute_q(context, self.counts)

    def update_confidence(self, max_probability: float, min_confidence: float) -> bool:
        """Update the confidence by the largest probability of q. Returns whether to draft another token."""
        self.confidence *= max_probability
        return self.confidence > 0 and self.confidence >= min_confidence  # False for NaN

    def compute_probs(self, q: Floats) -> Tensor:
        """Apply the request's sampling parameters to q; returns [V]."""
        sampling = self.request.spec.sampling
        history = [self.request.build_history(self.tokens)] if sampling.shapes_logits else None
        return distribution(torch.from_numpy(np.log(q.astype(np.float32)))[None], [sampling], history)[0]

    def sample(self, probs: NDArray[np.float32]) -> int:
        """Sample a token from probabilities [V] by an exponential race.

        In a chain the depth of the parent equals its node index, so both keys are the same number. The stream is 0: an
        ensemble merges no sampled draft of a token member.
        """
        depth = len(self.tokens)
        return rng.race_argmax(probs, draft_noise_key(self.request, depth, depth, stream=0))

    def append(self, token: int) -> bool:
        """Append a token. Returns whether more may follow; an end token is always the last one."""
        self.tokens.append(token)
        return len(self.tokens) < self.max_tokens and token not in self.request.spec.end_ids

    def to_draft(self) -> Draft:
        if not self.draft_probs:
            return Draft.from_chain(self.tokens)
        return Draft.from_chain(self.tokens, torch.stack([*self.draft_probs, torch.zeros_like(self.draft_probs[0])]))


class NgramLMDrafter(TokenDrafter[SequenceCounts]):
    """Drafter of chains from an n-gram model."""

    def __init__(self, model: NgramModel, config: Config, context: DrafterContext) -> None:
        super().__init__(context.num_speculative_tokens, samples_drafts=True)
        self.model = model
        self.config = config
        self.device = context.device

    def new_state(self) -> SequenceCounts:
        config = self.config
        return SequenceCounts(self.model.vocab_size, config.order, config.discount, config.base_weight)

    def draft_tokens(self, state: SequenceCounts, request: Request, depth: int, budget: int) -> Draft:
        chain = NgramLMChain(request, state, depth)
        grow = self._append_greedy if chain.is_plain_greedy else self._append_sampled
        while grow(chain):
            pass
        return chain.to_draft()

    def _append_greedy(self, chain: NgramLMChain) -> bool:
        """Append the likeliest token. Returns whether more may follow."""
        q = chain.compute_q(self.model)
        token = int(q.argmax())
        return chain.update_confidence(float(q[token]), self.config.min_confidence) and chain.append(token)

    def _append_sampled(self, chain: NgramLMChain) -> bool:
        """Append a sampled token, or the greedy one of modified logits. Returns whether more may follow."""
        q = chain.compute_q(self.model)
        probs = chain.compute_probs(q)
        values = probs.numpy()
        best_token = int(values.argmax())
        # greedy probabilities are one-hot, so the confidence comes from q
        is_greedy = chain.request.spec.sampling.is_greedy and values[best_token] == 1
        if not chain.update_confidence(
            float(q[best_token] if is_greedy else values[best_token]), self.config.min_confidence
        ):
            return False
        token = best_token if is_greedy else chain.sample(values)
        if chain.needs_q:
            chain.draft_probs.append(probs.to(self.device))
        return chain.append(token)
