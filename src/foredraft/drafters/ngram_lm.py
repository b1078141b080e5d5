"""An n-gram language model drafts: a trained table below what the running text itself has shown.

Unlike prompt lookup it has a law q, so it follows temperature and penalties, shares the target's noise under `match`,
and knows when it does not know. The table is optional; see `foredraft.models.ngram` for it and for the blend.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from foredraft import noise
from foredraft.drafters.base import Context, Draft, draft_key, plant
from foredraft.errors import ForedraftError
from foredraft.models.ngram import NgramModel
from foredraft.models.ngram_counts import Counts, Floats
from foredraft.request import Batch, Request
from foredraft.sampling import distribution
from foredraft.tree import Commit, TokenTree

METHOD = "ngram_lm"


@dataclass(frozen=True)
class Config:
    """`min_confidence`: a chain ends before a token where the product of the largest probabilities of q, from the root
    on, falls below it. That depends on the tokens before the cut alone, so the draft length tells nothing of the draft.
    """

    min_confidence: float = 0.1
    order: int = 7  # of the running text's own counts: contexts of up to order - 1 tokens; 1 = single tokens only
    discount: float = 0.6  # taken from each of those counts, in 0..1
    base_weight: float = 100.0  # the table's single-token law weighs as much as this many tokens of the text


@dataclass
class Chain:
    """A draft while it grows."""

    request: Request
    counts: Counts
    limit: int
    drafted: list[int] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)  # [V] each, where the verification wants q
    confidence: float = 1.0

    @property
    def is_plain_greedy(self) -> bool:
        """The likeliest token is the draft, whatever came before."""
        return self.request.sampling.is_greedy and not self.request.sampling.shapes_logits

    def q(self, model: NgramModel) -> Floats:
        """[V] the model's law after the tokens drafted so far."""
        reach = max(self.counts.order, model.order) - 1
        near = self.counts.tokens[-reach:] + self.drafted if reach else []
        return model.q(near, self.counts)

    def take(self, token: int, top: float, min_confidence: float, law: Tensor | None = None) -> bool:
        """Add a token whose law has `top` as its largest probability; False where the chain ends instead."""
        confidence = self.confidence * top
        if not (confidence > 0 and confidence >= min_confidence):  # NaN, where nothing may be drawn, ends it too
            return False
        self.confidence = confidence
        self.drafted.append(token)
        if law is not None:
            self.laws.append(law)
        # an end of text can only be the last token of a draft
        return len(self.drafted) < self.limit and token not in self.request.end_ids

    def draft(self) -> Draft:
        if not self.laws:
            return Draft.chain(self.drafted)
        return Draft.chain(self.drafted, torch.stack([*self.laws, torch.zeros_like(self.laws[0])]))


class NgramLM:
    """Chains drawn from an n-gram law, all requests of a batch one token at a time."""

    taps: tuple[int, ...] = ()

    def __init__(self, model: NgramModel, config: Config, context: Context) -> None:
        self.model = model
        self.config = config
        self.num_tokens = context.num_tokens
        self.device = context.device
        self._counts: dict[int, Counts] = {}

    @property
    def num_nodes(self) -> int:
        return self.num_tokens

    def propose(self, batch: Batch) -> TokenTree:
        """One chain per request, as long as its budget, its room and its confidence allow."""
        chains = {b: self._chain(batch.requests[b], batch.budgets[b]) for b in batch.drafting()}
        growing = [chain for chain in chains.values() if chain.limit > 0]
        while growing:
            growing = self._grow(growing)
        return plant(batch, [chains[b].draft() if b in chains else Draft() for b in range(len(batch))])

    def observe(self, batch: Batch, commit: Commit) -> None:
        """Nothing: the tokens are read from the request when it is drafted for."""

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._counts.pop(slot, None)

    def _chain(self, request: Request, budget: int) -> Chain:
        counts = self._counts.get(request.slot)
        if counts is None:
            options = (self.config.order, self.config.discount, self.config.base_weight)
            counts = self._counts[request.slot] = Counts(self.model.vocab_size, *options)
        counts.extend(request.slice(len(counts.tokens), request.num_tokens))
        return Chain(request, counts, min(budget, self.num_tokens, request.room))

    def _grow(self, chains: Sequence[Chain]) -> list[Chain]:
        """One token more for every chain; those that may grow further."""
        growing: list[Chain] = []
        drawing: list[tuple[Chain, Floats]] = []
        for chain in chains:
            q = chain.q(self.model)
            if not chain.is_plain_greedy:
                drawing.append((chain, q))
                continue
            token = int(q.argmax())
            if chain.take(token, float(q[token]), self.config.min_confidence):
                growing.append(chain)
        return growing + self._draw(drawing) if drawing else growing

    def _draw(self, drawing: Sequence[tuple[Chain, Floats]]) -> list[Chain]:
        """The same where a law is drawn from, or depends on what came before."""
        chains = [chain for chain, _ in drawing]
        q = np.stack([q for _, q in drawing])
        logits = torch.from_numpy(np.log(q.astype(np.float32)))
        laws = distribution(
            logits, [c.request.sampling for c in chains], [c.request.history(c.drafted) for c in chains]
        )
        keys = torch.tensor([draft_key(c.request, len(c.drafted), len(c.drafted)) for c in chains])
        drawn = (laws if all(c.request.sampling.is_greedy for c in chains) else noise.race(laws, keys)).argmax(-1)
        growing: list[Chain] = []
        for row, (chain, token, top) in enumerate(zip(chains, drawn.tolist(), laws.amax(-1).tolist(), strict=True)):
            is_greedy = chain.request.sampling.is_greedy
            needs_q = chain.request.verify in ("reject", "block") and not is_greedy
            # a greedy law is one-hot and says nothing of its own certainty
            confidence = float(q[row, token]) if is_greedy and top == 1 else top
            law = laws[row].to(self.device) if needs_q else None
            if chain.take(token, confidence, self.config.min_confidence, law):
                growing.append(chain)
        return growing


def create(config: Config, context: Context) -> NgramLM:
    """Load the table, if there is one. Raises ForedraftError if it is not one of the target's vocabulary."""
    if not 0 <= config.min_confidence <= 1:
        raise ForedraftError(f"min_confidence must lie in 0..1, got {config.min_confidence}")
    if not 0 < config.discount < 1:
        raise ForedraftError(f"discount must lie between 0 and 1, got {config.discount}")
    if config.order < 1:
        raise ForedraftError(f"order must be at least 1, got {config.order}")
    if not config.base_weight > 0:
        raise ForedraftError(f"base_weight must be positive, got {config.base_weight}")
    folder = context.model or context.builtin
    model = NgramModel.load(folder, context.vocab_size) if folder else NgramModel.uniform(context.vocab_size)
    return NgramLM(model, config, context)
