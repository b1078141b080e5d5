"""An n-gram language model drafts: a trained table below what the running text itself has shown.

Unlike prompt lookup it has a law q, so it follows temperature and penalties, shares the target's noise under `match`,
and knows when it does not know. The table is optional; see `foredraft.models.ngram` for it and for the blend.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
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
    rates: Floats | None = None  # [limit, V] the noise of every depth

    @property
    def is_plain_greedy(self) -> bool:
        """The likeliest token is the draft, whatever came before."""
        return self.request.sampling.is_greedy and not self.request.sampling.shapes_logits

    @property
    def wants_q(self) -> bool:
        """The verification weighs the draft's law; under `match` only the token counts, and a greedy q is one-hot."""
        return self.request.verify in ("reject", "block") and not self.request.sampling.is_greedy

    def q(self, model: NgramModel) -> Floats:
        """[V] the model's law after the tokens drafted so far."""
        reach = max(self.counts.order, model.order) - 1
        near = self.counts.tokens[-reach:] + self.drafted if reach else []
        return model.q(near, self.counts)

    def trusts(self, top: float, min_confidence: float) -> bool:
        """Whether to draw once more, from a law with `top` as its largest probability."""
        self.confidence *= top
        return self.confidence > 0 and self.confidence >= min_confidence  # false for NaN, where nothing may be drawn

    def draw(self, law: NDArray[np.float32]) -> int:
        """The token that wins the race of `noise.race` from a law [V] after the tokens drafted so far."""
        if self.rates is None:
            # A race is its law times the race of ones: the noise of every depth at once costs half as much as one by
            # one. In a chain the depth below which a node is drawn is that node's number too.
            keys = torch.tensor([draft_key(self.request, depth, depth) for depth in range(self.limit)])
            self.rates = noise.race(torch.ones(self.limit, len(law)), keys).numpy()
        return int((law * self.rates[len(self.drafted)]).argmax())

    def take(self, token: int) -> bool:
        """Add a token; whether more may follow. An end of text can only be the last token of a draft."""
        self.drafted.append(token)
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
            if chain.trusts(float(q[token]), self.config.min_confidence) and chain.take(token):
                growing.append(chain)
        return growing + self._draw(drawing) if drawing else growing

    def _draw(self, drawing: Sequence[tuple[Chain, Floats]]) -> list[Chain]:
        """The same where a law is drawn from, or depends on what came before."""
        chains = [chain for chain, _ in drawing]
        logits = torch.from_numpy(np.log(np.stack([q.astype(np.float32) for _, q in drawing])))
        laws = distribution(
            logits, [c.request.sampling for c in chains], [c.request.history(c.drafted) for c in chains]
        )
        tops, likeliest = (part.tolist() for part in laws.max(-1))
        drawn: list[int] = []
        for row, (chain, q) in enumerate(drawing):
            # a greedy law is one-hot and says nothing of its own certainty
            is_greedy = chain.request.sampling.is_greedy and tops[row] == 1
            top = float(q[likeliest[row]]) if is_greedy else tops[row]
            if chain.trusts(top, self.config.min_confidence):
                drawn.append(row)
        for row in drawn:
            if chains[row].wants_q:
                chains[row].laws.append(laws[row].to(self.device))
        values = laws.numpy()
        return [chains[row] for row in drawn if chains[row].take(chains[row].draw(values[row]))]


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
