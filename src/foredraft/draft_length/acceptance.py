"""Estimated acceptance of draft nodes, from the outcomes of earlier drafts. Pure, without randomness.

Node j is the j-th draft node of a request, counted from 1. A rate is hits / trials. A node of a chain has a trial if
all nodes before it were accepted, so its rate is conditional. A node of a tree has a trial whenever it was granted.
Nodes beyond the longest draft so far start from the rate of the last node, so a draft that was accepted whole does not
count against a longer one.
"""

from collections import defaultdict
from collections.abc import Sequence

from foredraft.draft_length.confidence import ConfidenceFactors

INITIAL_ACCEPTANCE = 0.6  # prior acceptance rate of the first node, before any draft
SHARED_MEMORY, OWN_MEMORY = 256, 96  # decay constants, in drafts, of the shared tally and of a request's own tally
SHARED_PRIOR, OWN_PRIOR = 2.0, 32.0  # strength of the prior rate of a node, in trials
PAUSE_STEPS_PER_DRAFT = 4  # steps without a draft that decay the evidence as much as one draft does
DISCOUNTED_TRIALS = 24.0  # upper limit, in trials, on the evidence that stays after a discount
# Trials below which a pause decays the evidence no further. A probe of four requests adds 16, and a lucky one must not
# outweigh all that was seen before.
MIN_TRIALS_AFTER_PAUSE = 24.0
MAX_TALLY_WEIGHT = 1e9  # weight of a trial at which a tally is rescaled, against overflow
MIN_RATE = 1e-6  # distance of a rate from 0 and 1 in odds
MIN_DENOMINATOR = 1e-9
TREE_DECLINE = 0.9  # prior rate of a tree node over the rate of the node before it


class AcceptanceTally:
    """Exponentially decayed trials and hits by node.

    The weight of a new trial grows with every record, which is the same as a decay of all earlier ones. Divide `trials`
    and `hits` by `weight` to get effective counts.
    """

    def __init__(self, memory: int) -> None:
        self.trials: list[float] = []
        self.hits: list[float] = []
        self.weight = 1.0
        self._weight_growth = 1.0 / (1.0 - 1.0 / memory)
        self._idle_growth = self._weight_growth ** (1.0 / PAUSE_STEPS_PER_DRAFT)

    def record(self, tried: Sequence[int] | range, hit: Sequence[int] | range) -> None:
        """Add one draft: nodes with a trial, ascending from 1, and those of them that were hits."""
        if self.weight > MAX_TALLY_WEIGHT:
            self.trials = [t / self.weight for t in self.trials]
            self.hits = [h / self.weight for h in self.hits]
            self.weight = 1.0
        self.weight *= self._weight_growth
        missing = tried[-1] - len(self.trials)
        if missing > 0:
            self.trials += [0.0] * missing
            self.hits += [0.0] * missing
        for node in tried:
            self.trials[node - 1] += self.weight
        for node in hit:
            self.hits[node - 1] += self.weight

    def discount_evidence(self) -> None:
        """Keep the rates, but reduce their evidence to at most DISCOUNTED_TRIALS effective trials."""
        max_trials = max(self.trials, default=0.0)
        self.weight = max(self.weight, max_trials / DISCOUNTED_TRIALS)

    def keep_first_node(self) -> None:
        """Drop the evidence of all nodes but the first, whose rate is the same in a chain and in a tree."""
        self.trials, self.hits = self.trials[:1], self.hits[:1]

    def record_pause(self, steps: int) -> None:
        """Decay the evidence by a number of steps without a draft. Rates stay, their uncertainty grows."""
        if self.trials and self.trials[0] > MIN_TRIALS_AFTER_PAUSE * self.weight:
            self.weight *= self._idle_growth**steps


