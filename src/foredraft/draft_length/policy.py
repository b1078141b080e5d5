"""Interface of draft-length policies, and the policy with a fixed length.

A draft-length policy decides before each step how many nodes each request may draft. It must decide from earlier steps
alone: under rejection sampling, a length that depended on the draft tokens would change the output distribution.
"""

from collections.abc import Sequence, Set
from typing import Literal, NamedTuple, Protocol

# Reason of a decision about the draft lengths of a step.
DecisionReason = Literal[
    "start",  # one of the first steps, which measure the cost of drafts
    # Drafts are predicted to save time, or were until now and are predicted to lose at most 1 % (`GAIN_MARGIN`).
    "pays",
    # No request drafts: no draft is predicted to save time, or drafting is paused and the saving is at most 1 %.
    "does not pay",
    "probe",  # a few short drafts while drafting is paused, to measure acceptance again
    "measure",  # one step without drafts, to measure the cost of plain decoding again
    # Drafts are predicted to save more than 1 %, but no request drafts: the time credit does not cover a loss, or the
    # drafter would take too long to read the tokens that it missed, or it has missed hidden states of most requests.
    "guard",
    "fixed",  # all requests that may draft have a fixed draft length, by operator or request
]


class DraftCandidate(NamedTuple):
    """A request that may draft in this step."""

    slot: int
    max_nodes: int  # upper limit on draft nodes: size of the drafter, bounds of operator and request
    min_nodes: int = 0  # lower limit on draft nodes, by operator or request; the policy must grant them
    kind: int = 0  # 0 = greedy, 1 = sampled; costs and acceptance are estimated separately by kind
    is_ready: bool = True  # False: the drafter has missed hidden states of the request, so it would propose nothing

    @property
    def is_fixed(self) -> bool:
        """Whether the bounds leave the policy nothing to choose."""
        return self.min_nodes >= self.max_nodes


class DraftOutcome(NamedTuple):
    """Result of one request's draft in a step."""

    slot: int
    granted_nodes: int  # nodes that the policy granted
    num_drafted: int  # nodes that the drafter proposed
    # Accepted nodes that saved a forward pass, counted from 1 after the root; those of a chain are 1, 2, 3.
    accepted_nodes: tuple[int, ...] = ()
    # Predicted probability, for every drafted node of a chain, that it is accepted if those before it are; () = none.
    confidences: tuple[float, ...] = ()


class StepReport(NamedTuple):
    """Size, time and draft outcomes of a finished step."""

    num_requests: int
    num_pass_tokens: int  # tokens of the target's forward pass: prompt chunks, last committed tokens, draft nodes
    num_logit_rows: int  # rows of logits: last committed tokens and draft nodes
    attended_tokens: int  # tokens that a token of the pass attends to, summed over the pass
    draft_time: float  # seconds in the drafter, catching up on unread tokens included
    step_time: float  # seconds of the whole step, drafting included
    outcomes: tuple[DraftOutcome, ...] = ()  # one for every request whose last committed token was scored
    is_observed: bool = True  # False: the drafter was given no outputs of the target, as `needs_observation` permits


class LengthDecision(NamedTuple):
    """Draft nodes granted in a step, the reason, and the predictions behind it."""

    reason: DecisionReason
    nodes: int = 0  # nodes granted to all requests together
    longest: int = 0  # largest number of nodes granted to one request, which is the depth if the draft is a chain
    plain_rate: float = 0.0  # predicted tokens per second without drafts; 0 before the first plan
    rate: float = 0.0  # predicted tokens per second with the best drafts, granted or not
    acceptance: float = 0.0  # predicted share of the nodes of those drafts that is accepted


class DraftLengthPolicy(Protocol):
    """Decides how many nodes each request may draft."""

    @property
    def is_resting(self) -> bool:
        """Whether no request has drafted for a while, apart from probes, so that drafters need not prepare drafts."""

    @property
    def needs_observation(self) -> bool:
        """Whether the step that was allocated last gives the drafter the outputs of the target that it reads.

        False while drafting rests and no probe is due, if they take much of a step. A request that runs then may get
        no draft later (`DrafterSpec.missed_states`); missed tokens change no request (`DrafterSpec.token_steps`).
        """

    def allocate(
        self, candidates: Sequence[DraftCandidate], num_pass_tokens: int, attended_tokens: int = 0
    ) -> list[int]:
        """Grant draft nodes for the next step.

        Args:
            candidates: requests that may draft.
            num_pass_tokens: tokens of the forward pass without draft nodes.
            attended_tokens: tokens that each of them attends to, summed over them.

        Returns:
            Nodes for each candidate, from its `min_nodes` to its `max_nodes`.
        """

    def repeat_none(self, num_requests: int, kinds: Set[int]) -> bool:
        """Decide for no draft in the next step, as in the last, if that can be seen without the candidates.

        Collecting them is most of what a drafter at rest would cost. No request may have a least length.

        Args:
            num_requests: requests of the step.
            kinds: their kinds, as in `DraftCandidate`.

        Returns:
            Whether the decision was made. Otherwise `allocate` makes it.
        """

    def record_step(self, report: StepReport) -> None:
        """Update the estimates after a step."""

    def forget(self, slots: Sequence[int]) -> None:
        """Drop the state of requests that ended, were aborted or were preempted."""


class FixedLengthPolicy:
    """Draft-length policy that grants every request its `max_nodes`."""

    @property
    def is_resting(self) -> bool:
        """False: every request drafts."""
        return False

    @property
    def needs_observation(self) -> bool:
        """True: every request drafts."""
        return True

    def allocate(
        self, candidates: Sequence[DraftCandidate], num_pass_tokens: int, attended_tokens: int = 0
    ) -> list[int]:
        """Return `max_nodes` of every candidate."""
        return [candidate.max_nodes for candidate in candidates]

    def repeat_none(self, num_requests: int, kinds: Set[int]) -> bool:
        """Return False: every request drafts."""
        return False

    def record_step(self, report: StepReport) -> None:
        """Ignore the report: the policy has no estimates."""

    def forget(self, slots: Sequence[int]) -> None:
        """Do nothing: the policy has no state."""
