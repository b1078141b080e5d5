"""Warning about a drafter that was trained for another target.

Such a drafter lowers the speed but cannot change the output, and an adaptive draft length hides the loss of speed. The
detector counts how often the first draft token is accepted. A rate near 0 means a mismatch.
"""

import logging

from foredraft.drafters.method import DrafterContext
from foredraft.request import Batch
from foredraft.tree import Commit, TokenTree

log = logging.getLogger(__name__)
NUM_CHECKED_DRAFTS = 128  # drafts before the decision
# Minimum share of drafts with an accepted first token. A weak drafter reaches 0.1; accidental matches stay below 0.02.
MIN_FIRST_ACCEPTANCE = 0.02


class MismatchDetector:
    """Counter of accepted first tokens that warns once if they are too few.

    Attributes:
        num_drafts: verified drafts, about NUM_CHECKED_DRAFTS at most.
        num_first_accepted: drafts whose first token was accepted.
        is_mismatched: True after a decision that too few first tokens were accepted.
        is_silent: True omits the warning, for example for a drafter in training.
    """

    def __init__(self, context: DrafterContext) -> None:
        self.num_drafts = self.num_first_accepted = 0
        self.is_mismatched = self.is_silent = False
        self._name = context.model or context.builtin_drafter or "the drafter"
        self._target_name = context.target_name
        self._drafted_slots: set[int] = set()  # slots with a draft in the current step

    def silence(self) -> None:
        """Omit the warning from now on."""
        self.is_silent = True

    def record_proposal(self, batch: Batch, tree: TokenTree) -> None:
        """Record which requests have a draft in `tree`."""
        self._drafted_slots = set()
        if self.num_drafts < NUM_CHECKED_DRAFTS:
            self._drafted_slots = {request.slot for request, n in zip(batch.requests, tree.sizes, strict=True) if n > 1}

    def record_commit(self, batch: Batch, commit: Commit) -> None:
        """Count the drafts of the step and their accepted first tokens."""
        if not self._drafted_slots:
            return
        for request, chunk, path in zip(batch.requests, batch.num_new_tokens, commit.paths, strict=True):
            if request.slot in self._drafted_slots and len(path) >= chunk:
                self.num_drafts += 1
                self.num_first_accepted += len(path) > chunk
        self._drafted_slots = set()
        if self.num_drafts >= NUM_CHECKED_DRAFTS and self.num_first_accepted < MIN_FIRST_ACCEPTANCE * self.num_drafts:
            self.is_mismatched = True
            if self.is_silent:
                return
            log.warning(
                "drafts of %s are almost never accepted (the first token of %d in %d); was it trained for %s?",
                self._name, self.num_first_accepted, self.num_drafts, self._target_name,
            )  # fmt: skip
