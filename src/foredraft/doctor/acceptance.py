"""Measured acceptance of a drafter, from the outcomes of its drafts."""

from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.draft_length.acceptance import SurvivalEstimator
from foredraft.draft_length.policy import StepReport
from foredraft.drafters.common.mismatch_warning import is_near_chance

MEMORY = 1 << 20  # decay constant in drafts: a measurement forgets nothing
NEW_SLOT = -1  # slot of a request without drafts of its own


@dataclass(frozen=True)
class MeasuredAcceptance:
    """Acceptance of a drafter by draft node.

    Attributes:
        survival: probability that node j + 1 is drafted and accepted if it is granted.
        draft_probs: probability that node j + 1 is drafted if it is granted.
        num_drafts: verified drafts.
        num_first_accepted: drafts with an accepted token.
        num_steps: steps in which a draft was granted, per request.
    """

    survival: tuple[float, ...]
    draft_probs: tuple[float, ...]
    num_drafts: int
    num_first_accepted: int
    num_steps: int

    def tokens_per_pass(self, length: int) -> float:
        """Return the expected tokens of a pass with drafts of up to `length` nodes, the bonus token included."""
        return 1.0 + sum(self.survival[:length])

    def nodes_per_pass(self, length: int) -> float:
        """Return the expected draft nodes of a pass."""
        return sum(self.draft_probs[:length])

    @property
    def is_near_chance(self) -> bool:
        """Whether so few first tokens were accepted that the drafter cannot belong to the target."""
        return is_near_chance(self.num_drafts, self.num_first_accepted)


def estimate_acceptance(reports: Sequence[StepReport], max_nodes: int, kind: int) -> MeasuredAcceptance:
    """Estimate the acceptance of drafts of up to `max_nodes` nodes; kind 0 = greedy, 1 = sampled requests."""
    estimator = SurvivalEstimator(MEMORY)
    num_drafts = num_first = num_steps = 0
    estimator.register(NEW_SLOT, kind)
    for report in reports:
        for outcome in report.outcomes:
            if outcome.granted_nodes > 0:
                estimator.register(outcome.slot, kind)
                estimator.record_draft(*outcome)
                num_steps += 1
                num_drafts += outcome.num_drafted > 0
                num_first += len(outcome.accepted_nodes) > 0
    (survival,) = estimator.estimate_survival([NEW_SLOT], max_nodes)
    (draft_probs,) = estimator.estimate_draft_probs([NEW_SLOT], max_nodes)
    return MeasuredAcceptance(tuple(survival), tuple(draft_probs), num_drafts, num_first, num_steps)
