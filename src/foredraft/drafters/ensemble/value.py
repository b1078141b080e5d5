"""Estimates of the acceptance and cost of an ensemble's drafts. No tensors, no clock.

All estimates are read in every step, so each is a few floats. Acceptance has two rates: that of first nodes, and that
of later nodes whose parents were accepted. A cost is a line fitted by weighted least squares.
"""

from dataclasses import dataclass, field

PRIOR_FIRST_RATE, PRIOR_LATER_RATE = 0.6, 0.7  # acceptance rates before the first draft
SHARED_WINDOW, REQUEST_WINDOW = 128.0, 32.0  # drafts that an average covers
IDLE_WINDOW = 16.0  # steps without a draft after which the average of a request has lost most of its weight
# prior strength, in pseudo-observations, for the estimates per member, per match strength and per request
PRIOR_STRENGTHS = 2.0, 3.0, 4.0
COST_WINDOW = 48.0  # steps that a fit covers
OUTLIER_FACTOR = 2.0  # a measured time is clipped to this multiple of the prediction
NUM_COLD_TIMES = (
    2  # first times of a cost, which include allocations; a fit forgets them as soon as a later one is there
)


@dataclass(slots=True)
class DecayingCounter:
    """Counts of tested and accepted nodes with exponential decay."""

    window: float  # observations that the counts cover
    first_tries: float = 0.0
    first_hits: float = 0.0
    later_tries: float = 0.0
    later_hits: float = 0.0

    def record(self, num_accepted: int, num_tested: int) -> None:
        """Record a draft: `num_tested` nodes of its path were tested, and the first `num_accepted` were right."""
        fade = 1.0 - 1.0 / self.window
        self.first_tries = self.first_tries * fade + 1.0
        self.first_hits *= fade
        if num_accepted:
            self.first_hits += 1.0
        if num_tested > 1:
            fade **= num_tested - 1
            self.later_tries = self.later_tries * fade + num_tested - 1
            self.later_hits = self.later_hits * fade + num_accepted - 1

    def fade(self, factor: float) -> None:
        """Multiply all counts by a factor."""
        self.first_tries, self.first_hits = self.first_tries * factor, self.first_hits * factor
        self.later_tries, self.later_hits = self.later_tries * factor, self.later_hits * factor

    def estimate_rates(
        self, prior_first: float, prior_later: float, prior_strength: float, narrower: "DecayingCounter | None" = None
    ) -> tuple[float, float]:
        """Return the rates of first and later nodes, shrunk to a prior.

        Args:
            prior_first: prior of the rate of first nodes.
            prior_later: the same for later nodes.
            prior_strength: pseudo-observations of the prior.
            narrower: counter of some of these observations, for which the result is a prior; they do not count here.
        """
        first_share = 1.0 if narrower is None else _compute_rest(self.first_tries, narrower.first_tries)
        later_share = 1.0 if narrower is None else _compute_rest(self.later_tries, narrower.later_tries)
        return (
            (first_share * self.first_hits + prior_strength * prior_first)
            / (first_share * self.first_tries + prior_strength),
            (later_share * self.later_hits + prior_strength * prior_later)
            / (later_share * self.later_tries + prior_strength),
        )


EstimateKey = tuple[object, int]  # member or members, and match strength of the draft