class NodeRateEstimator:
    """Rate of every node of every request: a rate by kind of request, adjusted by the request's own tally.

    `initial_rate` is the prior rate of the first node, `shared_memory` the decay constant of the shared tally.
    """

    def __init__(self, initial_rate: float, shared_memory: int = SHARED_MEMORY) -> None:
        self._initial_rate = initial_rate
        self._tally_by_kind: defaultdict[int, AcceptanceTally] = defaultdict(lambda: AcceptanceTally(shared_memory))
        self._tally_by_slot: dict[int, AcceptanceTally] = {}

    def forget(self, slot: int) -> None:
        """Drop the tally of one request; its drafts stay in the tally of its kind."""
        self._tally_by_slot.pop(slot, None)

    def record(self, slot: int, kind: int, tried: Sequence[int] | range, hit: Sequence[int] | range) -> None:
        """Add one draft of a request: nodes with a trial, and those of them that were hits."""
        self._tally_by_kind[kind].record(tried, hit)
        own = self._tally_by_slot.get(slot)
        if own is None:
            own = self._tally_by_slot[slot] = AcceptanceTally(OWN_MEMORY)
        own.record(tried, hit)

    def discount_evidence(self) -> None:
        """Discount the evidence of all tallies."""
        for tally in self._list_tallies():
            tally.discount_evidence()

    def keep_first_node(self) -> None:
        """Drop the evidence of all nodes but the first, because drafts are trees and not chains."""
        for tally in self._list_tallies():
            tally.keep_first_node()

    def _list_tallies(self) -> list[AcceptanceTally]:
        return [*self._tally_by_kind.values(), *self._tally_by_slot.values()]

    def record_idle(self, slot: int, steps: int) -> None:
        """Decay the tally of one request that did not draft."""
        own = self._tally_by_slot.get(slot)
        if own is not None:
            own.record_pause(steps)

    def record_pause(self, steps: int) -> None:
        """Decay the tallies by kind after steps without any draft."""
        for tally in self._tally_by_kind.values():
            tally.record_pause(steps)

    def estimate_kind(self, kind: int, max_nodes: int, decline: float) -> list[float]:
        """Return the rates of nodes 1 to max_nodes for a new request of a kind.

        The prior rate of a node is `decline` times the rate of the node before it.
        """
        rates: list[float] = []
        rate, tally = self._initial_rate, self._tally_by_kind[kind]
        prior_weight = SHARED_PRIOR * tally.weight
        for num_trials, num_hits in zip(tally.trials[:max_nodes], tally.hits, strict=False):
            rate = (num_hits + prior_weight * rate) / (num_trials + prior_weight)
            rates.append(rate)
            rate *= decline
        while len(rates) < max_nodes:
            rates.append(rate)
            rate *= decline
        return rates

    def estimate_slot(self, slot: int, kind_rates: Sequence[float]) -> list[float]:
        """Return the rates of one request, given those of its kind.

        The prior of a node is the rate of the kind, multiplied in odds by the ratio at the request's previous node.
        """
        own = self._tally_by_slot.get(slot)
        if own is None:
            return list(kind_rates)
        kind_rates = [min(max(rate, MIN_RATE), 1.0 - MIN_RATE) for rate in kind_rates]
        rates: list[float] = []
        odds_ratio = 1.0  # odds of this request over the odds of its kind
        prior_weight = OWN_PRIOR * own.weight
        for num_trials, num_hits, kind_rate in zip(own.trials, own.hits, kind_rates, strict=False):
            prior = kind_rate * odds_ratio / (1.0 - kind_rate + kind_rate * odds_ratio)
            rate = (num_hits + prior_weight * prior) / (num_trials + prior_weight)
            rates.append(rate)
            odds_ratio = rate * (1.0 - kind_rate) / max(kind_rate * (1.0 - rate), MIN_DENOMINATOR)
        for kind_rate in kind_rates[len(rates) :]:
            rates.append(kind_rate * odds_ratio / (1.0 - kind_rate + kind_rate * odds_ratio))
        return rates


