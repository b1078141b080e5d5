"""How long the drafts of a step may be. Pure: no model, no tensors, no clock of its own.

A length is chosen before anything is drafted and from earlier steps alone: under rejection sampling one that depended
on the drafted tokens would change the law. docs/controller.md explains `Adaptive` in a page.
"""

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Literal, NamedTuple, Protocol

from foredraft.costs import CostCurve, DraftCost, Plan, Planner, Scene
from foredraft.survival import Survival


class Ask(NamedTuple):
    """One request that could be drafted for in this step."""

    slot: int
    most: int  # nodes it may have: what is left of its length, of the drafter's size, of its own wish
    is_fixed: bool = False  # the request named its length itself
    kind: int = 0  # drafts of one kind are kept alike: 0 = greedy, 1 = drawn


class Outcome(NamedTuple):
    """What came of one request's draft."""

    slot: int
    budget: int  # nodes it was allowed
    drafted: int  # nodes it had
    accepted: tuple[int, ...] = ()  # those that were kept, 1 = the first node below the root; a chain's are 1, 2, ...


class StepReport(NamedTuple):
    """One step, after the fact."""

    num_requests: int
    num_rows: int  # rows of the target's pass: prompt chunks, last tokens, drafted nodes
    num_scored: int  # rows whose law was made: last tokens and drafted nodes
    context: int  # sum over the rows of the tokens each attended to
    draft_time: float  # seconds the drafter took, reading included
    step_time: float  # seconds of the whole step, drafting included
    outcomes: tuple[Outcome, ...] = ()  # of every request whose last token was scored


class Lengths(Protocol):
    """Who decides how many nodes each request may draft."""

    def allot(self, asks: Sequence[Ask], num_rows: int, context: int = 0) -> list[int]:
        """At most `most` nodes for each; the pass has `num_rows` rows without them, which attend to `context`."""

    def learn(self, report: StepReport) -> None:
        """After every step."""

    def forget(self, slots: Sequence[int]) -> None:
        """These requests are gone."""


class Fixed:
    """Every draft as long as it may be."""

    def allot(self, asks: Sequence[Ask], num_rows: int, context: int = 0) -> list[int]:
        return [ask.most for ask in asks]

    def learn(self, report: StepReport) -> None:
        """Nothing: it never changes."""

    def forget(self, slots: Sequence[int]) -> None:
        """Nothing is kept."""


Reason = Literal["start", "pays", "does not pay", "probe", "measure", "guard", "fixed"]

MARGIN = 0.01  # predicted gain that a change between drafting and not drafting needs
ALLOWANCE = 0.01  # of the time may be lost: to probes, to the start, and to drafts that were to pay and did not
PURSE = 24.0  # steps' worth that may be saved up: plain ones, or such as there are with drafts...
DEAR = 0.99  # ... of late
FIRST_PURSE = 14.0  # plain steps' worth that there is to begin with
START = (0, 0, 1, 1, 3, 3, 3)  # nodes of the first steps, of at most FEW requests: plain ones, then a look at the price
FEW = 2
START_AT_LEAST = 3  # before that the price of a draft cannot be told from that of reading the prompt
PROBE_NODES, PROBE_STEPS = 2, 4
SOONEST, LATEST = 32, 256  # steps between probes: twice as many after each that showed nothing new
STRETCH = 32  # steps between drafts half as long again as what is thought best: nothing else tests that they are not
PACE = 0.2  # weight of the newest step in how fast the machine is just now
MEASURED = 0.1  # weight of the newest plain step in what plain steps cost against the prediction
REUSE = 16  # steps a plan holds while the same requests ask for the same; twice that among many, or at rest
MANY = 16  # requests
UNSEEN = 3  # steps that pass unseen between two looks, while nobody drafts


class Decision(NamedTuple):
    """What was decided for a step, and why."""

    reason: Reason
    nodes: int = 0  # granted, over all requests
    depth: int = 0  # the most that one request was granted
    plain_rate: float = 0.0  # tokens per second predicted without drafts; 0 before anything is known
    rate: float = 0.0  # with the best drafts there are, taken or not
    acceptance: float = 0.0  # of the nodes of those drafts, the share that should be kept