@dataclass
class ValueEstimates:
    """Acceptance rates per member, per match strength and per request; each is the prior of the next.

    Greedy and sampled requests have separate estimates, because their acceptance rates differ.
    """

    _by_member: dict[tuple[bool, object], DecayingCounter] = field(default_factory=dict)
    _by_key: dict[tuple[bool, EstimateKey], DecayingCounter] = field(default_factory=dict)
    _by_request: dict[int, dict[EstimateKey, DecayingCounter]] = field(default_factory=dict)  # by slot
    _sampled_slots: set[int] = field(default_factory=set)  # slots of requests that sample

    def register(self, slot: int, is_sampled: bool) -> None:
        if is_sampled:
            self._sampled_slots.add(slot)

    def update(self, slot: int, key: EstimateKey, num_accepted: int, num_tested: int) -> None:
        if num_tested <= 0:
            return
        own, is_sampled_slot = self._by_request.setdefault(slot, {}), slot in self._sampled_slots
        for counter in (
            self._by_member.setdefault((is_sampled_slot, key[0]), DecayingCounter(SHARED_WINDOW)),
            self._by_key.setdefault((is_sampled_slot, key), DecayingCounter(SHARED_WINDOW)),
            own.setdefault(key, DecayingCounter(REQUEST_WINDOW)),
        ):
            counter.record(num_accepted, num_tested)

    def estimate_rates(
        self, slot: int, key: EstimateKey, first: float = PRIOR_FIRST_RATE, later: float = PRIOR_LATER_RATE
    ) -> tuple[float, float]:
        """Estimate the acceptance rates of first and later nodes. `first`, `later`: the prior."""
        is_sampled_slot, own = slot in self._sampled_slots, self._by_request.get(slot, {})
        counters = (
            self._by_member.get((is_sampled_slot, key[0])),
            self._by_key.get((is_sampled_slot, key)),
            own.get(key),
        )
        known = [(c, strength) for c, strength in zip(counters, PRIOR_STRENGTHS, strict=True) if c is not None]
        for i, (counter, prior_strength) in enumerate(known):
            # The next counter has a part of this one's drafts. A draft counts once, or one failure would count thrice.
            narrower = known[i + 1][0] if i + 1 < len(known) else None
            first, later = counter.estimate_rates(first, later, prior_strength, narrower)
        return first, later

    def fade_request(self, slot: int, key: EstimateKey) -> None:
        """Lower the weight of what a request's own drafts showed, after a step without one.

        Otherwise a few rejected drafts could end drafting for the rest of the request.
        """
        counter = self._by_request.get(slot, {}).get(key)
        if counter is not None:
            counter.fade(1.0 - 1.0 / IDLE_WINDOW)

    def count_tries(self, slot: int, key: EstimateKey) -> float:
        counter = self._by_key.get((slot in self._sampled_slots, key))
        return 0.0 if counter is None else counter.first_tries

    def forget(self, slot: int) -> None:
        self._by_request.pop(slot, None)
        self._sampled_slots.discard(slot)


def _compute_rest(num_tries: float, num_narrower: float) -> float:
    """Return the share of the tries that a narrower counter does not have."""
    return max(1.0 - num_narrower / num_tries, 0.0) if num_tries > 0.0 else 0.0


def estimate_gain(rates: tuple[float, float], depth: float) -> float:
    """Return the expected number of accepted tokens of a chain of this depth."""
    first, later = rates
    if depth <= 0.0:
        return 0.0
    return first * (depth if later > 0.999 else (1.0 - later**depth) / (1.0 - later))


class LinearCost:
    """Linear model of seconds by size, with slope and intercept of at least 0.

    Sizes that are all equal determine only the height; `is_proportional` then decides between slope and intercept.
    """

    def __init__(self, is_proportional: bool) -> None:
        self.is_proportional = is_proportional  # prior slope: True = through the origin, False = 0
        self.slope, self.intercept = 0.0, 0.0
        self._num_cold = 0
        self._n = self._x = self._xx = self._y = self._xy = 0.0

    @property
    def is_fitted(self) -> bool:
        return self._n > 0.0

    def predict(self, x: float) -> float:
        return self.intercept + self.slope * x

    def update(self, x: float, seconds: float) -> None:
        if self._num_cold <= NUM_COLD_TIMES:
            self._n = self._x = self._xx = self._y = self._xy = 0.0
            self._num_cold += 1
        if self._n > 2.0:
            seconds = min(seconds, OUTLIER_FACTOR * self.predict(x))
        fade = 1.0 - 1.0 / COST_WINDOW
        self._n = self._n * fade + 1.0
        self._x, self._xx = self._x * fade + x, self._xx * fade + x * x
        self._y, self._xy = self._y * fade + seconds, self._xy * fade + x * seconds
        mean, height = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean * mean
        prior = height / mean if self.is_proportional and mean > 0.0 else 0.0
        prior_strength = 0.02 * mean * mean / self._n
        slope = (
            (self._xy / self._n - mean * height + prior_strength * prior) / (spread + prior_strength)
            if spread + prior_strength > 0.0
            else prior
        )
        self.slope = min(max(slope, 0.0), height / mean if mean > 0.0 else 0.0)
        self.intercept = height - self.slope * mean
