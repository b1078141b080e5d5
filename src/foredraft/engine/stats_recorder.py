"""Statistics of a request that has not ended: its target passes, and its draft tokens."""

import time
from dataclasses import dataclass, field

from foredraft.outputs import Stats

_Counts = tuple[int, int, int, list[int], int, float, tuple[int, int]]


@dataclass
class StatsRecorder:
    """Counts and times of one request. The last step can be undone until `keep_step`."""

    num_drafts: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_predicted: int = 0
    num_predicted_accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    target_passes: int = 0
    draft_time: float = 0.0
    start_time: float = field(default_factory=time.perf_counter)
    _counts_before_step: _Counts | None = None  # counts before the last step, for `undo_step`

    def record_step(self, num_drafted: int, num_accepted: int, draft_time: float, is_predicted: bool = False) -> None:
        """Add one target pass.

        Args:
            num_drafted: draft nodes of the request.
            num_accepted: accepted draft nodes.
            draft_time: seconds of drafting for this request.
            is_predicted: the draft was copied from the request's prediction.
        """
        drafts, drafted, accepted = self.num_drafts, self.num_drafted, self.num_accepted
        accepted_at, predicted = self.accepted_at.copy(), (self.num_predicted, self.num_predicted_accepted)
        counts = drafts, drafted, accepted, accepted_at, self.target_passes, self.draft_time, predicted
        self._counts_before_step = counts
        self.target_passes += 1
        self.draft_time += draft_time
        if not num_drafted:
            return
        self.num_drafts += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        if is_predicted:
            self.num_predicted += num_drafted
            self.num_predicted_accepted += num_accepted
        self.accepted_at += [0] * (num_accepted - len(self.accepted_at))
        for depth in range(num_accepted):
            self.accepted_at[depth] += 1

    def keep_step(self) -> None:
        """Make the last step final."""
        self._counts_before_step = None

    def undo_step(self) -> None:
        """Restore the counts before the last step, unless it is final."""
        if self._counts_before_step is not None:
            drafts, drafted, accepted, self.accepted_at, self.target_passes, self.draft_time, predicted = (
                self._counts_before_step
            )
            self.num_predicted, self.num_predicted_accepted = predicted
            self.num_drafts, self.num_drafted, self.num_accepted = drafts, drafted, accepted
            self._counts_before_step = None

    def build_stats(self, num_tokens: int) -> Stats:
        """Return the statistics up to now.

        Args:
            num_tokens: output tokens of the request.
        """
        return Stats(
            num_tokens=num_tokens,
            num_drafts=self.num_drafts,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
            num_predicted=self.num_predicted,
            num_predicted_accepted=self.num_predicted_accepted,
            accepted_at=tuple(self.accepted_at),
            target_passes=self.target_passes,
            draft_time=self.draft_time,
            wall_time=time.perf_counter() - self.start_time,
        )