class Adaptive:
    """As many nodes as make the most tokens per second, none where none pay. Never much slower than plain decoding.

    Three parts: a plan from measured costs and estimated survival; probes and single plain steps, which keep both
    honest; and a purse. Whatever drafting loses against plain decoding is taken from the purse and what it wins goes
    in, as does ALLOWANCE of the time that passes. Probes are bought from it, and when it is empty nobody drafts,
    whatever the plan says. So over any long run at most ALLOWANCE of the time is lost.
    """

    def __init__(self, curve: CostCurve | None = None, draft: DraftCost | None = None) -> None:
        self.curve, self.draft, self.survival = curve or CostCurve(), draft or DraftCost(), Survival()
        self.planner = Planner(self.curve, self.draft)
        self._priced, self._prices = 0, dict[int, tuple[CostCurve, DraftCost, Planner]]()  # by kind of text
        self.decision = Decision("start")
        self.counts: Counter[Reason] = Counter()  # steps by reason
        self._plan, self._age = Plan(), 0
        self._key: object = None  # what the plan was made for
        self._kinds: frozenset[int] = frozenset()  # of requests that it was made for
        self._read: dict[int, int] = {}  # the step after a request's last draft; absent = never drafted
        self._quiet = 0  # steps that were not looked at
        self._asked, self._others, self._has_fixed = 0, 0, False
        self._step, self._start = 0, 0
        self._on = True
        self._since_plain = 0
        self._pace = 1.0  # how slow the machine is just now; all other times are in seconds at pace 1
        self._purse, self._floor, self._plain = 0.0, 0.0, 0.0  # seconds
        self._dear = 0.0  # seconds of the dearest step with drafts, of late
        self._probed: tuple[int, ...] = ()
        self._probe_left, self._interval, self._next_probe, self._load = 0, SOONEST, 0, 0

    # -- deciding

    def allot(self, asks: Sequence[Ask], num_rows: int, context: int = 0) -> list[int]:
        if self._is_idle(asks):
            return [0] * len(asks)
        self._meet(asks)
        free = [ask for ask in asks if not ask.is_fixed and ask.most > 0]
        budgets = {ask.slot: ask.most for ask in asks if ask.is_fixed}
        self._asked, self._has_fixed = len(asks), bool(budgets)
        reason: Reason = "fixed"
        if free:
            self._replan(asks, free, num_rows, context)
            reason, own = self._choose(free, num_rows)
            budgets |= own
        granted = [min(budgets.get(ask.slot, 0), ask.most) for ask in asks]
        plan = self._plan if free else Plan()
        self.decision = Decision(
            reason,
            sum(granted),
            max(granted, default=0),
            plan.plain_rate / self._pace,
            plan.rate / self._pace,
            plan.acceptance,
        )
        self.counts[reason] += 1
        return granted

    def _meet(self, asks: Sequence[Ask]) -> None:
        """Turn to what is known of texts of this kind: to draw a token, or a draft, costs more than to take the
        likeliest."""
        for ask in asks:
            self.survival.meet(ask.slot, ask.kind)
        kind = max((ask.kind for ask in asks), default=self._priced)
        if kind != self._priced:
            self._prices[self._priced] = self.curve, self.draft, self.planner
            if kind not in self._prices:
                curve, draft = deepcopy(self.curve), DraftCost()
                self._prices[kind] = curve, draft, Planner(curve, draft)
            self.curve, self.draft, self.planner = self._prices[kind]
            self._priced, self._key = kind, None

    def _is_idle(self, asks: Sequence[Ask]) -> bool:
        """Nobody drafts, and nothing is due that could change it: a step like the last, which must cost next to
        nothing."""
        if self._on or self._probed or self._start < len(START) or self._age + 1 >= 2 * REUSE:
            return False
        if any(ask.kind not in self._kinds for ask in asks):  # a plan for others says nothing of these
            self._key = None
            return False
        is_calm = self.decision.nodes == 0 and self._plan.gain <= 1.0 + MARGIN and self._step < self._next_probe
        if not is_calm or not self._load / 2 < len(asks) < self._load * 2 or any(ask.is_fixed for ask in asks):
            return False
        self._age += 1
        self._asked, self._has_fixed = len(asks), False
        self.counts[self.decision.reason] += 1
        return True

    def _replan(self, asks: Sequence[Ask], free: Sequence[Ask], num_rows: int, context: int) -> None:
        key = (num_rows, tuple(asks), self._others, self.survival.is_tree)
        self._age += 1
        if self._holds(key, len(free)):
            return
        self._key, self._age, self._kinds = key, 0, frozenset(ask.kind for ask in asks)
        fixed = [ask for ask in asks if ask.is_fixed]
        most = max((ask.most for ask in fixed), default=0)
        gains = self.survival.gains([ask.slot for ask in fixed], most) if most else []
        scene = Scene(
            len(asks) + self._others,
            num_rows,
            context / max(num_rows, 1),
            most,
            sum(ask.most for ask in fixed),
            sum(sum(gain[: ask.most]) for ask, gain in zip(fixed, gains, strict=False)),
        )
        slots, most_of = [ask.slot for ask in free], [ask.most for ask in free]
        most = max(most_of)
        gains, rows = self.survival.gains(slots, most), self.survival.rows(slots, most)
        self._plan = self.planner.best(scene, slots, most_of, gains, rows)

    def _holds(self, key: object, count: int) -> bool:
        """Whether the plan is good enough for this step. At rest it only has to say when to begin; among many, one
        that has just come can wait for its first draft."""
        if self._start < len(START) or self._key is None:
            return False
        if not self._on:
            return self._age < 2 * REUSE
        if key == self._key:
            return self._age < (REUSE if count < MANY else 2 * REUSE)
        return count >= MANY and self._age < REUSE // 2

    def _choose(self, free: Sequence[Ask], num_rows: int) -> tuple[Reason, dict[int, int]]:
        if self._start < len(START):
            nodes = START[self._start]
            return "start", {ask.slot: min(nodes, ask.most) for ask in free[:FEW]}
        self._switch(free)
        reason: Reason = "pays" if self._on else "guard" if self._plan.gain > 1.0 + MARGIN else "does not pay"
        granted = self._plan.nodes if self._on else {}
        if self._on and self._since_plain >= min(max(200 * (self._plan.gain - 1.0), 16), 256):
            return "measure", {}
        if self._on and self._step % STRETCH == 0:
            granted = {slot: nodes + -(-nodes // 2) for slot, nodes in granted.items()}
        self._probe(free, granted, num_rows)
        if self._probed:
            granted = granted | {slot: max(PROBE_NODES, granted.get(slot, 0)) for slot in self._probed}
            reason = reason if self._on else "probe"
        return reason, self._affordable(granted, num_rows) if self._on else granted

    def _affordable(self, granted: dict[int, int], num_rows: int) -> dict[int, int]:
        """Halved until the purse can bear that nothing of them is kept. A few long drafts gone wrong would empty it
        otherwise, and shut out the short ones that fill it again."""
        room = max(self._purse - self._floor, 2 * self._plain)
        while granted and (PURSE / 2) * self._plain > room < self._risk(granted, num_rows):
            granted = {slot: nodes // 2 for slot, nodes in granted.items() if nodes > 1}
        return granted

    def _risk(self, granted: dict[int, int], num_rows: int) -> float:
        """Seconds that these drafts add to the step."""
        scene, nodes = Scene(self._load + self._others, num_rows, 0.0), sum(granted.values())
        drafting = self.draft.predict(len(granted), max(granted.values()), nodes) - self.draft.predict(
            len(granted), 0, 0
        )
        return self.planner.verify(scene, nodes) - self.planner.verify(scene, 0) + drafting

    def _switch(self, free: Sequence[Ask]) -> None:
        """Drafting begins when it pays and the purse can bear it, and ends when it does not or the purse is empty."""
        if self._on:
            is_empty = self._purse < self._floor
            self._on = self._plan.gain >= 1.0 - MARGIN and not is_empty
            if is_empty:
                self.survival.doubt()
            if not self._on:
                self._probed, self._next_probe = (), self._step + self._interval
        elif self._plan.gain > 1.0 + MARGIN and self._purse > self._plain:
            # What was not read has to be, once: a loan, if the drafts would pay it back soon.
            reading = self._reading([ask.slot for ask in free if self._plan.nodes.get(ask.slot)])
            if reading <= 100 * (self._plan.gain - 1.0) * self._plain:
                self._on, self._floor, self._interval = True, -min(reading, PURSE * self._plain / 2), SOONEST

    def _reading(self, slots: Sequence[int]) -> float:
        unread, newcomers = self._behind(slots)
        return self.draft.predict(0, 1, 0, unread, newcomers) - self.draft.predict(0, 1, 0)

    def _behind(self, slots: Sequence[int]) -> tuple[int, int]:
        """Tokens that the drafter has yet to read, and requests of which it has read nothing."""
        known = [self._step - self._read[slot] for slot in slots if slot in self._read]
        return sum(known), len(slots) - len(known)

    def _probe(self, free: Sequence[Ask], granted: dict[int, int], num_rows: int) -> None:
        """A few short drafts in a row of requests that have none, when the purse has saved up what they may lose.

        In a row, because the first has to read what the drafter missed: that is part of the price of the probe, and
        known to be no part of the price of a draft.
        """
        if self._probe_left:
            self._probe_left -= 1
            if self._probe_left:
                return
            has_paid = any(granted.get(slot, 0) for slot in self._probed)
            self._interval = SOONEST if has_paid else min(2 * self._interval, LATEST)
            self._probed, self._next_probe = (), self._step + self._interval
        load = len(free)
        if not self._load / 2 < load < self._load * 2:
            self._load, self._interval, self._next_probe = load, SOONEST, min(self._next_probe, self._step)
        if self._step < self._next_probe:
            return
        left = [ask.slot for ask in free if not granted.get(ask.slot, 0)]
        if not left:
            return
        left.sort(key=lambda slot: self._read.get(slot, self._step))
        price = self._price(left[:1], load, num_rows)
        count = 1
        while count < len(left) and self._price(left[: 2 * count], load, num_rows) <= 1.5 * price:
            count *= 2  # where rows are free the others come along
        price = self._price(left[:count], load, num_rows)
        if self._purse > price + 2 * self._plain:
            self._probed, self._probe_left = tuple(left[:count]), PROBE_STEPS

    def _price(self, slots: Sequence[int], load: int, num_rows: int) -> float:
        """Seconds that a probe of these requests adds, if it wins nothing."""
        nodes = PROBE_NODES * len(slots)
        scene = Scene(load + self._others, num_rows, 0.0)
        once = self.planner.verify(scene, nodes) - self.planner.verify(scene, 0)
        if not self._on:
            once += self.draft.predict(load, PROBE_NODES, nodes) - self.draft.predict(load, 0, 0)
        return PROBE_STEPS * once + self._reading(slots)

    # -- learning

    def learn(self, report: StepReport) -> None:
        outcomes = report.outcomes
        slots = [o.slot for o in outcomes if o.budget > 0]
        if self._rests(bool(slots)):
            return
        depth = max((o.budget for o in outcomes), default=0)
        nodes = sum([o.drafted for o in outcomes])
        unread, newcomers = self._behind(slots)
        counts = report.num_requests, report.num_rows, report.num_scored, report.context
        predicted = self.curve.predict(*counts)
        believed = self.curve.learn(*counts, max(report.step_time - report.draft_time, 0.0) / self._pace)
        drafting = report.draft_time / self._pace
        drafting = self.draft.learn(len(outcomes), depth, nodes, unread, newcomers, drafting, believed)
        if predicted > 0.0:
            ratio = believed / predicted
            self._pace *= 1.0 + PACE * (ratio - 1.0)
            if not depth:
                self.planner.measured += MEASURED * (ratio - self.planner.measured)
        if outcomes:
            self._account(report, nodes, depth, believed + drafting)
        for o in outcomes:
            if o.budget > 0:
                self.survival.learn(o.slot, o.budget, o.drafted, o.accepted)
                self._read[o.slot] = self._step + 1
            else:
                self.survival.rest(o.slot, self._quiet + 1)
        if not depth:
            self.survival.pause(self._quiet + 1)
        self._quiet = 0
        self._others, self._asked = max(0, len(outcomes) - self._asked) if self._asked else 0, 0
        self._since_plain = self._since_plain + 1 if depth else 0
        if self._start < len(START) and outcomes:
            is_ruinous = self._purse < 0.0 and self._start >= START_AT_LEAST
            self._start = len(START) if is_ruinous else self._start + 1
        self._step += 1

    def _rests(self, has_drafts: bool) -> bool:
        """While nobody drafts most steps pass unseen: to know plain steps better would cost more than it is worth."""
        is_busy = self._asked > 0 and (self._on or self._start < len(START))
        if has_drafts or is_busy or self._quiet == UNSEEN:
            return False
        self._quiet += 1
        self._step += 1
        self._asked = 0
        self._since_plain = 0
        self._purse = min(self._purse + ALLOWANCE * self._plain, PURSE * self._plain)
        return True

    def _account(self, report: StepReport, nodes: int, depth: int, seconds: float) -> None:
        """Book what the step lost or won against the same step without drafts."""
        count, context = len(report.outcomes), report.context / max(report.num_rows, 1)
        idle = self.draft.predict(count, 0, 0)
        rows, scored = report.num_rows - nodes, report.num_scored - nodes
        measured = self.planner.measured
        plain = measured * self.curve.predict(report.num_requests, rows, scored, context * rows) + idle
        alone = plain if rows == count else measured * self.curve.predict(count, count, count, context * count) + idle
        if not self._plain:
            self._purse = FIRST_PURSE * alone
        self._plain = alone
        self._purse += ALLOWANCE * plain
        self._dear *= DEAR
        if depth and not self._has_fixed:
            won = sum([len(o.accepted) for o in report.outcomes])
            self._purse += plain + won * alone / count - seconds
            self._dear = max(self._dear, seconds)
        self._purse = min(self._purse, PURSE * max(alone, self._dear))
        if self._purse >= 0.0:
            self._floor = 0.0

    def forget(self, slots: Sequence[int]) -> None:
        self.survival.forget(slots)
        for slot in slots:
            self._read.pop(slot, None)
        if not set(self._probed).isdisjoint(slots):
            self._probed, self._probe_left = (), 0
        left = {slot: nodes for slot, nodes in self._plan.nodes.items() if slot not in slots}
        self._plan = replace(self._plan, nodes=left)
        if self._on and len(left) < MANY:
            self._key = None
