"""Warning about a drafter that was trained for another target.

Such a drafter lowers the speed but cannot change the output, and an adaptive draft length hides the loss of speed. The
detector counts how often the first draft token is accepted. A rate near 0 means a mismatch.

An adaptive policy soon stops drafts that are never accepted, and an ensemble does not choose such a member. Later
drafts are rare probes. So the decision does not wait for a fixed number of drafts: it falls as soon as a weak drafter
that fits the target would have so few accepted tokens with a probability of 1 % only.
"""

import logging
import math

from foredraft.drafters.method import DrafterContext
from foredraft.request import Batch
from foredraft.tree import Commit, TokenTree

log = logging.getLogger(__name__)
MAX_COUNTED_DRAFTS = 500  # drafts after which the detector stops counting
# Upper limit on the share of drafts with an accepted first token: accidental matches stay below it.
MAX_CHANCE_ACCEPTANCE = 0.02
WEAK_ACCEPTANCE = 0.1  # that share for a weak drafter that was trained for the target
MAX_ERROR = 0.01  # probability at which a weak drafter would have so few accepted first tokens


def is_near_chance(num_drafts: int, num_first_accepted: int) -> bool:
    """Return whether so few first tokens were accepted that the drafter does not fit the target.

    The first token is accepted in less than `MAX_CHANCE_ACCEPTANCE` of the drafts, and the binomial distribution of a
    weak drafter gives this number or fewer a probability below `MAX_ERROR`. Without an accepted token that takes 44
    drafts, with one 64, with two 101.
    """
    if num_first_accepted and num_first_accepted >= MAX_CHANCE_ACCEPTANCE * num_drafts:
        return False
    probability = sum(
        math.comb(num_drafts, k) * WEAK_ACCEPTANCE**k * (1.0 - WEAK_ACCEPTANCE) ** (num_drafts - k)
        for k in range(num_first_accepted + 1)
    )
    return probability < MAX_ERROR


class MismatchDetector:
    """Counter of accepted first tokens that warns once if they are too few.

    Attributes:
        num_drafts: verified drafts, about MAX_COUNTED_DRAFTS at most.
        num_first_accepted: drafts whose first token was accepted.
        is_mismatched: True after a decision that too few first tokens were accepted.
        is_silent: True omits the warning, for example for a drafter in training.
    """

    def __init__(self, context: DrafterContext) -> None:
        self.num_drafts = self.num_first_accepted = 0
        self.is_mismatched = self.is_silent = False
        self._name = context.model or context.builtin_drafter or "the drafter"
        self._target_name = context.target_name
        self._tree_sizes: dict[int, int] = {}  # slot -> nodes of its tree, for the drafts of the current step

    def silence(self) -> None:
        """Omit the warning from now on."""
        self.is_silent = True

    def record_proposal(self, batch: Batch, tree: TokenTree) -> None:
        """Record which requests have a draft in `tree`."""
        self._tree_sizes = {}
        if self.num_drafts < MAX_COUNTED_DRAFTS and not self.is_mismatched:
            self._tree_sizes = {request.slot: n for request, n in zip(batch.requests, tree.sizes, strict=True) if n > 1}

    def record_commit(self, batch: Batch, commit: Commit) -> None:
        """Count the drafts of the step and their accepted first tokens."""
        if not self._tree_sizes:
            return
        for request, chunk, path in zip(batch.requests, batch.num_new_tokens, commit.paths, strict=True):
            size = self._tree_sizes.get(request.slot)
            if size is not None and len(path) >= chunk:
                self.num_drafts += 1
                # A larger index is a node of another member, if an ensemble merged this draft with others.
                self.num_first_accepted += len(path) > chunk and path[chunk] - (chunk - 1) < size
        self._tree_sizes = {}
        if is_near_chance(self.num_drafts, self.num_first_accepted):
            self.is_mismatched = True
            if self.is_silent:
                return
            log.warning(
                "drafts of %s are almost never accepted (the first token of %d in %d); was it trained for %s? "
                "Speculation cannot save time with it: leave it out, or give one trained for this target",
                self._name, self.num_first_accepted, self.num_drafts, self._target_name,
            )  # fmt: skip
