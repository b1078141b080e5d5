"""Planner that chooses the draft nodes with the most tokens per second. Pure: numbers in, numbers out, no clock."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from foredraft.draft_length.costs import CostCurve, DraftCost, Floats

Ints = NDArray[np.int64]

MAX_COMPARED_NODES = 8  # a plain pass is compared with passes of up to this many draft nodes
KNOWN_CONFIDENCE = 0.6  # confidence from which the time of such a pass is well known
LARGER_TIME_MARGIN = 1.1  # a plain pass takes at most this multiple of it; less would follow the noise of the lowest
MIN_SECONDS = 1e-9  # lower limit on sums of times, against division by zero


@dataclass(frozen=True)
class StepShape:
    """Size of a step before its drafts, including drafts of fixed length and the least length of other drafts."""

    num_requests: int  # requests that get a new token in this step
    num_pass_tokens: int  # tokens of the forward pass without draft nodes
    context_per_token: float  # mean number of tokens that a token of the pass attends to
    fixed_longest: int = 0  # largest least length of a request; the least length of a fixed draft is its length
    fixed_nodes: int = 0  # draft nodes of all requests up to their least lengths
    fixed_accepted: float = 0.0  # expected accepted tokens of those nodes


@dataclass(frozen=True)
class LengthPlan:
    """Draft nodes per request with the highest predicted rate, whether or not it exceeds that of plain decoding."""

    nodes_by_slot: dict[int, int] = field(default_factory=dict)  # slot -> draft nodes
    longest: int = 0  # largest number of nodes of one request
    plain_rate: float = 0.0  # predicted tokens per second without these drafts
    rate: float = 0.0  # predicted tokens per second with them
    acceptance: float = 0.0  # predicted share of their nodes that is accepted

    @property
    def speedup(self) -> float:
        """Predicted rate over that without drafts; 0 for an empty plan."""
        return self.rate / self.plain_rate if self.plain_rate > 0.0 else 0.0


class Planner:
    """Maximises predicted tokens per second over all admissible sets of draft nodes.

    A set holds a prefix of each request's nodes. Nodes of all requests are admitted in order of survival (the
    likeliest first), up to a limit on the nodes of one request.
    """

    def __init__(self, curve: CostCurve, draft_cost: DraftCost) -> None:
        self.curve, self.draft_cost = curve, draft_cost
        self.plain_cost_ratio = 1.0  # measured over predicted time of plain steps; updated by the policy

    def find_best_plan(
        self,
        shape: StepShape,
        slots: Sequence[int],
        limits: Sequence[tuple[int, int]],
        survival: list[list[float]],
        draft_probs: list[list[float]],
    ) -> LengthPlan:
        """Return the best plan.

        All sets are evaluated, because the time of a pass is a step function of its tokens: a set that does not pay on
        one plateau may pay at the end of the next.

        Args:
            shape: the step without these drafts.
            slots: B slots of the requests to plan for.
            limits: B lower and upper limits on nodes. The shape includes the nodes up to the lower limits.
            survival: [B][N] of `SurvivalEstimator.estimate_survival`, where N is the largest upper limit.
            draft_probs: [B][N] of `SurvivalEstimator.estimate_draft_probs`.
        """
        if len(slots) == 1:
            return self._plan_one(shape, slots[0], limits[0][0], survival[0], draft_probs[0])
        return self._plan_many(shape, slots, np.array(limits), np.array(survival), np.array(draft_probs))

    def estimate_verify_time(self, shape: StepShape, nodes: float) -> float:
        """Return the predicted seconds of the forward pass with this many draft nodes."""
        pass_tokens, scored = shape.num_pass_tokens + nodes, shape.num_requests + nodes
        return self.curve.predict(shape.num_requests, pass_tokens, scored, shape.context_per_token * pass_tokens)

    def estimate_added_pass_time(self, num_pass_tokens: int, nodes: int) -> float:
        """Return the seconds that draft nodes add to a forward pass of `num_pass_tokens` tokens.

        The time per request cancels in the difference, so the number of requests may be 0. The time in which the added
        tokens attend to their context is neglected.
        """
        shape = StepShape(num_requests=0, num_pass_tokens=num_pass_tokens, context_per_token=0.0)
        return self.estimate_verify_time(shape, nodes) - self.estimate_verify_time(shape, 0)

    def estimate_baseline(self, shape: StepShape, pass_ratio: float) -> tuple[float, float]:
        """Return (tokens, seconds) of the step with only the drafts of fixed length.

        Prompt chunks cost the same with and without drafts, so they are left out. The added time of draft nodes is
        taken at the real number of tokens. Without any draft, the drafter takes no time, not even to observe the step.

        Args:
            shape: the step.
            pass_ratio: factor on the time of the pass: `plain_cost_ratio` for a step that stays without further
                drafts, 1 for one that gets some. It is the price of plain steps, and passes with drafts have their own.
        """
        decode_only = replace(shape, num_pass_tokens=shape.num_requests)
        seconds = pass_ratio * self.estimate_verify_time(decode_only, 0)
        seconds = min(seconds, self._limit_undrafted_time(decode_only)) + self._estimate_fixed_drafting(shape)
        if shape.fixed_nodes:
            seconds += self.estimate_verify_time(shape, shape.fixed_nodes) - self.estimate_verify_time(shape, 0)
        return shape.num_requests + shape.fixed_accepted, max(seconds, MIN_SECONDS)

    def _estimate_fixed_drafting(self, shape: StepShape) -> float:
        """Return the predicted seconds of the drafter for the drafts of fixed length."""
        if not shape.fixed_longest:
            return 0.0
        return self.draft_cost.predict(shape.num_requests, shape.fixed_longest, shape.fixed_nodes)

    def _limit_undrafted_time(self, shape: StepShape) -> float:
        """Return an upper limit on the seconds of the pass without these drafts; infinity if there is none.

        It takes no longer than passes with a few nodes, of which those count whose time is well known. Plain steps are
        rare while drafts pay, so one that the system delayed would otherwise count for long.
        """
        num_fixed = shape.fixed_nodes
        known = [
            self.estimate_verify_time(shape, num_fixed + n)
            for n in range(1, MAX_COMPARED_NODES + 1)
            if self.curve.get_confidence(shape.num_pass_tokens + num_fixed + n) > KNOWN_CONFIDENCE
        ]
        return LARGER_TIME_MARGIN * min(known, default=math.inf)

    def _plan_one(
        self, shape: StepShape, slot: int, least: int, survival: Sequence[float], draft_probs: Sequence[float]
    ) -> LengthPlan:
        """Plan for one request: evaluate every draft length above the least."""
        plain_tokens, plain_seconds = self.estimate_baseline(shape, self.plain_cost_ratio)
        tokens, seconds = self.estimate_baseline(shape, 1.0)
        before = min(self.estimate_verify_time(shape, shape.fixed_nodes), self._limit_undrafted_time(shape))
        seconds -= self._estimate_fixed_drafting(shape)
        nodes, best_rate, best_length, best_accepted = float(shape.fixed_nodes), 0.0, least, 0.0
        room = self.curve.count_free_rows(shape.num_pass_tokens + shape.fixed_nodes)
        longest = len(survival) if room is None else min(len(survival), least + room)
        for n in range(least + 1, longest + 1):
            node_survival, draft_prob = survival[n - 1], draft_probs[n - 1]
            after = self.estimate_verify_time(shape, shape.fixed_nodes + n - least)
            tokens, nodes, seconds = tokens + node_survival, nodes + draft_prob, seconds + draft_prob * (after - before)
            before = after
            drafting = self.draft_cost.predict(shape.num_requests, max(n, shape.fixed_longest), nodes)
            rate = tokens / max(seconds + drafting, MIN_SECONDS)
            if rate > best_rate:
                best_rate, best_length, best_accepted = rate, n, tokens - plain_tokens
        acceptance = best_accepted / (best_length - least) if best_length > least else 0.0
        return LengthPlan({slot: best_length}, best_length, plain_tokens / plain_seconds, best_rate, acceptance)

    def _plan_many(
        self, shape: StepShape, slots: Sequence[int], limits: Ints, survival: Floats, draft_probs: Floats
    ) -> LengthPlan:
        """Plan for several requests: limits [B, 2], survival and draft_probs [B, N]."""
        tokens, seconds = self.estimate_baseline(shape, self.plain_cost_ratio)
        _, baseline = self.estimate_baseline(shape, 1.0)
        count, width = survival.shape
        order = np.argsort(-survival, axis=None, kind="stable")  # equal nodes of one request stay in their order
        request, node = order // width, order % width + 1
        least, most = limits[:, 0], limits[:, 1]
        allowed = (node > least[request]) & (node <= most[request])
        order, request, node = order[allowed], request[allowed], node[allowed]
        survival, draft_probs = survival.ravel()[order], draft_probs.ravel()[order]
        # Log probability that a request has no draft beyond its least length, at the node that would be the next.
        log_no_draft = np.where(node == least[request] + 1, np.log1p(-np.minimum(draft_probs, 1.0 - 1e-9)), 0.0)
        lengths = [longest for longest in _list_lengths(width) if longest > least.min()]
        inside = node <= np.array(lengths)[:, None]  # [L, N]: the nodes of the sets that are no longer than each length
        sizes = np.cumsum(inside, 1)
        accepted, expected_nodes = (np.cumsum(np.where(inside, x, 0.0), 1) for x in (survival, draft_probs))
        any_draft = np.maximum(-np.expm1(np.cumsum(np.where(inside, log_no_draft, 0.0), 1)), MIN_SECONDS)
        cost = self._estimate_costs(shape, baseline, lengths, expected_nodes, any_draft)
        rates = np.where(inside, (tokens + accepted) / np.maximum(cost, MIN_SECONDS), 0.0)
        room = self.curve.count_free_rows(shape.num_pass_tokens + shape.fixed_nodes)
        if room is not None:
            rates[sizes > room] = 0.0
        best = np.unravel_index(int(rates.argmax()), rates.shape) if rates.size else None
        if best is None or rates[best] <= 0.0:
            nodes_by_slot = dict(zip(slots, least.tolist(), strict=True))
            return LengthPlan(nodes_by_slot, int(least.max()), tokens / seconds)
        size = int(sizes[best])
        granted = (least + np.bincount(request[inside[best[0]]][:size], minlength=count)).tolist()
        nodes_by_slot = dict(zip(slots, granted, strict=True))
        acceptance = float(accepted[best]) / size
        return LengthPlan(nodes_by_slot, max(granted), tokens / seconds, float(rates[best]), acceptance)

    def _estimate_costs(
        self, shape: StepShape, baseline: float, lengths: Sequence[int], expected_nodes: Floats, any_draft: Floats
    ) -> Floats:
        """Return the predicted seconds of a step with each set, [L, N].

        The pass is priced at the nodes given that there is a draft, not at the mean: rare drafts come whole, and the
        time of a pass is a step function of its tokens.

        Args:
            shape: the step without these drafts.
            baseline: predicted seconds of that step.
            lengths: L longest drafts.
            expected_nodes: nodes of each set that are drafted on average, [L, N].
            any_draft: probability that any of them is drafted, [L, N].
        """
        before = min(self.estimate_verify_time(shape, shape.fixed_nodes), self._limit_undrafted_time(shape))
        rest = baseline - before - self._estimate_fixed_drafting(shape)
        nodes = expected_nodes / any_draft + shape.fixed_nodes
        pass_tokens = shape.num_pass_tokens + nodes
        added = self.curve.predict_many(
            shape.num_requests, pass_tokens, shape.num_requests + nodes, shape.context_per_token * pass_tokens
        )
        longest = [max(length, shape.fixed_longest) for length in lengths]
        drafting = self.draft_cost.predict_many(shape.num_requests, longest, expected_nodes + shape.fixed_nodes)
        return any_draft * (added - before) + before + rest + drafting


def cut_nodes(nodes_by_slot: dict[int, int], room: int | None) -> dict[int, int]:
    """Take nodes from the longest drafts until there are at most `room`; None = no limit."""
    excess = 0 if room is None else sum(nodes_by_slot.values()) - room
    if excess <= 0:
        return nodes_by_slot
    result = dict(nodes_by_slot)
    for _ in range(min(excess, sum(result.values()))):
        result[max(result, key=result.__getitem__)] -= 1
    return result


def _list_lengths(max_length: int) -> list[int]:
    """Return every draft length up to 8, then lengths a quarter apart: each takes one pass over the candidates."""
    lengths = list(range(1, min(max_length, 8) + 1))
    while lengths[-1] < max_length:
        lengths.append(min(max_length, lengths[-1] + max(1, lengths[-1] // 4)))
    return lengths
