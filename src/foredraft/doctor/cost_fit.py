"""Costs of steps with one number of streams, in the cost model of the adaptive draft lengths.

The target's pass, with all that a step costs beside the drafter, is a `CostCurve` over its rows; the drafter is a
`DraftCost`. `draft_length/costs.py` explains both.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.doctor.step_runs import StreamRuns
from foredraft.draft_length.costs import CostCurve, DraftCost
from foredraft.draft_length.planner import Planner, StepShape
from foredraft.draft_length.policy import StepReport

MAX_SLOWNESS = 2.0  # times the median above which a step counts as interrupted
NUM_SETTLING_PASSES = 2  # times that the reports are fitted: the first time the prediction moves, and clips


@dataclass(frozen=True)
class FittedCosts:
    """Costs of the steps of one engine with one number of streams."""

    planner: Planner
    context_per_token: float  # mean number of tokens that a token of the pass attended to
    num_steps: int
    gap_seconds: float = 0.0  # between two steps

    def predict_plain(self, num_streams: int) -> float:
        """Return the seconds of a step without drafts."""
        shape = StepShape(num_streams, num_streams, self.context_per_token)
        idle = self.planner.draft_cost.predict(num_streams, 0, 0)
        return self.planner.estimate_verify_time(shape, 0) + idle + self.gap_seconds

    def predict_step(self, num_streams: int, length: int, nodes: float, has_free_drafts: bool = False) -> float:
        """Return the seconds of a step with drafts.

        Args:
            num_streams: requests of the step.
            length: draft nodes granted to each request.
            nodes: expected draft nodes of all requests.
            has_free_drafts: leave the time of the drafter out.
        """
        shape = StepShape(num_streams, num_streams, self.context_per_token)
        verifying = self.planner.estimate_verify_time(shape, nodes) + self.gap_seconds
        return verifying + (0.0 if has_free_drafts else self.predict_draft(num_streams, length, nodes))

    def predict_draft(self, num_streams: int, length: int, nodes: float) -> float:
        """Return the seconds of the drafter in a step."""
        return self.planner.draft_cost.predict(num_streams, length, nodes)


def fit_costs(points: Sequence[tuple[int, float]], runs: StreamRuns, row_buckets: Sequence[int] = ()) -> FittedCosts:
    """Fit the costs of steps to their reports.

    Args:
        points: (rows, seconds) of the target's pass alone.
        runs: the steps.
        row_buckets: numbers of rows that passes are padded to; () = they are not padded.
    """
    curve, draft_cost = CostCurve(points, row_buckets), DraftCost()
    reports = drop_outliers(runs.decode_reports)
    # The fit forgets: in the order of measurement it would know the lengths of the last waves only.
    random.Random(0).shuffle(reports)
    for _ in range(NUM_SETTLING_PASSES):
        for report in reports:
            _add_report(curve, draft_cost, report)
    pass_tokens = sum(report.num_pass_tokens for report in reports)
    attended = sum(report.attended_tokens for report in reports)
    return FittedCosts(Planner(curve, draft_cost), attended / max(pass_tokens, 1), len(reports), runs.gap_seconds)


def drop_outliers(reports: Sequence[StepReport]) -> list[StepReport]:
    """Return the reports without steps that took more than MAX_SLOWNESS times the median of those of their length.

    Another program that interrupts a step has nothing to do with its cost.
    """
    times: dict[int, list[float]] = {}
    for report in reports:
        times.setdefault(_find_length(report), []).append(report.step_time)
    medians = {length: statistics.median(group) for length, group in times.items()}
    return [report for report in reports if report.step_time <= MAX_SLOWNESS * medians[_find_length(report)]]


def _find_length(report: StepReport) -> int:
    """Return the draft nodes granted to each request of a step."""
    return max([outcome.granted_nodes for outcome in report.outcomes], default=0)


def _add_report(curve: CostCurve, draft_cost: DraftCost, report: StepReport) -> None:
    size = report.num_requests, report.num_pass_tokens, report.num_logit_rows, report.attended_tokens
    pass_seconds = curve.update(*size, max(report.step_time - report.draft_time, 0.0))
    longest = _find_length(report)
    nodes = sum(outcome.num_drafted for outcome in report.outcomes)
    draft_cost.update(
        requests=len(report.outcomes), longest=longest, nodes=nodes, unread=0, newcomers=0,
        seconds=report.draft_time, scale=pass_seconds,
    )  # fmt: skip
