"""Predicted acceptance of draft tokens, as an estimate of what a request's next drafts will win. Pure.

Some drafters predict for every token of a chain whether it will be accepted (`DraftOutcome.confidences`). Outcomes are
zeros and ones, and a request needs many of them; a prediction has less noise. So the predictions of a request's last
few drafts tell sooner whether its text has become easier or harder than it was. Only finished steps are read: the
length of a draft never depends on its own tokens.

A prediction is worth what the outcomes of all requests of its kind say. At every node, it is replaced by the rate of
the kind plus the slope of a line times its difference from the mean prediction there. The line through (difference of
the prediction, difference of the outcome) is learnt. If the two are unrelated it is flat, and predictions change
nothing.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

CALIBRATION_MEMORY = 256  # decay constant of the calibration, in drafts
RECENT_MEMORY, OWN_MEMORY = 3, 96  # decay constants of a request's last and of all its predictions, in drafts
RECENT_PRIOR, OWN_PRIOR = 0.5, 8.0  # trials of the kind's rates that are added to a request's predictions
SLOPE_PRIOR = 0.5  # added to the squares of the differences: a slope of 0 with the weight of some trials
MAX_SLOPE = 2.0
MIN_RATE = 0.02  # distance of a mean from 0 and 1
MIN_COUNT = 1e-6  # decayed trials below which a node has none
LEVEL_STEP = math.log(1.3)  # a change of the odds by this factor is a new level


@dataclass
class Calibration:
    """Line from predictions to outcomes of the requests of a kind, from decayed sums."""

    counts: list[float] = field(default_factory=list)  # trials by node
    sums: list[float] = field(default_factory=list)  # predictions by node
    squares: float = 0.0  # of the differences of predictions
    products: float = 0.0  # of the differences of predictions and outcomes

    @property
    def slope(self) -> float:
        return min(max(self.products / (self.squares + SLOPE_PRIOR), 0.0), MAX_SLOPE)

    def decay(self) -> None:
        factor = 1.0 - 1.0 / CALIBRATION_MEMORY
        self.counts = [count * factor for count in self.counts]
        self.sums = [total * factor for total in self.sums]
        self.squares *= factor
        self.products *= factor

    def add(self, node: int, prediction: float, residual: float) -> float:
        """Add a trial of a node, counted from 0; the residual is outcome minus rate. Returns the difference."""
        if node == len(self.counts):
            self.counts.append(0.0)
            self.sums.append(0.0)
        count = self.counts[node]
        difference = prediction - self.sums[node] / count if count > MIN_COUNT else 0.0
        self.counts[node] += 1.0
        self.sums[node] += prediction
        self.squares += difference * difference
        self.products += difference * residual
        return difference


@dataclass
class DecayedMeans:
    """Decayed sums by node of calibrated predictions, and of the rates of the kind at the same time."""

    memory: int  # decay constant in drafts
    counts: list[float] = field(default_factory=list)
    predictions: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def add(self, predictions: Sequence[float], rates: Sequence[float]) -> None:
        """Add one draft: a prediction and a rate for each node that is read."""
        factor = 1.0 - 1.0 / self.memory
        missing = [0.0] * (len(predictions) - len(self.counts))
        for sums, values in (
            (self.counts, [1.0] * len(predictions)), (self.predictions, predictions), (self.rates, rates)
        ):  # fmt: skip
            sums += missing
            sums[:] = [total * factor for total in sums]
            for node, value in enumerate(values):
                sums[node] += value

    def compute_odds_ratios(self, prior: float) -> list[float]:
        """Return the odds of the mean prediction over those of the mean rate by node, shrunk to 1 by `prior` trials."""
        ratios = []
        for count, predictions, rates in zip(self.counts, self.predictions, self.rates, strict=True):
            if count < MIN_COUNT:
                ratios.append(1.0)
                continue
            rate = rates / count
            mean = (predictions + prior * rate) / (count + prior)
            mean, rate = (min(max(value, MIN_RATE), 1.0 - MIN_RATE) for value in (mean, rate))
            ratios.append(mean * (1.0 - rate) / (rate * (1.0 - mean)))
        return ratios


class ConfidenceFactors:
    """Factors by which the odds of acceptance of a request's next draft differ from those of its outcomes, by slot."""

    def __init__(self) -> None:
        self._calibrations: defaultdict[int, Calibration] = defaultdict(Calibration)
        self._means_by_slot: dict[int, tuple[DecayedMeans, DecayedMeans]] = {}  # of the last drafts, and of all

    def record(
        self, slot: int, kind: int, confidences: Sequence[float], num_accepted: int, rates: Sequence[float]
    ) -> None:
        """Add the chain of one request.

        Args:
            slot: slot of the request.
            kind: kind of the request.
            confidences: predicted probability, for every drafted token, that it is accepted if those before it are.
            num_accepted: accepted tokens. The predictions of those and of the next one are read; the others assume
                tokens that were rejected.
            rates: estimated rates of these nodes for requests of the kind.
        """
        calibration, predictions = self._calibrations[kind], []
        calibration.decay()
        slope, read = calibration.slope, confidences[: num_accepted + 1]
        for node, (confidence, rate) in enumerate(zip(read, rates, strict=False)):
            difference = calibration.add(node, confidence, float(node < num_accepted) - rate)
            predictions.append(min(max(rate + slope * difference, 0.0), 1.0))
        means = self._means_by_slot.setdefault(slot, (DecayedMeans(RECENT_MEMORY), DecayedMeans(OWN_MEMORY)))
        for one in means:
            one.add(predictions, rates[: len(predictions)])

    def adjust(self, slot: int, rates: Sequence[float]) -> list[float]:
        """Return the rates of a request by node, with the odds for its next draft; as they are without predictions."""
        factors = self._compute_factors(slot)
        if not factors:
            return list(rates)
        factors += factors[-1:] * (len(rates) - len(factors))
        return [rate * f / (1.0 - rate + rate * f) for rate, f in zip(rates, factors, strict=False)]

    def _compute_factors(self, slot: int) -> list[float]:
        """Return the factor of every node; [] without predictions."""
        means = self._means_by_slot.get(slot)
        if means is None:
            return []
        recent, own = means
        pairs = zip(recent.compute_odds_ratios(RECENT_PRIOR), own.compute_odds_ratios(OWN_PRIOR), strict=True)
        return [last / usual for last, usual in pairs]

    def list_levels(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Return the factor of each request's first node in steps of LEVEL_STEP; () if no request has predictions."""
        if not self._means_by_slot:
            return ()
        return tuple(round(math.log((self._compute_factors(slot) or [1.0])[0]) / LEVEL_STEP) for slot in slots)

    def clear(self) -> None:
        """Drop all predictions."""
        self._calibrations.clear()
        self._means_by_slot.clear()

    def forget(self, slot: int) -> None:
        """Drop the predictions of one request; they stay in the calibration of its kind."""
        self._means_by_slot.pop(slot, None)
