"""Which parts of a composition draft for whom: the most expected tokens per second. Numbers alone.

A step's value is (tokens it should win) - (seconds it adds) x (tokens per second made just now): what has a value above
zero makes the rate better, and what has the largest makes it best, once the rate has settled (Dinkelbach's method). A
part that every request shares one pass of is paid for once.

A choice looks at earlier steps, at the committed text (what speaks for a text part's draft, and how long that is) and
at nothing that is drawn in this step. So under rejection sampling it tells nothing of a draft.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from foredraft.drafters.base import Draft
from foredraft.drafters.worth import Key, Trend, Worth, gain

Mode = Literal["auto", "merge", "sequence"]
MODES: tuple[Mode, ...] = ("auto", "merge", "sequence")
ENOUGH = 3.0  # drafts of a part before its estimates are gone by
SOONEST, LATEST = 32, 512  # steps without a part until it is tried again: twice as many each time it was not worth it
LEAST = 4  # nodes below which it is not worth while to merge
RATE_MEMORY = 32.0  # steps


@dataclass(eq=False)
class Use:
    """What is known of a part that costs a pass of its own."""

    index: int
    most: int = 1 << 30  # nodes of a draft
    cost: Trend = field(default_factory=lambda: Trend(is_proportional=True))  # seconds by depth...
    reading: float = 0.0  # ... and more where it has to read first what it was not asked about
    depths: dict[int, float] = field(default_factory=dict)  # nodes allowed -> how deep its drafts were
    count: int = 0  # steps in which it was asked
    idle: int = 0  # steps since
    interval: int = SOONEST

    @property
    def key(self) -> Key:
        return self.index, 0

    def depth(self, nodes: int) -> float:
        """How deep a draft of so many nodes should be."""
        nodes = min(nodes, self.most)
        return self.depths.get(nodes, float(nodes))

    def took(self, depth: int, seconds: float, is_fresh: bool) -> None:
        if is_fresh:
            self.cost.learn(depth, seconds)
        elif self.cost.is_known:
            self.reading += 0.2 * (max(seconds - self.cost.at(depth), 0.0) - self.reading)

    def saw(self, nodes: int, depth: int) -> None:
        """What came of `nodes` that it was allowed."""
        self.depths[nodes] = 0.8 * self.depth(nodes) + 0.2 * depth if nodes in self.depths else float(depth)


@dataclass(slots=True)
class Offer:
    """A draft that is there already, of a part that reads nothing but the text."""

    draft: Draft
    key: Key
    parts: tuple[int, ...]
    size: int
    depth: int
    is_drawn: bool  # it has a q: its tokens may not be looked at
    trial: int = -1  # its place among the drafts whose fate is counted
    shares: tuple[float, float] = (0.0, 0.0)


@dataclass(slots=True)
class Case:
    """One request of a step."""

    slot: int
    budget: int
    offers: list[Offer]  # the last one is all of them together, if they are guesses
    may_merge: bool = True
    may_merge_all: bool = True  # drafts of several parts that cost a pass: where they are guesses
    stale: tuple[int, ...] = ()  # parts that have to read first


@dataclass(slots=True)
class Plan:
    """What one request gets: an offer, a part's own draft with so many nodes, or one tree of both."""

    offer: Offer | None = None
    nodes: int = 0  # for every part that is asked; 0 = none is
    value: float = 0.0


