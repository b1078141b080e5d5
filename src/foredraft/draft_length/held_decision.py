"""A decision that holds for a few steps while drafting pays and the batch stays the same."""

from collections.abc import Sequence

from foredraft.draft_length.policy import DraftCandidate

HOLD_INTERVAL = 8  # decisions are made in steps that are multiples of this, and whenever the batch changes


class HeldDecision:
    """Granted nodes of the last decision, and the batch that they were granted to.

    A decision takes several times as long in an engine as in a loop of its own, because the pass of the target empties
    the caches in between.
    """

    def __init__(self) -> None:
        self._batch: tuple[int, Sequence[DraftCandidate]] | None = None  # pass tokens and candidates
        self._granted: list[int] = []

    def hold(self, num_pass_tokens: int, candidates: Sequence[DraftCandidate], granted: Sequence[int]) -> None:
        """Hold a decision until the next multiple of HOLD_INTERVAL."""
        self._batch, self._granted = (num_pass_tokens, list(candidates)), list(granted)

    def release(self) -> None:
        """Let the next step decide."""
        self._batch = None

    def find(self, step: int, num_pass_tokens: int, candidates: Sequence[DraftCandidate]) -> list[int] | None:
        """Return the nodes that are held for this batch; None if this step has to decide."""
        if self._batch is None or step % HOLD_INTERVAL == 0 or self._batch != (num_pass_tokens, list(candidates)):
            return None
        return list(self._granted)