class SurvivalEstimator:
    """Estimated survival and draft probability of every node, by slot. A new slot has the rates of its kind.

    `shared_memory` is the decay constant, in drafts, of the rates that all requests share.
    """

    def __init__(self, shared_memory: int = SHARED_MEMORY) -> None:
        self._accepted_rates = NodeRateEstimator(INITIAL_ACCEPTANCE, shared_memory)
        self._drafted_rates = NodeRateEstimator(1.0, shared_memory)
        self._confidence_factors = ConfidenceFactors()
        self.is_tree = False  # a draft has had accepted nodes that are not 1, 2, 3 and so on: drafts are trees
        self.is_short = False  # a draft has had fewer nodes than granted
        self._kinds: dict[int, int] = {}  # slot -> kind

    def register(self, slot: int, kind: int) -> None:
        """Set the kind of a request (0 greedy, 1 sampled). Kinds share no evidence."""
        self._kinds[slot] = kind

    def record_draft(
        self,
        slot: int,
        granted_nodes: int,
        num_drafted: int,
        accepted_nodes: Sequence[int],
        confidences: Sequence[float] = (),
    ) -> None:
        """Record the outcome of one request's draft; fields as in `DraftOutcome`."""
        if granted_nodes <= 0:
            self.record_idle(slot)
            return
        if accepted_nodes and accepted_nodes[-1] != len(accepted_nodes) and not self.is_tree:
            self.is_tree = True
            self._accepted_rates.keep_first_node()
            self._confidence_factors.clear()
        # A node that was granted but not drafted counts as rejected, because the estimate is for granted nodes.
        tried = (
            range(1, granted_nodes + 1) if self.is_tree else range(1, min(len(accepted_nodes) + 1, granted_nodes) + 1)
        )
        kind = self._kinds.get(slot, 0)
        if confidences and not self.is_tree:
            rates = self._accepted_rates.estimate_kind(kind, len(confidences), 1.0)
            self._confidence_factors.record(slot, kind, confidences, len(accepted_nodes), rates)
        self._accepted_rates.record(slot, kind, tried, accepted_nodes)
        self.is_short = self.is_short or num_drafted < granted_nodes
        if self.is_short:
            self._drafted_rates.record(
                slot, kind, range(1, min(num_drafted + 1, granted_nodes) + 1), range(1, num_drafted + 1)
            )

    def record_idle(self, slot: int, steps: int = 1) -> None:
        """Decay the evidence of a request that did not draft in these steps."""
        self._accepted_rates.record_idle(slot, steps)
        self._drafted_rates.record_idle(slot, steps)

    def record_pause(self, steps: int = 1) -> None:
        """Decay the shared evidence after steps in which no request drafted."""
        self._accepted_rates.record_pause(steps)
        self._drafted_rates.record_pause(steps)

    def discount_evidence(self) -> None:
        """Reduce the evidence of all estimates, because drafts that they recommended have lost time."""
        self._accepted_rates.discount_evidence()
        self._drafted_rates.discount_evidence()

    def forget(self, slots: Sequence[int]) -> None:
        """Drop the state of these slots."""
        for slot in slots:
            self._accepted_rates.forget(slot)
            self._drafted_rates.forget(slot)
            self._confidence_factors.forget(slot)
            self._kinds.pop(slot, None)

    def estimate_survival(self, slots: Sequence[int], max_nodes: int) -> list[list[float]]:
        """Return [B][max_nodes]: probability that node j is drafted and accepted if it is granted, non-increasing in j.

        It is also the expected number of tokens that granting the node adds.
        """
        rates = self._estimate_rates(self._accepted_rates, slots, max_nodes, TREE_DECLINE if self.is_tree else 1.0)
        rates = [self._confidence_factors.adjust(slot, row) for slot, row in zip(slots, rates, strict=True)]
        return [_fit_isotonic(row) if self.is_tree else _accumulate_products(row) for row in rates]

    def list_confidence_levels(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Return a number for each request that changes with its confidences; () if no drafter gives any."""
        return self._confidence_factors.list_levels(slots)

    def estimate_draft_probs(self, slots: Sequence[int], max_nodes: int) -> list[list[float]]:
        """Return [B][max_nodes]: probability that node j is drafted if it is granted."""
        if not self.is_short:
            return [[1.0] * max_nodes for _ in slots]
        rates = self._estimate_rates(self._drafted_rates, slots, max_nodes, 1.0)
        return [_accumulate_products(row) for row in rates]

    def _estimate_rates(
        self, estimator: NodeRateEstimator, slots: Sequence[int], max_nodes: int, decline: float
    ) -> list[list[float]]:
        kinds = [self._kinds.get(slot, 0) for slot in slots]
        shared = {kind: estimator.estimate_kind(kind, max_nodes, decline) for kind in set(kinds)}
        return [estimator.estimate_slot(slot, shared[kind]) for slot, kind in zip(slots, kinds, strict=True)]


def _accumulate_products(rates: Sequence[float]) -> list[float]:
    """Return the cumulative products: survival probabilities from conditional rates."""
    products, product = [], 1.0
    for rate in rates:
        product *= rate
        products.append(product)
    return products


def _fit_isotonic(rates: Sequence[float]) -> list[float]:
    """Return the nearest non-increasing sequence, by pooling adjacent violators.

    A node is granted only together with all nodes before it, so pooled nodes share their mean.
    """
    blocks: list[tuple[float, int]] = []
    for rate in rates:
        mean, size = rate, 1
        while blocks and blocks[-1][0] < mean:
            before, count = blocks.pop()
            mean, size = (mean * size + before * count) / (size + count), size + count
        blocks.append((mean, size))
    return [mean for mean, size in blocks for _ in range(size)]
