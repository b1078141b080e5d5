"""What a step costs: the target's pass from a measured curve, the draft from what drafts have cost. Seconds throughout.

Both are lines through a few features, fitted as the steps go by. Pure: numbers in, numbers out, no clock.
"""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MEMORY = 128  # steps after which an observation has lost two thirds of its weight
OUTLIER = 0.5  # a time further than this share from the prediction is cut to it...
EAGER = 16  # ... and the line is fitted anew after each of this many first observations, later after every EVERY
EVERY = 4


class Line:
    """Least squares on relative errors, with forgetting, a pull towards a prior and no negative coefficient.

    `pull` is in observations: how many of them each coefficient's prior is worth, were it to explain a step alone.
    The first `naive` observations are believed whatever they are, where the prior is no prediction.
    """

    def __init__(self, prior: Sequence[float], pull: Sequence[float], naive: int = 0) -> None:
        self.weights = list(prior)
        self._prior, self._pull = np.array(prior), np.array(pull)
        self._gram = np.zeros((len(prior), len(prior)))
        self._moment = np.zeros(len(prior))
        self._naive = naive
        self._count = 0
        self._outliers = 0  # in a row, all to the same side: the longer, the further one is believed

    def predict(self, features: Sequence[float]) -> float:
        return sum([w * x for w, x in zip(self.weights, features, strict=True)])

    def learn(self, features: Sequence[float], seconds: float, scale: float = 0.0) -> float:
        """Take one observation in, and return as much of `seconds` as was believed.

        Errors count in units of `scale`: of what is predicted, or of the pass that a draft stands beside.
        """
        predicted = self.predict(features)
        believed = self._believe(seconds, predicted, max(predicted, scale))
        unit = 1.0 / max(believed, predicted, scale, 1e-9)
        x = np.array(features) * unit
        self._gram *= 1.0 - 1.0 / MEMORY
        self._moment *= 1.0 - 1.0 / MEMORY
        self._gram += x[:, None] * x
        self._moment += x * (believed * unit)
        self._count += 1
        if self._count <= EAGER or self._count % EVERY == 0:
            self._fit()
        return believed

    def _believe(self, seconds: float, predicted: float, scale: float) -> float:
        """A pause or a slow moment comes alone; a machine that has become slower stays so, and is soon followed."""
        if self._count < self._naive or scale <= 0.0:
            return seconds
        reach = scale * OUTLIER * 2.0 ** min(abs(self._outliers), 30)
        if abs(seconds - predicted) <= reach:
            self._outliers = 0
            return seconds
        side = 1 if seconds > predicted else -1
        self._outliers = self._outliers + side if self._outliers * side >= 0 else side
        return predicted + side * reach

    def _fit(self) -> None:
        """Normal equations over the coefficients that may be positive; those that come out below zero leave."""
        total = (1.0 - (1.0 - 1.0 / MEMORY) ** self._count) * MEMORY
        seen = np.sqrt(self._gram.diagonal())  # size of each feature; one that was always 0 keeps its prior
        kept = np.flatnonzero(seen)
        gram = self._gram / np.outer(seen, seen).clip(1e-30) + np.diag(self._pull / total + 1e-9)
        moment = self._moment / seen.clip(1e-15) + (self._pull / total + 1e-9) * self._prior * seen
        weights = np.where(seen > 0.0, 0.0, self._prior)
        while kept.size:
            found = np.linalg.solve(gram[np.ix_(kept, kept)], moment[kept])
            if found.min() >= 0.0:
                weights[kept] = found / seen[kept]
                break
            kept = kept[found > 0.0]
        self.weights = weights.tolist()


class CostCurve:
    """Time of a pass by its rows: the curve that was measured, and what running has taught on top of it.

    `points` are (rows, seconds) in rising order: straight between two, so that a flat shelf needs both its ends; the
    last slope goes on above. Without points a pass costs the same whatever its rows, until the rows turn out to cost.
    """

    def __init__(self, points: Sequence[tuple[int, float]] = ()) -> None:
        self._rows = [float(rows) for rows, _ in points]
        self._seconds = [seconds for _, seconds in points]
        if self._rows != sorted(set(self._rows)):
            raise ValueError("the points of a cost curve must have rising numbers of rows, each once")
        self.is_measured = bool(points)
        known = 1.0 if points else 0.0
        # The pass as a whole becomes faster or slower far more often than one of its parts does.
        pull = (0.01, 0.1 if points else 0.01, 0.1, 0.1, 0.2)
        self._line = Line((known, 0.0, 0.0, 0.0, 0.0), pull, 0 if points else EAGER)

    def at(self, rows: float) -> float:
        """The curve as measured; 0 without points."""
        table, seconds = self._rows, self._seconds
        if not table:
            return 0.0
        if rows <= table[0] or len(table) == 1:
            return seconds[0]
        right = min(bisect_right(table, rows), len(table) - 1)
        slope = (seconds[right] - seconds[right - 1]) / (table[right] - table[right - 1])
        return max(0.0, seconds[right - 1] + slope * (rows - table[right - 1]))

    def predict(self, requests: int, rows: float, scored: float, context: float) -> float:
        a, b, c, d, e = self._line.weights
        return a * self.at(rows) + b + c * requests + d * scored + e * context

    def predict_many(self, requests: int, rows: Floats, scored: Floats, context: Floats) -> Floats:
        """The same for many candidates at once. All [N]."""
        a, b, c, d, e = self._line.weights
        return a * self._at_many(rows) + (b + c * requests) + d * scored + e * context

    def learn(self, requests: int, rows: int, scored: int, context: int, seconds: float) -> float:
        return self._line.learn((self.at(rows), 1.0, requests, scored, context), seconds)

    def _at_many(self, rows: Floats) -> Floats:
        if len(self._rows) < 2:
            return np.full(len(rows), self.at(0))
        found: Floats = np.interp(rows, self._rows, self._seconds)
        slope = (self._seconds[-1] - self._seconds[-2]) / (self._rows[-1] - self._rows[-2])
        return np.maximum(found + slope * np.maximum(rows - self._rows[-1], 0.0), 0.0)


class DraftCost:
    """Time of a draft: something for every request that is only followed, and for a draft by depth and nodes.

    Reading is apart. A drafter that reads only when it is asked has a long stretch before it after a pause: `unread`
    tokens, and a prompt of unknown length for every newcomer. That is what resuming costs, not what a draft costs.
    """

    def __init__(self) -> None:
        self._idle = Line((0.0,), (0.0,), naive=1)  # by requests
        # 1, depth, nodes, unread, newcomers. Coefficients that cannot be told apart share what they explain.
        self._line = Line((0.0,) * 5, (0.02, 0.01, 0.02, 0.02, 0.02), naive=4)

    def predict(self, requests: int, depth: int, nodes: float, unread: int = 0, newcomers: int = 0) -> float:
        idle = self._idle.weights[0] * requests
        if not depth:
            return idle
        a, b, c, d, e = self._line.weights
        return idle + a + b * depth + c * nodes + d * unread + e * newcomers

    def predict_many(self, requests: int, depth: int, nodes: Floats) -> Floats:
        return self.predict(requests, depth, 0.0) + self._line.weights[2] * nodes

    def learn(
        self, requests: int, depth: int, nodes: int, unread: int, newcomers: int, seconds: float, scale: float
    ) -> float:
        """`scale` is the time of the pass beside it: an error matters by its share of the step."""
        if not depth:
            return self._idle.learn((requests,), seconds, scale)
        idle = self._idle.weights[0] * requests
        return idle + self._line.learn((1.0, depth, nodes, unread, newcomers), max(seconds - idle, 0.0), scale)
