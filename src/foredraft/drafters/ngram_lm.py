"""An n-gram language model drafts: a trained table below what the running text itself has shown.

Unlike prompt lookup it has a law q, so it follows temperature and penalties, shares the target's noise under `match`,
and knows when it does not know. The table is optional; see `foredraft.models.ngram` for it and for the blend.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft import noise
from foredraft.drafters.base import Context, Draft, TextDrafter, draft_key
from foredraft.errors import ForedraftError
from foredraft.models.lm import HFModel
from foredraft.models.ngram import NgramModel
from foredraft.models.ngram_counts import Counts, Floats
from foredraft.request import Request
from foredraft.sampling import distribution

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


@dataclass(frozen=True)
class TrainConfig:
    """Of the table: contexts of up to order - 1 tokens, the `max_entries` entries that matter most."""

    order: int = 4
    max_entries: int | None = 1_000_000  # about five bytes each; None = all
    min_count: int = 1
    once_per_text: bool = True  # what one text repeats, the running text's own counts will learn by themselves


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

    def law(self, q: Floats) -> Tensor:
        """[V] what the sampling parameters make of q."""
        sampling = self.request.sampling
        history = [self.request.history(self.drafted)] if sampling.shapes_logits else None
        return distribution(torch.from_numpy(np.log(q.astype(np.float32)))[None], [sampling], history)[0]

    def draw(self, law: NDArray[np.float32]) -> int:
        """The token that wins the race from a law [V] after the tokens drafted so far. In a chain the depth below
        which a node is drawn is that node's number too."""
        depth = len(self.drafted)
        return noise.winner(law, draft_key(self.request, depth, depth))

    def take(self, token: int) -> bool:
        """Add a token; whether more may follow. An end of text can only be the last token of a draft."""
        self.drafted.append(token)
        return len(self.drafted) < self.limit and token not in self.request.end_ids

    def draft(self) -> Draft:
        if not self.laws:
            return Draft.chain(self.drafted)
        return Draft.chain(self.drafted, torch.stack([*self.laws, torch.zeros_like(self.laws[0])]))


class NgramLM(TextDrafter[Counts]):
    """Chains drawn from an n-gram law, as long as budget, room and confidence allow."""

    def __init__(self, model: NgramModel, config: Config, context: Context) -> None:
        super().__init__(context.num_tokens)
        self.model = model
        self.config = config
        self.device = context.device

    def start(self) -> Counts:
        config = self.config
        return Counts(self.model.vocab_size, config.order, config.discount, config.base_weight)

    def draft(self, learnt: Counts, request: Request, depth: int, budget: int) -> Draft:
        chain = Chain(request, learnt, depth)
        grow = self._grow_greedily if chain.is_plain_greedy else self._grow
        while grow(chain):
            pass
        return chain.draft()

    def _grow_greedily(self, chain: Chain) -> bool:
        """One token more, the likeliest; whether yet more may follow."""
        q = chain.q(self.model)
        token = int(q.argmax())
        return chain.trusts(float(q[token]), self.config.min_confidence) and chain.take(token)

    def _grow(self, chain: Chain) -> bool:
        """The same where a law is drawn from, or depends on what came before."""
        q = chain.q(self.model)
        law = chain.law(q)
        values = law.numpy()
        likeliest = int(values.argmax())
        # a greedy law is one-hot and says nothing of its own certainty
        is_greedy = chain.request.sampling.is_greedy and values[likeliest] == 1
        if not chain.trusts(float(q[likeliest] if is_greedy else values[likeliest]), self.config.min_confidence):
            return False
        token = likeliest if is_greedy else chain.draw(values)
        if chain.wants_q:
            chain.laws.append(law.to(self.device))
        return chain.take(token)


def learn(config: TrainConfig, documents: Sequence[NDArray[Any]], target: HFModel, out: Path) -> None:
    """Count token ids [n] of texts into a table that `create` loads."""
    if config.order < 1 or config.min_count < 1:
        raise ForedraftError(f"order and min_count must be at least 1, got {config.order} and {config.min_count}")
    ids = [document.astype(np.int64) for document in documents]
    model = NgramModel.train(
        ids, config.order, target.vocab_size, config.min_count, config.max_entries, config.once_per_text
    )
    model.quantised().save(out)


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
