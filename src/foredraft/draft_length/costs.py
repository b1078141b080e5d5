"""Cost models of a step, and the planner that chooses the draft nodes with the most tokens per second.

The time of the target's forward pass is predicted from a measured curve, the time of a draft from earlier drafts. Both
are linear in a few features and fitted online. All times are in seconds. Pure: numbers in, numbers out, no clock.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FORGETTING_STEPS = 128  # observations after which the weight of an observation has decayed to 1 / e
OUTLIER_SHARE = 0.5  # a time further than this share from the prediction is clipped to that distance
MAX_OUTLIER_DOUBLINGS = 30  # upper limit on the doublings of that distance
NUM_EAGER_FITS = 16  # observations after each of which the coefficients are fitted
FIT_INTERVAL = 12  # observations between later fits
DENSE_OBSERVATIONS = 64  # observations that are all used; later only every second one is
MIN_SECONDS = 1e-9  # lower limit on times and their sums, against division by zero
RIDGE = 1e-9  # added to the diagonal of the normal equations
MIN_UNREAD_TO_RESUME = 4  # a draft that follows more unread tokens than this measures the cost of reading them
# Tokens of a prompt of unknown length. A low value overestimates the cost of reading a token.
ASSUMED_PROMPT_TOKENS = 64


class OnlineRegression:
    """Least squares on relative errors, with exponential forgetting, a prior, and non-negative coefficients.

    Args:
        prior: prior value of each coefficient.
        prior_strength: strength of each prior, in observations that this coefficient alone would explain.
        num_unclipped: first observations that are not clipped as outliers, for a prior that is no prediction.
    """

    def __init__(self, prior: Sequence[float], prior_strength: Sequence[float], num_unclipped: int = 0) -> None:
        self.weights = list(prior)
        self._prior, self._prior_strength = np.array(prior), np.array(prior_strength)
        self._gram = np.zeros((len(prior), len(prior)))
        self._moment = np.zeros(len(prior))
        self._num_unclipped = num_unclipped
        self._num_observations = 0
        # Recent outliers in one direction, + above and - below the prediction; each doubles the distance to clip at.
        self._outlier_balance = 0

    def predict(self, features: Sequence[float]) -> float:
        """Return the predicted seconds."""
        return sum([w * x for w, x in zip(self.weights, features, strict=True)])

    def update(self, features: Sequence[float], seconds: float, scale: float = 0.0) -> float:
        """Add one observation.

        Args:
            features: as many as coefficients.
            seconds: the measured time.
            scale: unit of the error in seconds; 0 = the prediction, so that errors are relative.

        Returns:
            The measured time, clipped if it is an outlier.
        """
        predicted = self.predict(features)
        clipped = self._clip_outlier(seconds, predicted, max(predicted, scale))
        self._num_observations += 1
        # Adding an observation takes longer than the rest of a decision.
        if self._num_observations > DENSE_OBSERVATIONS and self._num_observations % 2:
            return clipped
        unit = 1.0 / (scale or predicted or max(clipped, MIN_SECONDS))
        x = np.array(features) * unit
        decay = (1.0 - 1.0 / FORGETTING_STEPS) ** (2 if self._num_observations > DENSE_OBSERVATIONS else 1)
        self._gram *= decay
        self._moment *= decay
        self._gram += x[:, None] * x
        self._moment += x * (clipped * unit)
        if self._num_observations <= NUM_EAGER_FITS or self._num_observations % FIT_INTERVAL == 0:
            self._fit()
        return clipped

    def _clip_outlier(self, seconds: float, predicted: float, scale: float) -> float:
        """Clip a time that is far from the prediction.

        A single slow step is clipped. If several follow in the same direction, the machine has changed: the distance
        doubles with each, so the estimate soon follows.
        """
        if self._num_observations < self._num_unclipped or scale <= 0.0:
            return seconds
        distance = scale * OUTLIER_SHARE * 2.0 ** min(abs(self._outlier_balance), MAX_OUTLIER_DOUBLINGS)
        if abs(seconds - predicted) <= distance:
            self._outlier_balance -= (self._outlier_balance > 0) - (self._outlier_balance < 0)
            return seconds
        side = 1 if seconds > predicted else -1
        self._outlier_balance = self._outlier_balance + side if self._outlier_balance * side >= 0 else side
        return predicted + side * distance

    def _fit(self) -> None:
        """Solve the normal equations; drop features with a negative coefficient and solve again."""
        total = (1.0 - (1.0 - 1.0 / FORGETTING_STEPS) ** self._num_observations) * FORGETTING_STEPS
        norms = np.sqrt(self._gram.diagonal())  # a feature that was always 0 keeps its prior
        active = np.flatnonzero(norms)
        gram = self._gram / np.outer(norms, norms).clip(1e-30) + np.diag(self._prior_strength / total + RIDGE)
        moment = self._moment / norms.clip(1e-15) + (self._prior_strength / total + RIDGE) * self._prior * norms
        weights = np.where(norms > 0.0, 0.0, self._prior)
        while active.size:
            solution = np.linalg.solve(gram[active][:, active], moment[active])
            if solution.min() >= 0.0:
                weights[active] = solution / norms[active]
                break
            active = active[solution > 0.0]
        self.weights = weights.tolist()


class CostCurve:
    """Time of a forward pass of the target: a measured curve over its tokens, corrected by an online regression.

    `points` are (tokens of the pass, seconds) with ascending tokens. The curve is linear between two points and keeps
    the last slope after the last point, so a plateau needs a point at both ends. Without points the time does not
    depend on the tokens until measured steps show otherwise.

    Raises:
        ValueError: if the tokens of `points` are not strictly ascending.
    """

    def __init__(self, points: Sequence[tuple[int, float]] = ()) -> None:
        self._sizes = [float(pass_tokens) for pass_tokens, _ in points]
        self._seconds = [seconds for _, seconds in points]
        if self._sizes != sorted(set(self._sizes)):
            raise ValueError("the points of a cost curve must have rising numbers of tokens, each once")
        self.is_measured = bool(points)
        curve_weight = 1.0 if points else 0.0
        # Coefficients of the curve, 1, requests, rows of logits, attended tokens. The first prior is the weakest,
        # because the whole pass becomes faster or slower far more often than one of its parts.
        prior_strength = (0.01, 0.1 if points else 0.01, 0.1, 0.1, 0.2)
        self._regression = OnlineRegression((curve_weight, 0.0, 0.0, 0.0, 0.0), prior_strength, 0 if points else 8)

    def interpolate(self, pass_tokens: float) -> float:
        """Return the seconds of the measured curve; 0 without points."""
        sizes, seconds = self._sizes, self._seconds
        if not sizes:
            return 0.0
        if pass_tokens <= sizes[0] or len(sizes) == 1:
            return seconds[0]
        right = min(bisect_right(sizes, pass_tokens), len(sizes) - 1)
        slope = (seconds[right] - seconds[right - 1]) / (sizes[right] - sizes[right - 1])
        return max(0.0, seconds[right - 1] + slope * (pass_tokens - sizes[right - 1]))

    def predict(self, requests: int, pass_tokens: float, logit_rows: float, attended_tokens: float) -> float:
        """Return the predicted seconds of a forward pass.

        Args:
            requests: requests of the pass.
            pass_tokens: tokens of the pass.
            logit_rows: tokens of the pass whose logits are computed.
            attended_tokens: tokens that a token of the pass attends to, summed over the pass.
        """
        curve_factor, base, per_request, per_logit_row, per_attended = self._regression.weights
        seconds = curve_factor * self.interpolate(pass_tokens) + base + per_request * requests
        return seconds + per_logit_row * logit_rows + per_attended * attended_tokens

    def predict_many(self, requests: int, pass_tokens: Floats, logit_rows: Floats, attended_tokens: Floats) -> Floats:
        """Return the predictions for many sizes at once; all arrays have the same shape [N]."""
        curve_factor, base, per_request, per_logit_row, per_attended = self._regression.weights
        seconds = curve_factor * self._interpolate_many(pass_tokens) + (base + per_request * requests)
        return seconds + per_logit_row * logit_rows + per_attended * attended_tokens

    def update(self, requests: int, pass_tokens: int, logit_rows: int, attended_tokens: int, seconds: float) -> float:
        """Add the measured time of a forward pass, and return it, clipped if it is an outlier."""
        return self._regression.update(
            (self.interpolate(pass_tokens), 1.0, requests, logit_rows, attended_tokens), seconds
        )

    def _interpolate_many(self, pass_tokens: Floats) -> Floats:
        if len(self._sizes) < 2:
            return np.full(len(pass_tokens), self.interpolate(0))
        inside: Floats = np.interp(pass_tokens, self._sizes, self._seconds)
        slope = (self._seconds[-1] - self._seconds[-2]) / (self._sizes[-1] - self._sizes[-2])
        return np.maximum(inside + slope * np.maximum(pass_tokens - self._sizes[-1], 0.0), 0.0)


class DraftCost:
    """Time of a draft: a cost per request that is only observed, and a cost of drafting by `longest` and `nodes`.

    `longest` is the largest number of nodes granted to one request. It is the depth if the draft is a chain, and an
    upper limit on the depth of a tree. `nodes` counts the nodes of all requests.

    Catching up is separate. A drafter that reads tokens only when it drafts has to read all `unread` tokens after a
    pause, and a prompt of unknown length for each of the `newcomers`. That is the cost of resuming, not of a draft.
    """

    def __init__(self) -> None:
        self._has_resumed = False  # until a draft followed a pause, the cost per token comes from reading prompts
        self._idle_regression = OnlineRegression((0.0,), (0.0,), num_unclipped=1)  # by requests
        # Coefficients of 1, longest, nodes, unread, newcomers. Collinear features share the time that they explain.
        self._regression = OnlineRegression((0.0,) * 5, (0.02, 0.005, 0.2, 0.02, 0.02), num_unclipped=4)

    def predict(self, requests: int, longest: int, nodes: float, unread: int = 0, newcomers: int = 0) -> float:
        """Return the predicted seconds in the drafter; longest = 0 is a step without a draft."""
        idle = self._idle_regression.weights[0] * requests
        if not longest:
            return idle
        base, per_level, per_node, per_unread, per_newcomer = self._regression.weights
        if not self._has_resumed:
            per_unread = per_newcomer / ASSUMED_PROMPT_TOKENS
        return idle + base + per_level * longest + per_node * nodes + per_unread * unread + per_newcomer * newcomers

    def predict_many(self, requests: int, longest: int, nodes: Floats) -> Floats:
        """Return the predictions for many numbers of nodes at one value of `longest`."""
        _, _, per_node, _, _ = self._regression.weights
        return self.predict(requests, longest, nodes=0.0) + per_node * nodes

    def update(
        self, requests: int, longest: int, nodes: int, unread: int, newcomers: int, seconds: float, scale: float
    ) -> float:
        """Add the measured time of a draft, and return it, clipped if it is an outlier.

        `scale` is the time of the target's forward pass in the same step: errors are weighted by their share of it.
        """
        if not longest:
            return self._idle_regression.update((requests,), seconds, scale)
        idle = self._idle_regression.weights[0] * requests
        self._has_resumed = self._has_resumed or unread > MIN_UNREAD_TO_RESUME
        return idle + self._regression.update((1.0, longest, nodes, unread, newcomers), max(seconds - idle, 0.0), scale)


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

    def estimate_baseline(self, shape: StepShape) -> tuple[float, float]:
        """Return (tokens, seconds) of the step with only the drafts of fixed length.

        Prompt chunks cost the same with and without drafts, so they are left out. The added time of draft nodes is
        taken at the real number of tokens.
        """
        decode_only = replace(shape, num_pass_tokens=shape.num_requests)
        seconds = self.plain_cost_ratio * self.estimate_verify_time(decode_only, 0) + self.draft_cost.predict(
            shape.num_requests, shape.fixed_longest, shape.fixed_nodes
        )
        if shape.fixed_nodes:
            seconds += self.estimate_verify_time(shape, shape.fixed_nodes) - self.estimate_verify_time(shape, 0)
        return shape.num_requests + shape.fixed_accepted, max(seconds, MIN_SECONDS)

    def _plan_one(
        self, shape: StepShape, slot: int, least: int, survival: Sequence[float], draft_probs: Sequence[float]
    ) -> LengthPlan:
        """Plan for one request: evaluate every draft length above the least."""
        tokens, seconds = plain_tokens, plain_seconds = self.estimate_baseline(shape)
        before = self.estimate_verify_time(shape, shape.fixed_nodes)
        seconds -= self.draft_cost.predict(shape.num_requests, shape.fixed_longest, shape.fixed_nodes)
        nodes, best_rate, best_length, best_accepted = float(shape.fixed_nodes), 0.0, least, 0.0
        for n in range(least + 1, len(survival) + 1):
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
        tokens, seconds = self.estimate_baseline(shape)
        count, width = survival.shape
        order = np.argsort(-survival, axis=None, kind="stable")  # equal nodes of one request stay in their order
        request, node = order // width, order % width + 1
        least, most = limits[:, 0], limits[:, 1]
        allowed = (node > least[request]) & (node <= most[request])
        order, request, node = order[allowed], request[allowed], node[allowed]
        survival, draft_probs = survival.ravel()[order], draft_probs.ravel()[order]
        # Log probability that a request has no draft beyond its least length, at the node that would be the next.
        log_no_draft = np.where(node == least[request] + 1, np.log1p(-np.minimum(draft_probs, 1.0 - 1e-9)), 0.0)
        before = self.estimate_verify_time(shape, shape.fixed_nodes)
        rest = seconds - before - self.draft_cost.predict(shape.num_requests, shape.fixed_longest, shape.fixed_nodes)
        best_rate, best_longest, best_size, best_accepted = 0.0, 0, 0, 0.0
        for longest in _list_lengths(width):
            inside = node <= longest
            if longest <= least.min():
                continue  # no node is inside
            accepted, expected_nodes = np.cumsum(survival[inside]), np.cumsum(draft_probs[inside])
            any_draft = -np.expm1(np.cumsum(log_no_draft[inside]))
            # The pass is priced at the nodes given that there is a draft, not at the mean: rare drafts come whole, and
            # the time of a pass is a step function of its tokens.
            nodes = expected_nodes / any_draft + shape.fixed_nodes
            pass_tokens, scored = shape.num_pass_tokens + nodes, shape.num_requests + nodes
            cost = any_draft * self.curve.predict_many(
                shape.num_requests, pass_tokens, scored, shape.context_per_token * pass_tokens
            )
            cost += (1.0 - any_draft) * before + rest
            cost += self.draft_cost.predict_many(
                shape.num_requests, max(longest, shape.fixed_longest), expected_nodes + shape.fixed_nodes
            )
            rate = (tokens + accepted) / np.maximum(cost, MIN_SECONDS)
            n = int(rate.argmax())
            if rate[n] > best_rate:
                best_rate, best_longest, best_size, best_accepted = float(rate[n]), longest, n + 1, float(accepted[n])
        added = np.bincount(request[node <= best_longest][:best_size], minlength=count)
        granted = (least + added).tolist()
        acceptance = best_accepted / best_size if best_size else 0.0
        nodes_by_slot = dict(zip(slots, granted, strict=True))
        return LengthPlan(nodes_by_slot, max(granted), tokens / seconds, best_rate, acceptance)


def _list_lengths(max_length: int) -> list[int]:
    """Return every draft length up to 8, then lengths a quarter apart: each takes one pass over the candidates."""
    lengths = list(range(1, min(max_length, 8) + 1))
    while lengths[-1] < max_length:
        lengths.append(min(max_length, lengths[-1] + max(1, lengths[-1] // 4)))
    return lengths
