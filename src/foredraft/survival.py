"""How likely a drafted node is to be kept, from what became of earlier drafts. Pure and without randomness.

A chain's node is reached when all before it were kept, and then kept or not; a tree's node is tried whenever it was
allowed. Either way an estimate is a share of tries, so a window that was kept whole says nothing against a longer one:
what lies beyond starts from the estimate of the last node.
"""

from collections import defaultdict
from collections.abc import Sequence

FIRST = 0.6  # of a first node nobody has tried yet
SHARED_MEMORY, OWN_MEMORY = 256, 96  # drafts
SHARED_PRIOR, OWN_PRIOR = 2.0, 8.0  # tries that the estimate a node starts from is worth
PAUSE = 4  # steps without a draft that age the evidence as much as one draft...
DOUBTED = 24.0  # tries' worth of evidence that is left when it has misled
FRESH = 8.0  # ... until so many tries are left: a pause makes uncertain, it does not make good or bad


class Tally:
    """Tries and hits by node. Newer ones weigh more: the weight of one grows instead of all the others' shrinking."""

    def __init__(self, memory: int) -> None:
        self.tries: list[float] = []
        self.hits: list[float] = []
        self.weight = 1.0
        self._growth = 1.0 / (1.0 - 1.0 / memory)
        self._idle = self._growth ** (1.0 / PAUSE)

    def count(self, tried: Sequence[int] | range, hit: Sequence[int] | range) -> None:
        """Nodes from 1; every hit was tried."""
        if self.weight > 1e9:
            self.tries = [t / self.weight for t in self.tries]
            self.hits = [h / self.weight for h in self.hits]
            self.weight = 1.0
        self.weight *= self._growth
        missing = tried[-1] - len(self.tries)
        if missing > 0:
            self.tries += [0.0] * missing
            self.hits += [0.0] * missing
        for node in tried:
            self.tries[node - 1] += self.weight
        for node in hit:
            self.hits[node - 1] += self.weight

    def doubt(self) -> None:
        """What was counted has misled: keep the shares, and let DOUBTED tries of what comes weigh as much."""
        most = max(self.tries, default=0.0)
        self.weight = max(self.weight, most / DOUBTED)

    def pause(self, steps: int) -> None:
        """So many steps went by without a draft."""
        if self.tries and self.tries[0] > FRESH * self.weight:
            self.weight *= self._idle**steps


class Shares:
    """One share for every node of every request: what all of a kind have in common, and what one does differently."""

    def __init__(self, first: float) -> None:
        self._first = first
        self._shared: defaultdict[int, Tally] = defaultdict(lambda: Tally(SHARED_MEMORY))  # by kind
        self._own: dict[int, Tally] = {}

    def clear(self) -> None:
        self._shared.clear()
        self._own.clear()

    def forget(self, slot: int) -> None:
        self._own.pop(slot, None)

    def count(self, slot: int, kind: int, tried: Sequence[int] | range, hit: Sequence[int] | range) -> None:
        self._shared[kind].count(tried, hit)
        own = self._own.get(slot)
        if own is None:
            own = self._own[slot] = Tally(OWN_MEMORY)
        own.count(tried, hit)

    def doubt(self) -> None:
        for tally in (*self._shared.values(), *self._own.values()):
            tally.doubt()

    def rest(self, slot: int, steps: int) -> None:
        own = self._own.get(slot)
        if own is not None:
            own.pause(steps)

    def pause(self, steps: int) -> None:
        for tally in self._shared.values():
            tally.pause(steps)

    def shared(self, kind: int, most: int, decline: float) -> list[float]:
        """Of a request of which its kind alone is known. A node starts from `decline` times the one before it."""
        found: list[float] = []
        last, tally = self._first, self._shared[kind]
        pull = SHARED_PRIOR * tally.weight
        for t, h in zip(tally.tries[:most], tally.hits, strict=False):
            last = (h + pull * last) / (t + pull)
            found.append(last)
            last *= decline
        while len(found) < most:
            found.append(last)
            last *= decline
        return found

    def of(self, slot: int, shared: Sequence[float]) -> list[float]:
        """One request's: where it was not tried, it differs from the others by the odds by which it last did."""
        own = self._own.get(slot)
        if own is None:
            return list(shared)
        shared = [min(max(share, 1e-6), 1.0 - 1e-6) for share in shared]
        found: list[float] = []
        odds = 1.0  # this request's over everybody's
        pull = OWN_PRIOR * own.weight
        for t, h, common in zip(own.tries, own.hits, shared, strict=False):
            prior = common * odds / (1.0 - common + common * odds)
            share = (h + pull * prior) / (t + pull)
            found.append(share)
            odds = share * (1.0 - common) / max(common * (1.0 - share), 1e-9)
        for common in shared[len(found) :]:
            found.append(common * odds / (1.0 - common + common * odds))
        return found


