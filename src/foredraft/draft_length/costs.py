"""Cost models of a step: the time of the target's forward pass by its size, and the time of a draft.

The time of a pass is predicted from a measured curve, the time of a draft from earlier drafts. Both are linear in a few
features and fitted online. All times are in seconds. Pure: numbers in, numbers out, no clock.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foredraft.draft_length.online_regression import OnlineRegression
from foredraft.draft_length.size_correction import SizeCorrection

Floats = NDArray[np.float64]

MIN_UNREAD_TO_RESUME = 4  # a draft that follows more unread tokens than this measures the cost of reading them
ROUNDING = 1e-6  # tokens that a mean number of tokens may exceed a bucket by
# Tokens of a prompt of unknown length. A low value overestimates the cost of reading a token.
ASSUMED_PROMPT_TOKENS = 64


class CostCurve:
    """Time of a forward pass of the target: a measured curve over its tokens, corrected by an online regression.

    `points` are (tokens of the pass, seconds) with ascending tokens. The curve is linear between two points and keeps
    the last slope after the last point, so a plateau needs a point at both ends. Without points the time does not
    depend on the tokens until measured steps show otherwise.

    With `row_buckets`, a pass costs what the smallest bucket costs that holds its tokens, as a pass does that replays a
    graph captured for this number of rows. A pass that exceeds the last bucket costs what its tokens cost. Default () =
    every number of tokens has its own cost. Without points, the cost of a token of a bucket is learnt from steps.

    Raises:
        ValueError: if the tokens of `points` or the buckets are not strictly ascending.
    """

    def __init__(self, points: Sequence[tuple[int, float]] = (), row_buckets: Sequence[int] = ()) -> None:
        self._sizes = [float(pass_tokens) for pass_tokens, _ in points]
        self._seconds = [seconds for _, seconds in points]
        if self._sizes != sorted(set(self._sizes)):
            raise ValueError("the points of a cost curve must have rising numbers of tokens, each once")
        self._buckets = list(row_buckets)
        if self._buckets != sorted(set(self._buckets)):
            raise ValueError("the row buckets of a cost curve must rise, each once")
        self._bucket_array = np.array(self._buckets, dtype=np.float64)
        self.is_measured = bool(points)
        self._correction = SizeCorrection(is_relative=not points)
        curve_weight = 1.0 if points else 0.0
        # Coefficients of the curve, 1, requests, rows of logits, attended tokens. The first prior is the weakest,
        # because the whole pass becomes faster or slower far more often than one of its parts.
        prior_strength = (0.01, 0.1 if points else 0.01, 0.1, 0.1, 0.2)
        self._regression = OnlineRegression((curve_weight, 0.0, 0.0, 0.0, 0.0), prior_strength, 0 if points else 8)

    @property
    def has_buckets(self) -> bool:
        """Whether passes are padded."""
        return bool(self._buckets)

    def pad(self, pass_tokens: float) -> float:
        """Return the tokens of the bucket that a pass runs in; its own tokens if no bucket holds them."""
        buckets = self._buckets
        if not buckets or pass_tokens > buckets[-1] + ROUNDING:
            return pass_tokens
        return buckets[bisect_left(buckets, pass_tokens - ROUNDING)]

    def count_free_rows(self, pass_tokens: int) -> int | None:
        """Return how many tokens the pass may get without exceeding the last bucket; None if it has no bucket."""
        if not self._buckets or pass_tokens > self._buckets[-1]:
            return None
        return self._buckets[-1] - pass_tokens

    def interpolate(self, pass_tokens: float) -> float:
        """Return the seconds of the measured curve; without points the tokens, or those of the bucket."""
        sizes, seconds = self._sizes, self._seconds
        pass_tokens = self.pad(pass_tokens)
        if not sizes:
            return pass_tokens
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
        seconds += per_logit_row * logit_rows + per_attended * attended_tokens
        return seconds * self._correction.estimate(self.pad(pass_tokens))

    def predict_many(self, requests: int, pass_tokens: Floats, logit_rows: Floats, attended_tokens: Floats) -> Floats:
        """Return the predictions for many sizes at once; all arrays have the same shape."""
        curve_factor, base, per_request, per_logit_row, per_attended = self._regression.weights
        padded = self._pad_many(pass_tokens)
        seconds = curve_factor * self._interpolate_many(padded) + (base + per_request * requests)
        seconds += per_logit_row * logit_rows + per_attended * attended_tokens
        return seconds * self._correction.estimate_many(padded)

    def update(
        self,
        requests: int,
        pass_tokens: int,
        logit_rows: int,
        attended_tokens: int,
        seconds: float,
        counts_at_once: bool = False,
    ) -> float:
        """Add the measured time of a forward pass, and return it, clipped if it is an outlier.

        With `counts_at_once`, the next prediction for its size has it in any case.
        """
        features = self.interpolate(pass_tokens), 1.0, requests, logit_rows, attended_tokens
        size = self.pad(pass_tokens)
        factor = self._correction.estimate(size)
        # Each of the two learns what the other leaves, so that neither corrects twice.
        clipped = factor * self._regression.update(features, seconds / factor)
        if self._regression.last_prediction > 0.0:
            self._correction.update(size, clipped / self._regression.last_prediction, counts_at_once)
        return clipped

    def get_confidence(self, pass_tokens: float) -> float:
        """Return how well the time of a pass of this size is known beside those of other sizes, from 0 to 1."""
        return self._correction.get_confidence(self.pad(pass_tokens))

    def _pad_many(self, pass_tokens: Floats) -> Floats:
        if not self._buckets:
            return pass_tokens
        index = np.searchsorted(self._bucket_array, pass_tokens - ROUNDING)
        padded = self._bucket_array[np.minimum(index, len(self._buckets) - 1)]
        return np.where(index < len(self._buckets), padded, pass_tokens)

    def _interpolate_many(self, pass_tokens: Floats) -> Floats:
        """Interpolate at sizes that are padded already, of any shape."""
        if not self._sizes:
            return pass_tokens
        if len(self._sizes) < 2:
            return np.full_like(pass_tokens, self.interpolate(0))
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

    def predict_many(self, requests: int, longest: Sequence[int], nodes: Floats) -> Floats:
        """Return the predictions for L values of `longest` and numbers of nodes [L, N]."""
        _, _, per_node, _, _ = self._regression.weights
        bases = np.array([self.predict(requests, length, nodes=0.0) for length in longest])
        return bases[:, None] + per_node * nodes

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
