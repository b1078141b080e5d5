"""Draft-length policy of a measurement: lengths in turn, and every report kept."""

from collections.abc import Sequence

from foredraft.draft_length.policy import DraftCandidate, StepReport

LADDER = (8, 1, 4, 2, 8, 3, 6)  # draft nodes per request, step by step; the longest most often, for the acceptance


class MeasuringPolicy:
    """Grants the lengths of a ladder in turn, one for all requests of a step, and keeps the reports.

    The lengths follow from the number of steps alone, so they cannot change a distribution. A request with a fixed
    length gets it.

    Args:
        lengths: draft nodes per request by step; they repeat.

    Attributes:
        reports: reports of all steps since the last `take_reports`.
    """

    def __init__(self, lengths: Sequence[int] = (0,)) -> None:
        self._lengths = tuple(lengths)
        self._num_steps = 0
        self.reports: list[StepReport] = []

    def allocate(
        self, candidates: Sequence[DraftCandidate], num_pass_tokens: int, attended_tokens: int = 0
    ) -> list[int]:
        """Return the same number of nodes for every candidate."""
        nodes = self._lengths[self._num_steps % len(self._lengths)]
        self._num_steps += 1
        return [c.max_nodes if c.is_fixed else min(nodes, c.max_nodes) for c in candidates]

    def record_step(self, report: StepReport) -> None:
        """Keep the report."""
        self.reports.append(report)

    def forget(self, slots: Sequence[int]) -> None:
        """Do nothing: there is no state by slot."""

    def take_reports(self) -> list[StepReport]:
        """Return the reports since the last call, and forget them."""
        reports, self.reports = self.reports, []
        return reports


def build_ladder(max_nodes: int) -> tuple[int, ...]:
    """Return the lengths of a measurement, none above `max_nodes`; that itself if the ladder ends below it."""
    scale = max(LADDER)
    if max_nodes >= scale:
        return tuple(max_nodes if nodes == scale else nodes for nodes in LADDER)
    return tuple(dict.fromkeys(min(nodes, max_nodes) for nodes in LADDER)) or (max_nodes,)
