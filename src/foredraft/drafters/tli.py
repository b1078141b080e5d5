"""Token-level intersection (TLI, 2502.05202 algorithm 4): a draft model of another vocabulary draws only tokens that
the target has too.

Its law is taken over the shared tokens, in the target's ids, with the request's own sampling parameters; so q is the
law that was drawn from, and every rule keeps the target's law exactly.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.drafters.base import Draft
from foredraft.drafters.branch import Branch
from foredraft.drafters.growth import Growth, Plan, Scores, extend
from foredraft.drafters.translated import PAGE, Held, Translated
from foredraft.kv.pool import keep
from foredraft.models.window import Span
from foredraft.request import Batch
from foredraft.tree import Commit, TokenTree


class Shared(NamedTuple):
    """The tokens that both have."""

    own: dict[int, int]  # of the target -> of the draft
    ids: Tensor  # [W] of the target, rising
    columns: Tensor  # [W] of the draft


class Intersecting(Translated):
    """Chains and trees of shared tokens."""

    vocab = "tli"

    @cached_property
    def _shared(self) -> Shared:
        pairs = self.pair.shared.items()
        own = {token: o for token, o in pairs if token < self.context.vocab_size and o < self.lm.vocab_size}
        device = self.context.device
        return Shared(own, torch.tensor(list(own), device=device), torch.tensor(list(own.values()), device=device))

    def num_own(self, plan: Plan) -> int:
        return plan.nodes

    def propose(self, batch: Batch) -> TokenTree:
        for held in self._held.values():  # a pass that failed may have left one
            held.branch = None
        return super().propose(batch)

    def draft(self, held: Sequence[Held]) -> list[Draft]:
        drafted = [(h, Branch(Growth(h.request, h.plan), h.length - 1)) for h in held]
        logits = self.read_in(held)
        for h, branch in drafted:
            h.branch = branch
        growing = drafted
        while True:
            scores = Scores(logits[:, self._shared.columns], self.context.vocab_size, self._shared.ids)
            extend([branch.growth for _, branch in growing], scores)
            growing = [(h, branch) for h, branch in growing if branch.growth.frontier]
            if not growing:
                return [branch.growth.draft() for _, branch in drafted]
            logits = self.forward([self._span(h, branch) for h, branch in growing], last_only=False)

    def observe(self, batch: Batch, commit: Commit) -> None:
        """The KV of what was accepted moves to where the text will have it."""
        starts, paths, pages = [], [], []
        for b, request in enumerate(batch.requests):
            held = self._held.get(request.slot)
            if held is None or held.branch is None:
                continue
            branch, held.branch = held.branch, None  # first of all: nothing of it may be counted on twice
            kept, offset = branch.growth.kept, batch.chunks[b] - 1
            below = [node - offset for node in commit.path_lists[b][offset:]]
            nodes = [kept[node] for node in below if node < len(kept)]  # beyond: of a tree this one was merged into
            written = [node for node in nodes if node in branch.places]  # the last may not be
            starts.append(branch.start)
            paths.append([branch.places[node] for node in written])
            pages.append(held.pages)
            own = [self._shared.own[branch.growth.tokens[node - 1]] for node in written[1:]]
            held.reading.expect(own, held.length + len(own))
        keep(self.lm.pool, paths, starts, pages, PAGE, self.context.device)

    def _span(self, held: Held, branch: Branch) -> Span:
        span = branch.span()
        return span._replace(pages=held.pages, tokens=[self._shared.own[token] for token in span.tokens])
