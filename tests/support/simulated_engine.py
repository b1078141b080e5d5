"""Engines that exist on paper only: known costs, known acceptance, a fake clock. Everything is seeded."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foredraft.draft_length.policy import DraftCandidate, DraftLengthPolicy, DraftOutcome, StepReport

Curve = Callable[[int], float]


def flat(rows: int) -> float:
    """Memory-bound: any pass costs the same."""
    return 1.0


def linear(rows: int) -> float:
    """Compute-bound: every row costs."""
    return 0.1 + 0.9 * rows


def stairs(rows: int) -> float:
    """Padded to multiples of 8, as graphs captured for some sizes are; flat to 16, then ever dearer."""
    padded = -(-rows // 8) * 8
    return 1.0 + 0.04 * padded + 0.02 * max(0, padded - 16)


def bend(rows: int) -> float:
    """Memory hides the arithmetic of eight rows, no more."""
    return max(1.0, rows / 8) + 0.02 * rows


GRAPH_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def graphs(rows: int) -> float:
    """Padded to the rows of captured graphs. Passes beyond the last one are launched kernel by kernel."""
    padded = next((bucket for bucket in GRAPH_BUCKETS if bucket >= rows), None)
    return 1.0 + 0.02 * padded if padded else 3.0 + 0.02 * rows


def wait_for_memory(memory: float) -> Curve:
    """The longer of two times: reading the weights takes `memory`, the arithmetic rises in stairs of eight rows."""
    return lambda rows: max(memory, 0.08 * rows + 0.5 * ((rows - 1) // 8))


CURVES: dict[str, Curve] = {"flat": flat, "linear": linear, "stairs": stairs, "bend": bend}
POINTS = (1, 2, 4, 5, 8, 9, 16, 17, 24, 25, 32, 33, 64, 65, 128, 129, 256, 512)


@dataclass(frozen=True)
class SimulatedEngine:
    """Costs are in plain steps of one request, about."""

    curve: Curve = flat
    per_scored: float = 0.0  # sampling
    per_request: float = 0.0
    draft: float = 0.0  # of one level of a draft...
    draft_row: float = 0.0  # ... and for each request in it
    lookup: float = 0.001  # of a draft, whatever comes of it
    reading: float = 0.0  # of a token that the drafter has not read
    prompt: int = 200  # tokens that a new request has not read
    chunk: int = 0  # tokens of its prompt in the first step of a request; the others were computed before
    follow: float = 0.0  # of a request in a step in which the drafter observes
    misses: bool = False  # a request that the drafter did not observe in some step drafts no more
    accept: Callable[[int, int], float] = lambda step, request: 0.7  # of a node that was reached
    proposes: float = 1.0  # chance that there is a draft at all
    load: Callable[[int], int] = lambda step: 1
    life: int = 10**9  # tokens of a request
    kind: Callable[[int], int] = lambda request: 0
    least: int = 0  # nodes of a draft, by operator or request
    most: int = 8
    noise: float = 0.02
    outliers: float = 0.0  # chance of a step that takes ten times as long
    swing: Callable[[int], float] = lambda step: 1.0  # the whole machine, slower or faster
    after: float = 0.0  # share by which a plain step right after drafts takes longer; a fifth less with each step
    plain_swing: Callable[[int], float] = lambda step: 1.0  # passes without drafts alone, slower or faster
    branches: int = 1  # above 1: a tree of this many siblings at every level
    # Predicted acceptance of a node from the true one, under a random number of the normal distribution; None = none.
    predict: Callable[[float, float], float] | None = None
    seed: int = 0

    def points(self, sizes: Sequence[int] = POINTS) -> list[tuple[int, float]]:
        return [(rows, self.curve(rows)) for rows in sizes]


def make_starting_engine(seed: int, accept: Callable[[int, int], float], num_requests: int = 1) -> SimulatedEngine:
    """Make a small model that has just been loaded.

    A pass with drafts takes half as long again as a plain one, a draft level 0.19 passes. The first passes are slower
    by 60 %, which falls to a third in 13 steps.
    """
    return SimulatedEngine(
        lambda rows: 1.0 if rows == 1 else 1.55 + 0.02 * rows, draft=0.19, lookup=0.02, accept=accept, noise=0.06,
        swing=lambda step: 1.0 + 0.6 * math.exp(-step / 12), after=0.15, outliers=0.01, load=lambda step: num_requests,
        life=10**8, seed=seed,
    )  # fmt: skip


@dataclass
class SimulationTotals:
    seconds: float = 0.0
    plain: float = 0.0  # that plain decoding takes for the same tokens on the same machine in the same moments
    bare: float = 0.0  # the same for plain decoding without a drafter
    observed: list[bool] = field(default_factory=list)  # by step
    tokens: int = 0
    nodes: dict[int, int] = field(default_factory=dict)  # by request
    since_drafts: int = 1000  # plain steps since the last step with drafts
    budgets: list[int] = field(default_factory=list)  # of all requests together, by step
    reasons: list[str] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Over plain decoding's."""
        return self.plain / self.seconds


