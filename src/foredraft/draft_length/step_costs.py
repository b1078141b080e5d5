"""Measured costs of steps: forward pass, draft, and the slowdown of the machine, by kind of request.

Pure: no clock. All times are in seconds.
"""

from copy import deepcopy

from foredraft.draft_length.costs import CostCurve, DraftCost
from foredraft.draft_length.planner import Planner
from foredraft.draft_length.policy import StepReport

SLOWDOWN_SMOOTHING = 0.2  # weight of the newest step in the slowdown of the machine
PAUSED_SLOWDOWN_SMOOTHING = 0.5  # the same for plain steps during a pause
PLAIN_COST_SMOOTHING = 0.25  # weight of the newest plain step in the ratio of measured to predicted cost
MAX_RATIO = 1.25  # measured over predicted time of a pass in either; a step that the system delayed counts no more
MAX_CLIPPED_RATIO = 1.5  # measured over predicted seconds of a step that changes no cost


class StepCosts:
    """Costs of the current kind of request: 0 greedy, 1 sampled. Sampling tokens and drafts takes longer than argmax.

    Args:
        curve: time of a forward pass of the target by its number of tokens.
        draft_cost: time of a draft.

    Attributes:
        kind: current kind; `curve`, `draft_cost` and `planner` are for it.
        slowdown: current step time over the usual one; all other times are divided by it.
    """

    def __init__(self, curve: CostCurve, draft_cost: DraftCost) -> None:
        self.curve, self.draft_cost = curve, draft_cost
        self.planner = Planner(curve, draft_cost)
        self.kind = 0
        self.slowdown = 1.0
        self._by_kind = dict[int, tuple[CostCurve, DraftCost, Planner]]()  # those of the other kinds

    def select_kind(self, kind: int) -> None:
        """Switch to the costs of another kind. A kind without costs starts from the current curve."""
        self._by_kind[self.kind] = self.curve, self.draft_cost, self.planner
        if kind not in self._by_kind:
            curve, draft_cost = deepcopy(self.curve), DraftCost()
            self._by_kind[kind] = curve, draft_cost, Planner(curve, draft_cost)
        self.curve, self.draft_cost, self.planner = self._by_kind[kind]
        self.kind = kind

    def record(
        self, report: StepReport, longest: int, nodes: int, unread: int, newcomers: int, is_new: bool = False
    ) -> float:
        """Add the times of a step.

        Args:
            report: the step.
            longest: most nodes that one request was granted; 0 = a plain step.
            nodes: draft nodes of all requests.
            unread: tokens that the drafter read before it drafted.
            newcomers: requests that drafted for the first time.
            is_new: drafting has just begun or resumed, so the step does not show the slowness of the machine.

        Returns:
            Seconds of forward pass and drafter, clipped if they are outliers.
        """
        pass_size = report.num_requests, report.num_pass_tokens, report.num_logit_rows, report.attended_tokens
        predicted_pass, confidence = self.curve.predict(*pass_size), self.curve.get_confidence(report.num_pass_tokens)
        raw_pass_seconds = max(report.step_time - report.draft_time, 0.0)
        if not longest and not is_new:
            # Nothing tells a slow machine from slow plain steps during a pause, and drafts are as slow if the machine
            # is. So the slowdown takes the change first, and the curve learns what is left. Otherwise plain steps stay
            # too costly beside drafts if the machine is fast again.
            seconds, weight = raw_pass_seconds / self.slowdown, PAUSED_SLOWDOWN_SMOOTHING * confidence
            self._update_slowdown(seconds, predicted_pass, weight)
        # Both calls of `update` return the measured seconds, clipped if they are an outlier.
        pass_seconds = self.curve.update(*pass_size, raw_pass_seconds / self.slowdown, counts_at_once=not longest)
        draft_seconds = report.draft_time / self.slowdown
        if report.is_observed:  # other steps do not have the costs that a step with drafts has
            draft_seconds = self.draft_cost.update(
                requests=len(report.outcomes), longest=longest, nodes=nodes, unread=unread, newcomers=newcomers,
                seconds=draft_seconds, scale=pass_seconds,
            )  # fmt: skip
        if longest and not is_new:  # a size that is new shows its own price, not that of the machine
            self._update_slowdown(pass_seconds, predicted_pass, SLOWDOWN_SMOOTHING * confidence)
        if not longest and predicted_pass > 0.0 and report.num_pass_tokens == report.num_requests:  # without a prompt
            ratio = _compute_ratio(pass_seconds, self.curve.predict(*pass_size))  # what the curve has not learnt
            self.planner.plain_cost_ratio += PLAIN_COST_SMOOTHING * (ratio - self.planner.plain_cost_ratio)
        return pass_seconds + draft_seconds

    def _update_slowdown(self, seconds: float, predicted: float, weight: float) -> None:
        if predicted > 0.0:
            self.slowdown *= 1.0 + weight * (_compute_ratio(seconds, predicted) - 1.0)

    def predict(self, report: StepReport, longest: int, nodes: int, unread: int, newcomers: int) -> float:
        """Return the predicted seconds of forward pass and drafter; arguments of `record`."""
        size = report.num_requests, report.num_pass_tokens, report.num_logit_rows, report.attended_tokens
        return self.curve.predict(*size) + self.draft_cost.predict(
            len(report.outcomes), longest, nodes, unread, newcomers
        )

    def clip(self, report: StepReport, longest: int, nodes: int, unread: int, newcomers: int) -> float:
        """Return the seconds of a step that changes no cost, clipped if they are an outlier; arguments of `record`."""
        predicted = self.predict(report, longest, nodes, unread, newcomers)
        return min(report.step_time / self.slowdown, MAX_CLIPPED_RATIO * predicted)

    def estimate_draft(self, longest: int, nodes: int, num_pass_tokens: int) -> float:
        """Return the seconds that drafts add to a step, in the drafter and in the target's forward pass.

        `requests=0` leaves out the cost of observing, which does not depend on the draft.
        """
        drafter_seconds = self.draft_cost.predict(requests=0, longest=longest, nodes=nodes)
        return self.planner.estimate_added_pass_time(num_pass_tokens, nodes) + drafter_seconds

    def estimate_catch_up(self, unread: int, newcomers: int) -> float:
        """Return the seconds that the drafter takes to read unread tokens.

        It is the difference between two drafts that are equal in all but the unread tokens.
        """
        with_unread = self.draft_cost.predict(requests=0, longest=1, nodes=0, unread=unread, newcomers=newcomers)
        return with_unread - self.draft_cost.predict(requests=0, longest=1, nodes=0)

    def estimate_observing(self, report: StepReport) -> float:
        """Return the seconds that the drafter takes in a step like this one if nothing is drafted."""
        return self.draft_cost.predict(requests=len(report.outcomes), longest=0, nodes=0) if report.is_observed else 0.0

    def predict_without_drafts(self, report: StepReport, nodes: int) -> tuple[float, float]:
        """Return the predicted cost of the plain step, and of the step without its drafts.

        The plain step leaves out the prompt chunks too. Neither includes the time in which the drafter observes a step,
        because plain decoding has no drafter.

        Args:
            report: the step.
            nodes: draft nodes of all requests.
        """
        count = len(report.outcomes)  # requests that got a new token
        context = report.attended_tokens / max(report.num_pass_tokens, 1)  # attended tokens per token of the pass
        ratio, curve = self.planner.plain_cost_ratio, self.curve
        num_tokens, num_rows = report.num_pass_tokens - nodes, report.num_logit_rows - nodes  # those without drafts
        pass_cost = curve.predict(report.num_requests, num_tokens, num_rows, context * num_tokens)
        cost_without_drafts = ratio * pass_cost
        if nodes:  # it does not take longer than with them
            pass_size = report.num_requests, report.num_pass_tokens, report.num_logit_rows, report.attended_tokens
            cost_without_drafts = min(cost_without_drafts, curve.predict(*pass_size))
        if num_tokens == count:  # the step has no prompt chunk
            return cost_without_drafts, cost_without_drafts
        plain_pass_cost = curve.predict(count, count, count, context * count)
        return ratio * plain_pass_cost, cost_without_drafts


def _compute_ratio(seconds: float, predicted: float) -> float:
    """Return measured over predicted seconds, within MAX_RATIO."""
    return min(max(seconds / predicted, 1.0 / MAX_RATIO), MAX_RATIO)
