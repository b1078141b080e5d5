"""Draft-length policy of a measurement: given lengths in turn, and every report kept."""

from collections.abc import Sequence

from foredraft.draft_length.policy import DraftCandidate, FixedLengthPolicy, StepReport

LENGTHS = (1, 2, 3, 5, 8, 16)  # draft nodes per request that are compared, beside the longest


class MeasuringPolicy(FixedLengthPolicy):
    """Grants lengths in turn, one for all requests of a step, and keeps the reports.

    The lengths follow from the number of steps alone, so they cannot change a distribution. A request with a fixed
    length gets it.

    Attributes:
        reports: reports of all steps since the last `take_reports`.
    """

    def __init__(self) -> None:
        self._lengths: tuple[int, ...] = (0,)
        self._num_steps = 0
        self.reports: list[StepReport] = []

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Set the draft nodes per request by step; they repeat."""
        self._lengths = tuple(lengths)

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

    def take_reports(self) -> list[StepReport]:
        """Return the reports since the last call, and forget them."""
        reports, self.reports = self.reports, []
        return reports


def list_lengths(max_nodes: int) -> tuple[int, ...]:
    """Return the lengths to compare, rising, up to and with `max_nodes`."""
    return (*(length for length in LENGTHS if length < max_nodes), max_nodes)
