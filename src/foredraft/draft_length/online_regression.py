"""Online least squares for times of steps. Pure: numbers in, numbers out, no clock. All times are in seconds."""

from collections.abc import Sequence

import numpy as np

FORGETTING_STEPS = 128  # observations after which the weight of an observation has decayed to 1 / e
OUTLIER_SHARE = 0.35  # a time further than this share from the prediction is clipped to that distance
MAX_OUTLIER_DOUBLINGS = 30  # upper limit on the doublings of that distance
NUM_EAGER_FITS = 16  # observations after each of which the coefficients are fitted
FIT_INTERVAL = 12  # observations between later fits
DENSE_OBSERVATIONS = 64  # observations that are all used; later only every second one is
MIN_SECONDS = 1e-9  # lower limit on times, against division by zero
RIDGE = 1e-9  # added to the diagonal of the normal equations


class OnlineRegression:
    """Least squares on relative errors, with exponential forgetting, a prior, and non-negative coefficients.

    Args:
        prior: prior value of each coefficient.
        prior_strength: strength of each prior, in observations that this coefficient alone would explain.
        num_unclipped: first observations that are not clipped as outliers, for a prior that is no prediction.
    """

    def __init__(self, prior: Sequence[float], prior_strength: Sequence[float], num_unclipped: int = 0) -> None:
        self.weights = list(prior)
        self.last_prediction = 0.0  # before the last observation
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
        predicted = self.last_prediction = self.predict(features)
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
        squares = self._gram.diagonal()  # a feature that was always 0 keeps its prior
        strength = (self._prior_strength / total + RIDGE) * squares
        gram, moment = self._gram + np.diag(strength), self._moment + strength * self._prior
        active = np.flatnonzero(squares)
        weights = np.where(squares > 0.0, 0.0, self._prior)
        while active.size:
            is_whole = active.size == moment.size
            solution = np.linalg.solve(gram if is_whole else gram[active][:, active], moment[active])
            if solution.min() >= 0.0:
                weights[active] = solution
                break
            active = active[solution > 0.0]
        self.weights = weights.tolist()
