"""Measured over predicted time of a pass, by its size, for steps of the cost that the measured curve does not show.

A pass takes the longer of two times: that of the weights, which do not depend on its size, and that of the arithmetic,
which does, in stairs. A curve that was measured while memory was slow hides the stairs below it, and they appear when
memory is fast. Pure: numbers in, numbers out, no clock.
"""

from bisect import bisect_left
from math import exp, exp2, log, log2

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MAX_WEIGHT = 8.0  # observations that the mean ratio of a size covers
PRIOR_WEIGHT = 0.5  # observations of ratio 1 that every size starts with
FORGETTING_UPDATES = 512  # updates after which the weight of an unvisited size has decayed to 1 / e
CONFIDENCE_WEIGHT = 2.0  # observations after which a size is half known
MIN_RATIO = 1e-3  # lower limit on a ratio, against the logarithm of 0
MIN_WEIGHT = 0.05  # weight below which a size is dropped
NUM_EAGER_UPDATES, REBUILD_INTERVAL = 32, 6  # first updates that count at once, and interval of later ones
NUM_EXACT_SIZES = 32  # up to this size every size has its own mean; larger ones share an eighth of an octave


class SizeCorrection:
    """Mean ratio of measured to predicted time by size; straight between the sizes that occurred, constant outside.

    Args:
        is_relative: divide the ratios by their mean, for a curve that is learnt from the same steps. Its level would
            otherwise move between the curve and the ratios, and leave the costs of drafts behind. Default False.
    """

    def __init__(self, is_relative: bool = False) -> None:
        self._is_relative = is_relative
        self._means: dict[int, tuple[float, float, int]] = {}  # size -> (mean ratio, weight, update of the last one)
        self._num_updates = 0
        self._sizes: list[float] = []  # of the means in use, rising
        self._ratios: list[float] = []

    def update(self, size: float, ratio: float, counts_at_once: bool = False) -> None:
        """Add the ratio of measured to predicted time of a pass.

        Estimates include it after a few more updates, because computing them takes longest, or now if it counts at
        once.
        """
        self._num_updates += 1
        key = _round_size(size)
        mean, weight, last = self._means.get(key, (1.0, 0.0, self._num_updates))
        weight = min(self._decay(weight, last) + 1.0, MAX_WEIGHT)
        self._means[key] = mean + (ratio - mean) / weight, weight, self._num_updates
        is_due = self._num_updates <= NUM_EAGER_UPDATES or self._num_updates % REBUILD_INTERVAL == 0
        if is_due or counts_at_once:
            self._rebuild()

    def estimate(self, size: float) -> float:
        """Return the factor on the predicted time of a pass."""
        sizes, ratios = self._sizes, self._ratios
        if not sizes:
            return 1.0
        right = bisect_left(sizes, size)
        if right == 0 or right == len(sizes):
            return ratios[max(right - 1, 0)]
        share = (size - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
        return ratios[right - 1] + share * (ratios[right] - ratios[right - 1])

    def estimate_many(self, sizes: Floats) -> Floats:
        """Return the factors of many sizes, of any shape."""
        if not self._sizes:
            return np.ones_like(sizes)
        return np.interp(sizes, self._sizes, self._ratios)

    def get_confidence(self, size: float) -> float:
        """Return how well the ratio of a size is known, from 0 for a size that never occurred to 1."""
        _, weight, last = self._means.get(_round_size(size), (1.0, 0.0, 0))
        weight = self._decay(weight, last)
        return weight / (weight + CONFIDENCE_WEIGHT)

    def _rebuild(self) -> None:
        weights = {size: self._decay(weight, last) for size, (_, weight, last) in self._means.items()}
        self._means = {size: mean for size, mean in self._means.items() if weights[size] > MIN_WEIGHT}
        used = sorted(self._means)
        self._sizes = [float(size) for size in used]
        self._ratios = [
            (self._means[size][0] * weights[size] + PRIOR_WEIGHT) / (weights[size] + PRIOR_WEIGHT) for size in used
        ]
        if self._is_relative:
            logs = [weights[size] * log(max(ratio, MIN_RATIO)) for size, ratio in zip(used, self._ratios, strict=True)]
            common = exp(sum(logs) / sum([weights[size] for size in used]))
            self._ratios = [ratio / common for ratio in self._ratios]

    def _decay(self, weight: float, last: int) -> float:
        age = self._num_updates - last
        return weight * (1.0 - 1.0 / FORGETTING_UPDATES) ** age if age else weight


def _round_size(size: float) -> int:
    """Return the size that represents a size: itself, or the nearest eighth of an octave."""
    if size <= NUM_EXACT_SIZES:
        return round(size)
    return round(exp2(round(8.0 * log2(size)) / 8.0))
