"""Drafting with an n-gram language model: counts of the running sequence, backed off to a trained table.

Unlike prompt lookup it has a distribution q. So it follows temperature and penalties, shares the target's noise under
`match`, and stops if its confidence is low. The table is optional; `foredraft.models.ngram` has table and blend.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.drafters.draft import Draft, draft_noise_key
from foredraft.drafters.registry import DrafterContext
from foredraft.drafters.token_drafter import TokenDrafter
from foredraft.errors import ForedraftError
from foredraft.models import kneser_ney
from foredraft.models.hf import HFModel
from foredraft.models.ngram import NgramModel
from foredraft.models.ngram_counts import Floats, SequenceCounts
from foredraft.request import Request
from foredraft.sampling import rng
from foredraft.sampling.distribution import distribution

METHOD = "ngram_lm"


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


@dataclass(frozen=True)
class TrainConfig:
    """Settings of the trained table.

    Attributes:
        order: contexts of up to order - 1 tokens.
        max_entries: number of entries to keep, the most useful first; about 5 bytes each. None = all.
        min_count: fewest occurrences of an entry.
        once_per_text: count an n-gram once per document; the sequence's own counts cover repetitions.
    """

    order: int = 4
    max_entries: int | None = 1_000_000
    min_count: int = 1
    once_per_text: bool = True


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
        return self.request.sampling.is_greedy and not self.request.sampling.shapes_logits

    @property
    def needs_q(self) -> bool:
        """True if the verification reads q and q is not one-hot, as a greedy q is."""
        return self.request.rule.uses_q and not self.request.sampling.is_greedy

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
        sampling = self.request.sampling
        history = [self.request.build_history(self.tokens)] if sampling.shapes_logits else None
        return distribution(torch.from_numpy(np.log(q.astype(np.float32)))[None], [sampling], history)[0]

    def sample(self, probs: NDArray[np.float32]) -> int:
        """Sample a token from probabilities [V] by an exponential race.

        In a chain the depth of the parent equals its node index, so both keys are the same number.
        """
        depth = len(self.tokens)
        return rng.race_argmax(probs, draft_noise_key(self.request, depth, depth))

    def append(self, token: int) -> bool:
        """Append a token. Returns whether more may follow; an end token is always the last one."""
        self.tokens.append(token)
        return len(self.tokens) < self.max_tokens and token not in self.request.end_ids

    def to_draft(self) -> Draft:
        if not self.draft_probs:
            return Draft.from_chain(self.tokens)
        return Draft.from_chain(self.tokens, torch.stack([*self.draft_probs, torch.zeros_like(self.draft_probs[0])]))


class NgramLMDrafter(TokenDrafter[SequenceCounts]):
    """Drafter of chains from an n-gram model."""

    def __init__(self, model: NgramModel, config: Config, context: DrafterContext) -> None:
        super().__init__(context.num_speculative_tokens)
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
        is_greedy = chain.request.sampling.is_greedy and values[best_token] == 1
        if not chain.update_confidence(
            float(q[best_token] if is_greedy else values[best_token]), self.config.min_confidence
        ):
            return False
        token = best_token if is_greedy else chain.sample(values)
        if chain.needs_q:
            chain.draft_probs.append(probs.to(self.device))
        return chain.append(token)


def learn(config: TrainConfig, documents: Sequence[NDArray[Any]], target: HFModel, out: Path) -> None:
    """Train the table from token ids [n] of documents, and save it for `create`."""
    if config.order < 1 or config.min_count < 1:
        raise ForedraftError(f"order and min_count must be at least 1, got {config.order} and {config.min_count}")
    ids = [document.astype(np.int64) for document in documents]
    model = kneser_ney.train(
        ids, config.order, target.vocab_size, config.min_count, config.max_entries, config.once_per_text
    )
    model.quantise_probs().save(out)


def create(config: Config, context: DrafterContext) -> NgramLMDrafter:
    """Load the table, if there is one. Raises ForedraftError if its vocabulary is not the target's."""
    if not 0 <= config.min_confidence <= 1:
        raise ForedraftError(f"min_confidence must lie in 0..1, got {config.min_confidence}")
    if not 0 < config.discount < 1:
        raise ForedraftError(f"discount must lie between 0 and 1, got {config.discount}")
    if config.order < 1:
        raise ForedraftError(f"order must be at least 1, got {config.order}")
    if not config.base_weight > 0:
        raise ForedraftError(f"base_weight must be positive, got {config.base_weight}")
    folder = context.model or context.builtin_drafter
    model = NgramModel.load(folder, context.vocab_size) if folder else NgramModel.make_uniform(context.vocab_size)
    return NgramLMDrafter(model, config, context)
