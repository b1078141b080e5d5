"""What a step costs, and which drafts are worth it. Seconds throughout.

The target's pass is priced from a measured curve, the draft from what drafts have cost. Both are lines through a few
features, fitted as the steps go by. Pure: numbers in, numbers out, no clock.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MEMORY = 128  # steps after which an observation has lost two thirds of its weight
OUTLIER = 0.5  # a time further than this share from the prediction is cut to it...
EAGER = 16  # ... and the line is fitted anew after each of this many first observations, later after every EVERY
EVERY = 12
KNOWN = 64  # observations; after them every second one is taken in
SHORT_PROMPT = 64  # tokens; a guess on the short side, so that reading is thought dear rather than cheap


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
        self._outliers = 0  # lately, above (+) or below (-): the more, the further one is believed

    def predict(self, features: Sequence[float]) -> float:
        return sum([w * x for w, x in zip(self.weights, features, strict=True)])

    def learn(self, features: Sequence[float], seconds: float, scale: float = 0.0) -> float:
        """Take one observation in, and return as much of `seconds` as was believed.

        Errors count in units of `scale`: of what is predicted, or of the pass that a draft stands beside.
        """
        predicted = self.predict(features)
        believed = self._believe(seconds, predicted, max(predicted, scale))
        self._count += 1
        if self._count > KNOWN and self._count % 2:  # to take it in costs more than all the rest of a decision
            return believed
        unit = 1.0 / (scale or predicted or max(believed, 1e-9))
        x = np.array(features) * unit
        left = (1.0 - 1.0 / MEMORY) ** (2 if self._count > KNOWN else 1)
        self._gram *= left
        self._moment *= left
        self._gram += x[:, None] * x
        self._moment += x * (believed * unit)
        if self._count <= EAGER or self._count % EVERY == 0:
            self._fit()
        return believed

    def _believe(self, seconds: float, predicted: float, scale: float) -> float:
        """A pause or a slow moment comes alone; a machine that has become slower stays so, and is soon followed."""
        if self._count < self._naive or scale <= 0.0:
            return seconds
        reach = scale * OUTLIER * 2.0 ** min(abs(self._outliers), 30)
        if abs(seconds - predicted) <= reach:
            self._outliers -= (self._outliers > 0) - (self._outliers < 0)
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
            found = np.linalg.solve(gram[kept][:, kept], moment[kept])
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
        self._line = Line((known, 0.0, 0.0, 0.0, 0.0), pull, 0 if points else 8)

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
        self._has_resumed = False  # nobody has drafted after a pause yet: go by what reading the prompts took
        self._idle = Line((0.0,), (0.0,), naive=1)  # by requests
        # 1, depth, nodes, unread, newcomers. Coefficients that cannot be told apart share what they explain.
        self._line = Line((0.0,) * 5, (0.02, 0.005, 0.2, 0.02, 0.02), naive=4)

    def predict(self, requests: int, depth: int, nodes: float, unread: int = 0, newcomers: int = 0) -> float:
        idle = self._idle.weights[0] * requests
        if not depth:
            return idle
        a, b, c, d, e = self._line.weights
        if not self._has_resumed:
            d = e / SHORT_PROMPT
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
        self._has_resumed = self._has_resumed or unread > 4
        return idle + self._line.learn((1.0, depth, nodes, unread, newcomers), max(seconds - idle, 0.0), scale)


@dataclass(frozen=True)
class Scene:
    """A step before its drafts: what plans are compared on."""

    requests: int  # that will have a new token
    rows: int
    context: float  # that a row attends to
    fixed_depth: int = 0
    fixed_nodes: int = 0
    fixed_gain: float = 0.0  # tokens that drafts of a fixed length should win


@dataclass(frozen=True)
class Plan:
    """The best drafts there are, whether or not they pay."""

    nodes: dict[int, int] = field(default_factory=dict)  # by slot
    depth: int = 0
    plain_rate: float = 0.0
    rate: float = 0.0
    acceptance: float = 0.0

    @property
    def gain(self) -> float:
        return self.rate / self.plain_rate if self.plain_rate > 0.0 else 0.0


class Planner:
    """Maximises tokens per second over all admissible sets of nodes, for given costs and estimates."""

    def __init__(self, curve: CostCurve, draft: DraftCost) -> None:
        self.curve, self.draft = curve, draft
        self.measured = 1.0  # plain steps took so many times what was predicted for them

    def best(
        self, scene: Scene, slots: Sequence[int], most: Sequence[int], gains: list[list[float]], rows: list[list[float]]
    ) -> Plan:
        """Every set is a prefix of some request's nodes, the likeliest nodes first, none deeper than some depth.

        All sets are looked at: a pass costs by steps, and what does not pay on one shelf may pay on the next.
        `most` nodes of each slot, `gains` and `rows` [B, max(most)] as Survival gives them.
        """
        if len(slots) == 1:
            return self._one(scene, slots[0], gains[0], rows[0])
        return self._many(scene, slots, np.array(most), np.array(gains), np.array(rows))

    def verify(self, scene: Scene, nodes: float) -> float:
        rows, scored = scene.rows + nodes, scene.requests + nodes
        return self.curve.predict(scene.requests, rows, scored, scene.context * rows)

    def base(self, scene: Scene) -> tuple[float, float]:
        """Tokens and seconds of the step if nobody else drafts.

        A prompt's chunk is paid for whether anyone drafts or not, so the step counts as if it had none; only what the
        nodes add is taken at the real number of rows.
        """
        alone = Scene(scene.requests, scene.requests, scene.context)
        seconds = self.measured * self.verify(alone, 0) + self.draft.predict(
            scene.requests, scene.fixed_depth, scene.fixed_nodes
        )
        if scene.fixed_nodes:
            seconds += self.verify(scene, scene.fixed_nodes) - self.verify(scene, 0)
        return scene.requests + scene.fixed_gain, max(seconds, 1e-9)

    def _one(self, scene: Scene, slot: int, gains: Sequence[float], rows: Sequence[float]) -> Plan:
        tokens, seconds = plain = self.base(scene)
        before = self.verify(scene, scene.fixed_nodes)
        seconds -= self.draft.predict(scene.requests, scene.fixed_depth, scene.fixed_nodes)
        nodes, best, found = float(scene.fixed_nodes), 0.0, (0, 0.0)
        for n, (gain, chance) in enumerate(zip(gains, rows, strict=True), start=1):
            after = self.verify(scene, scene.fixed_nodes + n)
            tokens, nodes, seconds = tokens + gain, nodes + chance, seconds + chance * (after - before)
            before = after
            drafting = self.draft.predict(scene.requests, max(n, scene.fixed_depth), nodes)
            rate = tokens / max(seconds + drafting, 1e-9)
            if rate > best:
                best, found = rate, (n, tokens - plain[0])
        return Plan({slot: found[0]}, found[0], plain[0] / plain[1], best, found[1] / found[0] if found[0] else 0.0)

    def _many(self, scene: Scene, slots: Sequence[int], most: Ints, gains: Floats, rows: Floats) -> Plan:
        """most [B], gains and rows [B, N]."""
        tokens, seconds = self.base(scene)
        count, width = gains.shape
        order = np.argsort(-gains, axis=None, kind="stable")  # equal nodes of one request stay in their order
        which, node = order // width, order % width + 1
        allowed = node <= most[which]
        order, which, node = order[allowed], which[allowed], node[allowed]
        gains, rows = gains.ravel()[order], rows.ravel()[order]
        missed = np.where(node == 1, np.log1p(-np.minimum(rows, 1.0 - 1e-9)), 0.0)  # chance that a request has no draft
        before = self.verify(scene, scene.fixed_nodes)
        rest = seconds - before - self.draft.predict(scene.requests, scene.fixed_depth, scene.fixed_nodes)
        best, found = 0.0, (0, 0, 0.0)
        for depth in _depths(width):
            inside = node <= depth
            gain, row = np.cumsum(gains[inside]), np.cumsum(rows[inside])
            any_draft = -np.expm1(np.cumsum(missed[inside]))
            # Rare drafts come whole or not at all, and the pass costs by steps: so not the cost of the mean.
            more = row / any_draft + scene.fixed_nodes
            total, scored = scene.rows + more, scene.requests + more
            cost = any_draft * self.curve.predict_many(scene.requests, total, scored, scene.context * total)
            cost += (1.0 - any_draft) * before + rest
            cost += self.draft.predict_many(scene.requests, max(depth, scene.fixed_depth), row + scene.fixed_nodes)
            rate = (tokens + gain) / np.maximum(cost, 1e-9)
            n = int(rate.argmax())
            if rate[n] > best:
                best, found = float(rate[n]), (depth, n + 1, float(gain[n]))
        depth, size, won = found
        granted = np.bincount(which[node <= depth][:size], minlength=count).tolist()
        nodes = dict(zip(slots, granted, strict=True))
        return Plan(nodes, max(granted), tokens / seconds, best, won / size if size else 0.0)


def _depths(most: int) -> list[int]:
    """Every depth up to 8, then ever further apart: a pass over the candidates each."""
    depths = list(range(1, min(most, 8) + 1))
    while depths[-1] < most:
        depths.append(min(most, depths[-1] + max(1, depths[-1] // 4)))
    return depths