class ConstantLength:
    """A fixed K."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes

    def allocate(self, candidates, num_pass_tokens, attended_tokens=0):
        return [min(self.nodes, ask.max_nodes) for ask in candidates]

    def record_step(self, report: StepReport) -> None:
        pass

    def forget(self, slots) -> None:
        pass


@dataclass
class SimulatedRequest:
    number: int
    slot: int
    left: int
    unread: int
    is_ready: bool = True
    chunk: int = 0  # prompt tokens of the next step


def run(world: SimulatedEngine, lengths: DraftLengthPolicy, steps: int = 3000) -> SimulationTotals:
    chance, totals, running = random.Random(world.seed), SimulationTotals(), []
    born = 0
    for step in range(steps):
        while len(running) < world.load(step):
            used = {r.slot for r in running}
            slot = next(s for s in range(len(used) + 1) if s not in used)
            left = world.life if world.life >= 10**9 else max(1, round(world.life * chance.uniform(0.2, 1.8)))
            running.append(SimulatedRequest(born, slot, left, world.prompt, chunk=world.chunk))
            born += 1
        for gone in running[world.load(step) :]:
            lengths.forget([gone.slot])
        running = running[: world.load(step)]
        _step(world, lengths, step, running, chance, totals)
        for done in [r for r in running if r.left <= 0]:
            lengths.forget([done.slot])
        running = [r for r in running if r.left > 0]
    return totals


def _step(
    world: SimulatedEngine,
    lengths: DraftLengthPolicy,
    step: int,
    running: list,
    chance: random.Random,
    totals: SimulationTotals,
) -> None:
    count, foresight = len(running), random.Random(f"{world.seed} {step}")
    asks = [
        DraftCandidate(
            r.slot, min(world.most, r.left - 1), min(world.least, r.left - 1), world.kind(r.number), r.is_ready
        )
        for r in running
        if r.left > 1
    ]
    chunks = sum(r.chunk for r in running)
    granted = lengths.allocate(asks, count + chunks, 200 * (count + chunks))
    budgets = {ask.slot: budget for ask, budget in zip(asks, granted, strict=True)}
    outcomes, read = [], 0
    for r in running:
        budget = budgets.get(r.slot, 0)
        drafted = budget if budget and r.is_ready and chance.random() < world.proposes else 0
        kept = _accept_nodes(world, step, r.number, drafted, chance)
        predicted: tuple[float, ...] = ()
        if world.predict is not None:
            rate = world.accept(step, r.number)
            predicted = tuple(world.predict(rate, foresight.gauss(0.0, 1.0)) for _ in range(drafted))
        outcomes.append(DraftOutcome(r.slot, budget, drafted, kept, predicted))
        read += r.unread if budget else 0
        r.unread = 0 if budget else r.unread + 1
        r.left, r.chunk = r.left - 1 - len(kept), 0
        totals.nodes[r.number] = totals.nodes.get(r.number, 0) + drafted
        totals.tokens += 1 + len(kept)
    drafted = sum(o.num_drafted for o in outcomes)
    depth, drafting = max(o.num_drafted for o in outcomes), sum(1 for o in outcomes if o.num_drafted)
    pace = world.swing(step) * max(0.5, chance.gauss(1.0, world.noise))
    pace *= 10.0 if chance.random() < world.outliers else 1.0
    other = max(0.5, chance.gauss(1.0, world.noise))
    is_observed = not world.misses or lengths.needs_observation
    for r in running:
        r.is_ready = r.is_ready and is_observed
    totals.observed.append(is_observed)
    draft = world.follow * count * is_observed + world.reading * read
    draft += world.lookup * any(budgets.values()) + depth * (world.draft + world.draft_row * drafting)
    plain = world.curve(count) + world.per_scored * count + world.per_request * count
    plain *= world.plain_swing(step)
    verify = world.curve(count + chunks + drafted) + world.per_scored * (count + drafted) + world.per_request * count
    reading = world.curve(count + chunks) - world.curve(count)  # prompts cost the same without drafts
    totals.since_drafts = 0 if any(budgets.values()) else totals.since_drafts + 1
    if totals.since_drafts:
        verify *= world.plain_swing(step)
        verify *= 1.0 + world.after * 0.8 ** (totals.since_drafts - 1)
    seconds = pace * (verify + other * draft)
    totals.seconds += seconds
    share = sum(1 + len(o.accepted_nodes) for o in outcomes) / count
    totals.plain += pace * ((plain + world.follow * count) * share + reading)
    totals.bare += pace * (plain * share + reading)
    totals.budgets.append(sum(granted))
    totals.reasons.append(getattr(getattr(lengths, "decision", None), "reason", ""))
    rows, context = count + chunks + drafted, 200 * (count + chunks + drafted)
    report = StepReport(
        count, rows, count + drafted, context, pace * other * draft, seconds, tuple(outcomes), is_observed
    )
    lengths.record_step(report)


def _accept_nodes(
    world: SimulatedEngine, step: int, request: int, drafted: int, chance: random.Random
) -> tuple[int, ...]:
    """Accept nodes of a chain, or of a tree with `branches` siblings a level: at most one node of a level."""
    kept: list[int] = []
    for level in range(-(-drafted // world.branches)):
        size = min(world.branches, drafted - level * world.branches)
        if chance.random() >= world.accept(step, request):
            break
        which = chance.randrange(world.branches)
        if which >= size:
            break
        kept.append(level * world.branches + which + 1)
    return tuple(kept)


def find_best_fixed(world: SimulatedEngine, steps: int = 3000) -> tuple[int, float]:
    """Find the fastest fixed K of this simulation, and its speed over that of plain decoding."""
    speeds = {k: run(world, ConstantLength(k), steps).speed for k in range(1, world.most + 1)}
    best = max(speeds, key=lambda k: speeds[k])
    return (best, speeds[best]) if speeds[best] > 1.0 else (0, 1.0)
