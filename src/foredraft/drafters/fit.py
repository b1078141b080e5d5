"""Whether a drafter that was trained for some target drafts what this one says, as seen while it drafts.

A head on the states of another target costs speed and never output, and an adaptive length hides even that. So the
first token of a draft is counted: one that the target almost never takes was learnt from something else.
"""

import logging

from foredraft.drafters.base import Context
from foredraft.request import Batch
from foredraft.tree import Commit, TokenTree

log = logging.getLogger(__name__)
DRAFTS = 128  # looked at
BAR = 0.02  # share of them whose first token has to be kept; a weak drafter comes to a tenth, chance to less than this


class Fit:
    """Counts the drafts of one drafter until it is clear what they are worth; warns once.

    Attributes:
        num_drafts: drafts that were verified, of the first `DRAFTS`.
        num_begun: those of them whose first token was kept.
        is_misfit: whether too few first tokens were kept.
        is_silent: whether the warning is left out, as for a drafter in training.
    """

    def __init__(self, context: Context) -> None:
        self.num_drafts = self.num_begun = 0
        self.is_misfit = self.is_silent = False
        self._name = context.model or context.builtin or "the drafter"
        self._target = context.target_name
        self._drafted: set[int] = set()  # slots, in the step that is under way

    def proposed(self, batch: Batch, tree: TokenTree) -> TokenTree:
        """Note whom a tree drafts for; the tree."""
        self._drafted = set()
        if self.num_drafts < DRAFTS:
            self._drafted = {request.slot for request, n in zip(batch.requests, tree.sizes, strict=True) if n > 1}
        return tree

    def observed(self, batch: Batch, commit: Commit) -> None:
        """Count what came of it."""
        if not self._drafted:
            return
        for request, chunk, path in zip(batch.requests, batch.chunks, commit.path_lists, strict=True):
            if request.slot in self._drafted and len(path) >= chunk:
                self.num_drafts += 1
                self.num_begun += len(path) > chunk
        self._drafted = set()
        if self.num_drafts >= DRAFTS and self.num_begun < BAR * self.num_drafts:
            self.is_misfit = True
            if self.is_silent:
                return
            log.warning(
                "drafts of %s are almost never accepted (the first token of %d in %d); was it trained for %s?",
                self._name, self.num_begun, self.num_drafts, self._target,
            )  # fmt: skip
