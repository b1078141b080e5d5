"""Token-level intersection (TLI, 2502.05202 algorithm 4): a draft model of another vocabulary draws only tokens that
the target has too.

Its law is taken over the shared tokens, in the target's ids, with the request's own sampling parameters; so q is the
law that was drawn from, and every rule keeps the target's law exactly.
"""

from collections.abc import Sequence

import torch

from foredraft.drafters.base import Context, Draft
from foredraft.drafters.branch import Branch
from foredraft.drafters.growth import Growth, Plan, Scores, TreeOptions, extend
from foredraft.drafters.intersection import Pair
from foredraft.drafters.translated import PAGE, Held, Translated
from foredraft.kv.pool import keep
from foredraft.models.lm import LM
from foredraft.models.window import Span
from foredraft.request import Batch
from foredraft.tree import Commit, TokenTree


class Intersecting(Translated):
    """Chains and trees of shared tokens."""

    vocab = "tli"

    def __init__(
        self,
        lm: LM,
        context: Context,
        pair: Pair,
        options: TreeOptions | None = None,
        kv_tokens: int | None = None,
    ) -> None:
        super().__init__(lm, context, pair, options, kv_tokens)
        shared = {
            token: own for token, own in pair.shared.items() if token < context.vocab_size and own < lm.vocab_size
        }
        self._own = shared
        self._ids = torch.tensor(list(shared), device=context.device)  # [W] of the target, rising
        self._columns = torch.tensor(list(shared.values()), device=context.device)  # [W] of the draft
        self._drafted: dict[int, tuple[Held, Branch]] = {}  # by slot: the last draft

    def num_own(self, plan: Plan) -> int:
        return plan.nodes

    def propose(self, batch: Batch) -> TokenTree:
        self._drafted.clear()
        return super().propose(batch)

    def draft(self, held: Sequence[Held]) -> list[Draft]:
        drafted = [(h, Branch(Growth(h.request, h.plan), h.length - 1)) for h in held]
        logits = self.read_in(held)
        for h, branch in drafted:
            self._drafted[h.request.slot] = h, branch
        growing = drafted
        while True:
            scores = Scores(logits[:, self._columns], self.context.vocab_size, self._ids)
            extend([branch.growth for _, branch in growing], scores)
            growing = [(h, branch) for h, branch in growing if branch.growth.frontier]
            if not growing:
                return [branch.growth.draft() for _, branch in drafted]
            logits = self.forward([self._span(h, branch) for h, branch in growing], last_only=False)

    def observe(self, batch: Batch, commit: Commit) -> None:
        """The KV of what was accepted moves to where the text will have it."""
        drafted, self._drafted = self._drafted, {}  # first of all: nothing of it may be counted on twice
        starts, paths, pages = [], [], []
        for b, request in enumerate(batch.requests):
            if request.slot not in drafted:
                continue
            held, branch = drafted[request.slot]
            kept, offset = branch.growth.kept, batch.chunks[b] - 1
            below = [node - offset for node in commit.path_lists[b][offset:]]
            nodes = [kept[node] for node in below if node < len(kept)]  # beyond: of a tree this one was merged into
            written = [node for node in nodes if node in branch.places]  # the last may not be
            starts.append(branch.start)
            paths.append([branch.places[node] for node in written])
            pages.append(held.pages)
            own = [self._own[branch.growth.tokens[node - 1]] for node in written[1:]]
            held.reading.expect(own, held.length + len(own))
        keep(self.lm.pool, paths, starts, pages, PAGE, self.context.device)

    def forget(self, slots: Sequence[int]) -> None:
        super().forget(slots)
        for slot in slots:
            self._drafted.pop(slot, None)

    def _span(self, held: Held, branch: Branch) -> Span:
        span = branch.span()
        return span._replace(pages=held.pages, tokens=[self._own[token] for token in span.tokens])