class Choice:
    """Estimates, and what follows from them."""

    def __init__(self, uses: Sequence[Use], mode: Mode) -> None:
        self.uses, self.mode = uses, mode
        self.worth = Worth()
        self.passes = Trend(is_proportional=False)  # seconds of the target's pass by rows
        self._tokens = self._seconds = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second just now; 0 before anything is known."""
        return self._tokens / self._seconds if self._seconds > 0.0 else 0.0

    def passed(self, tokens: int, seconds: float) -> None:
        """A whole step."""
        fade = 1.0 - 1.0 / RATE_MEMORY
        self._tokens, self._seconds = self._tokens * fade + tokens, self._seconds * fade + seconds

    def best_offer(self, case: Case) -> Plan:
        """Of what is there; none where nothing pays for its rows."""
        best = Plan()
        for offer in case.offers:
            offer.shares = self.worth.shares(case.slot, offer.key)
            value = gain(offer.shares, offer.depth) - self._rows(offer.size)
            if value > best.value or self.mode == "merge":
                best = Plan(offer, 0, value)
        return best

    def choose(self, cases: Sequence[Case]) -> tuple[list[Use], list[Plan]]:
        """The parts to ask in this step, and everybody's plan. The first of them is for all, the others are for those
        that may have drafts of several merged."""
        plans = [self.best_offer(case) for case in cases]
        if self.mode == "merge":
            return self._all(cases, plans)
        chosen, most, best = None, 0.0, plans
        for use in self.uses:
            dear = self.rate * (self.passes.slope + use.cost.slope / len(cases))
            others = [self._with(case, use, plan, dear) for case, plan in zip(cases, plans, strict=True)]
            if self._is_due(use):
                use.interval = min(2 * use.interval, LATEST)
                return [use], others
            wins = [other.value - plan.value for other, plan in zip(others, plans, strict=True)]
            wanted = [other if win > 0.0 else plan for other, plan, win in zip(others, plans, wins, strict=True)]
            deepest = max([use.depth(plan.nodes) for plan in wanted if plan.nodes], default=0.0)
            is_stale = any(plan.nodes and use.index in case.stale for case, plan in zip(cases, wanted, strict=True))
            seconds = use.cost.at(deepest) + (use.reading if is_stale else 0.0)
            won = sum([win for win in wins if win > 0.0]) - self.rate * seconds
            if deepest and won > most:
                chosen, most, best = use, won, wanted
        if chosen is None:
            return [], plans
        chosen.interval = SOONEST
        return [chosen], best

    def _all(self, cases: Sequence[Case], plans: Sequence[Plan]) -> tuple[list[Use], list[Plan]]:
        """Everybody drafts, the best part first; the nodes are shared out evenly."""
        uses = sorted([use for use in self.uses if use.most], key=self._worth_all, reverse=True)
        if not uses:
            return [], list(plans)
        found = []
        for case, plan in zip(cases, plans, strict=True):
            offer = plan.offer if case.may_merge and plan.offer is not None and not plan.offer.is_drawn else None
            shares = (len(uses) if case.may_merge_all else 1) + (offer is not None)
            found.append(Plan(offer, -(-case.budget // shares)))
        return uses, found

    def _worth_all(self, use: Use) -> float:
        """To everybody, by what its drafts cost."""
        if use.count < ENOUGH:
            return float("inf")
        depth = use.depth(use.most)
        return gain(self.worth.shares(-1, use.key), depth) - self.rate * use.cost.at(depth)

    def takes(self, slot: int, key: Key, reach: float, size: int) -> bool:
        """Whether an extension of `size` nodes, reached with chance `reach`, pays for its rows."""
        if self.worth.tries(slot, key) < ENOUGH:
            return True
        return reach * gain(self.worth.shares(slot, key), size) > self._rows(size)

    def asked(self, chosen: Sequence[Use]) -> None:
        for use in self.uses:
            is_asked = use in chosen
            use.idle = 0 if is_asked else use.idle + 1
            use.count += is_asked

    def _is_due(self, use: Use) -> bool:
        return use.most > 0 and (use.count < ENOUGH or use.idle >= use.interval)

    def _rows(self, count: float) -> float:
        """Tokens that could be made in the time that so many rows of the target's pass take."""
        return self.rate * self.passes.slope * count

    def _with(self, case: Case, use: Use, plan: Plan, dear: float) -> Plan:
        """The best plan in which a part drafts: alone, or beside the best offer. `dear`: tokens that could be made in
        the time of one more node."""
        shares = self.worth.shares(case.slot, use.key)
        budget = self._length(use, shares, min(case.budget, use.most), dear)
        depth = use.depth(budget)
        alone = Plan(None, budget, gain(shares, depth) - self._rows(depth))
        offer = plan.offer
        if offer is None or offer.is_drawn or not case.may_merge or self.mode == "sequence" or case.budget < LEAST:
            return alone
        beside = min(offer.size, case.budget // 2)
        nodes = min(case.budget - beside, budget)
        depth = use.depth(nodes)
        first, _ = self.worth.shares(case.slot, union(use, offer), *_either(shares, offer.shares))
        # where the offer's first node is wrong and the part's is right, no more is won than the part has drafted
        instead = max(first - offer.shares[0], 0.0) * gain((1.0, shares[1]), depth)
        value = gain(offer.shares, min(offer.depth, beside)) + instead - self._rows(depth + beside)
        merged = Plan(offer, nodes, value)
        return merged if value > alone.value or self._is_due(use) else alone

    def _length(self, use: Use, shares: tuple[float, float], most: int, dear: float) -> int:
        """Nodes of a draft: as many as win more than they cost, where each is one level."""
        first, later = shares
        if self._is_due(use) or use.depth(most) < 0.9 * most or not 0.0 < later < 1.0 or dear <= 0.0:
            return most
        if dear >= first:
            return min(most, 1)
        return min(most, 1 + int(math.log(dear / first) / math.log(later)))


def union(use: Use, offer: Offer) -> Key:
    """The estimate of a part's draft and an offer as one tree."""
    return (use.index, *offer.parts), offer.key[1]


def _either(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    """Where nothing is known of both together: drafters are right and wrong at the same places, mostly."""
    best = max(a, b, key=lambda shares: shares[0] * shares[1])
    return best[0] + 0.25 * min(a[0], b[0]) * (1.0 - best[0]), best[1]