class Survival:
    """Estimates for every request, by its slot; a slot that was forgotten starts from what all have in common."""

    def __init__(self) -> None:
        self._kept, self._drafted = Shares(FIRST), Shares(1.0)
        self.is_tree = False  # some draft was kept by nodes that are not 1, 2, ...
        self.is_short = False  # some draft had fewer nodes than it was allowed
        self._kinds: dict[int, int] = {}  # by slot

    def meet(self, slot: int, kind: int) -> None:
        """A request is of this kind: what is kept of its drafts says nothing of another kind's."""
        self._kinds[slot] = kind

    def learn(self, slot: int, budget: int, drafted: int, kept: Sequence[int]) -> None:
        """What came of one request's draft of at most `budget` nodes. Nodes count from 1."""
        if budget <= 0:
            self.rest(slot)
            return
        if kept and kept[-1] != len(kept) and not self.is_tree:
            self.is_tree = True
            self._kept.clear()
        # A node that was allowed and not drafted is a node that was not kept: what a budget wins is what counts.
        tried = range(1, budget + 1) if self.is_tree else range(1, min(len(kept) + 1, budget) + 1)
        kind = self._kinds.get(slot, 0)
        self._kept.count(slot, kind, tried, kept)
        self.is_short = self.is_short or drafted < budget
        if self.is_short:
            self._drafted.count(slot, kind, range(1, min(drafted + 1, budget) + 1), range(1, drafted + 1))

    def rest(self, slot: int, steps: int = 1) -> None:
        """Steps in which this request did not draft."""
        self._kept.rest(slot, steps)
        self._drafted.rest(slot, steps)

    def pause(self, steps: int = 1) -> None:
        """Steps in which nobody drafted."""
        self._kept.pause(steps)
        self._drafted.pause(steps)

    def doubt(self) -> None:
        """Drafts that these estimates spoke for have lost time: learn afresh from what is known."""
        self._kept.doubt()
        self._drafted.doubt()

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._kept.forget(slot)
            self._drafted.forget(slot)
            self._kinds.pop(slot, None)

    def gains(self, slots: Sequence[int], most: int) -> list[list[float]]:
        """For each slot [most]: the tokens that node j wins if it is allowed. Falling in j."""
        found = self._estimated(self._kept, slots, most, 0.9 if self.is_tree else 1.0)
        return [_falling(shares) if self.is_tree else _products(shares) for shares in found]

    def rows(self, slots: Sequence[int], most: int) -> list[list[float]]:
        """For each slot [most]: the chance that node j is drafted if it is allowed."""
        if not self.is_short:
            return [[1.0] * most for _ in slots]
        return [_products(shares) for shares in self._estimated(self._drafted, slots, most, 1.0)]

    def _estimated(self, shares: Shares, slots: Sequence[int], most: int, decline: float) -> list[list[float]]:
        kinds = [self._kinds.get(slot, 0) for slot in slots]
        shared = {kind: shares.shared(kind, most, decline) for kind in set(kinds)}
        return [shares.of(slot, shared[kind]) for slot, kind in zip(slots, kinds, strict=True)]


def _products(shares: Sequence[float]) -> list[float]:
    found, product = [], 1.0
    for share in shares:
        product *= share
        found.append(product)
    return found


def _falling(shares: Sequence[float]) -> list[float]:
    """The nearest sequence that does not rise: a node is only had with all before it, so a block shares its mean."""
    blocks: list[tuple[float, int]] = []
    for share in shares:
        mean, size = share, 1
        while blocks and blocks[-1][0] < mean:
            before, count = blocks.pop()
            mean, size = (mean * size + before * count) / (size + count), size + count
        blocks.append((mean, size))
    return [mean for mean, size in blocks for _ in range(size)]
