"""Tiny autoregressive worlds in which the distribution of a whole step can be computed, and the checkers that do so.

A checker takes the system under test: a rule and its input distributions. The invariants pass the real system, and
`test_mutants` passes one with a seeded fault.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from foredraft.sampling import rng
from foredraft.sampling.distribution import TokenHistory, distribution
from foredraft.sampling.params import Sampling
from foredraft.sampling.rng import NoiseStream, exponential_race
from foredraft.tree import TokenTree
from foredraft.verification.noise import NoiseTable
from foredraft.verification.rule import VerifyFunction
from tests.support import sampling_oracle
from tests.support.statistical_checks import chi_square, total_variation

LOW, HIGH, NEAR = 1e-13, 1 - 1e-13, 1e-9
PROMPT, OUTPUT = (1, 2), (3, 0)  # the text before the step; its last token is the root
DistributionFunction = Callable[[Tensor, Sequence[Sampling], Sequence[TokenHistory]], Tensor]
Tokens = tuple[int, ...]


Q_KINDS = ("equal", "near", "far", "one-hot", "disjoint")
SETTINGS: dict[str, tuple[Sampling, Tokens]] = {  # with the ids min_tokens forbids
    "T 1": (Sampling(), ()),
    "greedy": (Sampling(temperature=0), ()),
    "T 0.3": (Sampling(temperature=0.3), ()),
    "T 1.5": (Sampling(temperature=1.5), ()),
    "top-k 1": (Sampling(top_k=1), ()),
    "top-k 3": (Sampling(top_k=3), ()),
    "top-p 0.9": (Sampling(top_p=0.9), ()),
    "top-p 0.5": (Sampling(top_p=0.5), ()),
    "min-p 0.1": (Sampling(min_p=0.1), ()),
    "typical-p 0.7": (Sampling(typical_p=0.7), ()),
    "penalties": (Sampling(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.7), ()),
    "bias": (Sampling(logit_bias={1: 2.0, 5: -2.0}), ()),
    "bad words": (Sampling(bad_words=((4,), (0, 3), (1, 5), (3, 0, 2))), ()),
    "min tokens": (Sampling(min_tokens=4), (4, 5)),
    "everything": (
        Sampling(
            temperature=1.3,
            top_k=6,
            top_p=0.95,
            min_p=0.02,
            repetition_penalty=1.2,
            frequency_penalty=0.4,
            logit_bias={1: 1.0},
            bad_words=((1, 5),),
            min_tokens=4,
        ),
        (4,),
    ),
}


@dataclass(frozen=True)
class SystemUnderTest:
    """The parts of a step that a fault can be seeded in."""

    rule: VerifyFunction
    target: DistributionFunction = distribution  # the distribution of the target, as handed to the rule
    draft: DistributionFunction = distribution  # the q that the drafter reports (it samples from `distribution`)
    make_noise: Callable[..., NoiseTable] = NoiseTable.from_seeds
    purpose: NoiseStream = NoiseStream.DRAFT


@dataclass(frozen=True)
class StepScenario:
    """A target, a draft, sampling parameters, and the shape of the tree drafted in every step."""

    seed: int = 0
    size: int = 8
    parents: Tokens = (-1, 0, 1)
    q_kind: str = "near"  # equal, near, far, one-hot, disjoint
    sampling: Sampling = Sampling()  # noqa: RUF009 - frozen
    end_ids: Tokens = ()
    deterministic_nodes: frozenset[int] = frozenset()  # nodes whose children are deterministic draft tokens

    @property
    def num_nodes(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> list[int]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return depths

    @cached_property
    def num_tokens(self) -> int:
        """Number of tokens of the longest step."""
        return max(self.depths) + 1

    @cached_property
    def contexts(self) -> list[Tokens]:
        return [c for n in range(self.num_tokens) for c in itertools.product(range(self.size), repeat=n)]

    @cached_property
    def row_of(self) -> dict[Tokens, int]:
        return {context: row for row, context in enumerate(self.contexts)}

    def _noise(self, stream: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 10 + stream)
        return torch.randn(len(self.contexts), self.size, generator=generator, dtype=torch.float64) * 1.5

    @cached_property
    def logits(self) -> Tensor:
        x = self._noise(0)
        if self.q_kind == "disjoint":
            x[:, ::2] = -math.inf
        return x

    @cached_property
    def draft_logits(self) -> Tensor:
        if self.q_kind == "equal":
            return self.logits
        if self.q_kind == "near":
            return self.logits + self._noise(1) * 0.3
        x = self._noise(1)
        if self.q_kind == "disjoint":
            x[:, 1::2] = -math.inf
        return x

    def histories(self) -> list[TokenHistory]:
        """Histories of every context, with the context as the drafted path."""
        words = [word for word in self.sampling.bad_words if not isinstance(word, str)]
        return [TokenHistory(PROMPT, OUTPUT, c, self.end_ids, words) for c in self.contexts]

    @cached_property
    def target_probs(self) -> np.ndarray:
        """[contexts, V] the target's distribution by the slow reference."""
        rows = zip(self.logits.tolist(), self.histories(), strict=True)
        return np.array([sampling_oracle.compute_distribution(x, self.sampling, h) for x, h in rows])

    @cached_property
    def draft_probs(self) -> Tensor:
        """Compute [contexts, V], the distribution that the drafter samples from."""
        sampling = Sampling(temperature=0) if self.q_kind == "one-hot" else self.sampling
        return distribution(self.draft_logits, [sampling] * len(self.contexts), self.histories())

    def compute_claimed(self, system: SystemUnderTest) -> Tensor:
        sampling = Sampling(temperature=0) if self.q_kind == "one-hot" else self.sampling
        return system.draft(self.draft_logits, [sampling] * len(self.contexts), self.histories())

    def compute_target(self, system: SystemUnderTest) -> Tensor:
        return system.target(self.logits, [self.sampling] * len(self.contexts), self.histories())

    def extend_prefix(self, prefix: Tokens) -> np.ndarray:
        """Compute the joint distribution of `num_tokens` tokens that begin with a prefix, continued by the target."""
        probs = np.zeros((self.size,) * self.num_tokens)
        if len(prefix) >= self.num_tokens:
            probs[prefix[: self.num_tokens]] = 1
            return probs
        for x in np.flatnonzero(self.target_probs[self.row_of[prefix]]):
            probs += self.target_probs[self.row_of[prefix]][x] * self.extend_prefix((*prefix, int(x)))
        return probs

    @cached_property
    def joint(self) -> np.ndarray:
        """The joint distribution of the next `num_tokens` tokens."""
        return self.extend_prefix(())

    def get_context(self, node: int, drafted: Sequence[int]) -> Tokens:
        path: list[int] = []
        while node > 0:
            path.append(drafted[node - 1])
            node = self.parents[node]
        return tuple(path[::-1])

    @cached_property
    def drafts(self) -> list[tuple[float, Tokens]]:
        """Every draft with its probability: children are sampled without replacement, or ranked by probability."""
        found: list[tuple[float, Tokens]] = [(1.0, ())]
        for node in range(1, self.num_nodes):
            parent, grown = self.parents[node], []
            for mass, drafted in found:
                probs = self.draft_probs[self.row_of[self.get_context(parent, drafted)]].numpy().copy()
                elder = [drafted[n - 1] for n in range(1, node) if self.parents[n] == parent]
                if parent in self.deterministic_nodes:
                    order = np.argsort(-self.draft_logits[self.row_of[self.get_context(parent, drafted)]].numpy())
                    grown.append((mass, (*drafted, int(order[len(elder)]))))
                    continue
                probs[elder] = 0
                if probs.sum() <= 0:  # nothing is left to sample: the token is no draft, and the rules must see it
                    grown.append((mass, (*drafted, elder[0])))
                    continue
                probs /= probs.sum()
                grown += [(mass * float(probs[x]), (*drafted, int(x))) for x in np.flatnonzero(probs)]
            found = grown
        return found


Outcome = tuple[Tokens, Tokens]  # surviving nodes, tokens after them
Case = tuple[int, tuple[float, ...], float]  # index of the draft, the uniform of every node, the uniform of the sample


@dataclass(frozen=True)
class StepDistribution:
    """The exact distribution of one step."""

    joint: np.ndarray
    mean_accepted: float
    accepts: float  # probability that something is accepted
    rejects: float  # probability that something drafted is not


class ScenarioStep:
    """One step of a system in a world, as a function of its uniforms."""

    def __init__(self, system: SystemUnderTest, world: StepScenario) -> None:
        self.system, self.world = system, world
        p, q = world.compute_target(system), world.compute_claimed(system)
        rows = [[world.row_of[world.get_context(n, d)] for n in range(world.num_nodes)] for _, d in world.drafts]
        self.p, self.q = p[torch.tensor(rows)], q[torch.tensor(rows)]  # [D, N, V]
        self.q[:, sorted(world.deterministic_nodes)] = 0
        self.target_probs, self.draft_probs = world.target_probs[np.array(rows)], self.q.numpy()

    def run(self, cases: Sequence[Case]) -> list[Outcome]:
        """Run the rule on many uniforms at once."""
        if not cases:
            return []
        which = torch.tensor([draft for draft, _, _ in cases])
        nodes = [[OUTPUT[-1], *self.world.drafts[draft][1]] for draft, _, _ in cases]
        q = self.q[which].flatten(0, 1) if self.q.any() else None
        tree = TokenTree.from_lists(nodes, [self.world.parents] * len(cases), q)
        accept = torch.tensor([uniforms for _, uniforms, _ in cases], dtype=torch.float64)
        draw = torch.tensor([[u] * self.world.num_nodes for _, _, u in cases], dtype=torch.float64)
        commit = self.system.rule(tree, self.p[which].flatten(0, 1), NoiseTable(None, accept, draw))
        assert not commit.failed
        return list(zip(map(tuple, commit.paths), map(tuple, commit.tokens), strict=True))


def compute_reference_cells(step: ScenarioStep, draft: int, is_block: bool) -> tuple[list[float], list[np.ndarray]]:
    """Compute where a right rule changes its decision: a threshold per node, and the final distribution.

    The result is only a starting point. The checker uses it if the rule under test confirms it on both sides of every
    threshold, and searches by bisection otherwise.
    """
    world, p, q = step.world, step.target_probs[draft], step.draft_probs[draft]
    tokens = (OUTPUT[-1], *world.drafts[draft][1])
    thresholds, ends = [1.0] * world.num_nodes, list(p)
    if is_block:
        weights = [1.0]
        for node in range(1, world.num_nodes):
            x = tokens[node]
            weights.append(min(1.0, weights[-1] * p[node - 1][x] / q[node - 1][x]))
        for node in range(world.num_nodes - 1):
            residual = np.maximum(weights[node] * p[node] - q[node], 0)
            rest = residual.sum()
            ends[node] = residual / rest if rest > 0 else p[node]
            thresholds[node] = rest / (rest + 1 - weights[node]) if rest + 1 - weights[node] > 0 else 1.0
        thresholds[-1] = weights[-1]
        return thresholds, ends
    for node in range(world.num_nodes):
        residual, left = p[node], q[node].copy()
        for child in [n for n in range(node + 1, world.num_nodes) if world.parents[n] == node]:
            x = tokens[child]
            if node in world.deterministic_nodes or not q[node].any():
                left = np.eye(world.size)[x]
            if left[x] <= 0:
                break
            left = left / left.sum()
            thresholds[child] = min(1.0, residual[x] / left[x])
            after = np.maximum(residual - left, 0)
            residual = after / after.sum() if after.sum() > 0 else residual
            left[x] = 0
        ends[node] = residual
    return thresholds, ends


def _bisect(is_below: Callable[[list[float]], list[bool]], count: int, steps: int = 22) -> list[float]:
    """`count` thresholds at once, of functions that are true below theirs."""
    low, high = [0.0] * count, [1.0] * count
    for _ in range(steps):
        middle = [(a + b) / 2 for a, b in zip(low, high, strict=True)]
        for i, below in enumerate(is_below(middle)):
            low[i], high[i] = (middle[i], high[i]) if below else (low[i], middle[i])
    return [(a + b) / 2 for a, b in zip(low, high, strict=True)]


def _find_thresholds(step: ScenarioStep, guesses: list[list[float]]) -> list[list[float]]:
    """[draft][node] the accept uniform below which a node survives, its ancestors accepted and all others rejected."""
    world = step.world
    above = [{n} for n in range(world.num_nodes)]
    for n in range(1, world.num_nodes):
        above[n] |= above[world.parents[n]]
    slots = [(d, n) for d in range(len(world.drafts)) for n in range(1, world.num_nodes)]

    def survives(asked: Sequence[tuple[tuple[int, int], float]]) -> list[bool]:
        cases = []
        for (d, n), u in asked:
            uniforms = [LOW if m in above[n] else HIGH for m in range(world.num_nodes)]
            uniforms[n] = u
            cases.append((d, tuple(uniforms), 0.5))
        return [n in path for ((_, n), _), (path, _) in zip(asked, step.run(cases), strict=True)]

    result = [[1.0] * world.num_nodes for _ in world.drafts]
    guess = {slot: guesses[slot[0]][slot[1]] for slot in slots}
    below = survives([(slot, min(max(guess[slot] - NEAR, LOW), HIGH)) for slot in slots])
    beyond = survives([(slot, min(max(guess[slot] + NEAR, LOW), HIGH)) for slot in slots])
    unsure = []
    for slot, yes, no in zip(slots, below, beyond, strict=True):
        g = guess[slot]
        if (yes and not no and NEAR < g < 1 - NEAR) or (yes and no and g >= 1 - NEAR):
            result[slot[0]][slot[1]] = min(g, 1.0)
        elif not yes and not no and g <= NEAR:
            result[slot[0]][slot[1]] = 0.0
        else:
            unsure.append(slot)
    if unsure:
        found = _bisect(lambda at: survives(list(zip(unsure, at, strict=True))), len(unsure))
        for (d, n), t in zip(unsure, found, strict=True):
            result[d][n] = 0.0 if t < 1e-6 else 1.0 if t > 1 - 1e-6 else t
    return result


def _find_sample_probs(
    step: ScenarioStep, cells: list[tuple[int, tuple[float, ...]]], guesses: list[np.ndarray]
) -> list[np.ndarray]:
    """Find the distribution of the last token over its uniform, a rising step function, by (draft, uniforms)."""
    size = step.world.size

    def last(asked: Sequence[tuple[int, float]]) -> list[int]:
        return [tokens[-1] for _, tokens in step.run([(*cells[i], u) for i, u in asked])]

    asked, wanted = [], []
    for i, probs in enumerate(guesses):
        edges = np.concatenate([[0], np.cumsum(probs)])
        edges /= edges[-1]
        for x in np.flatnonzero(np.diff(edges) > 4 * NEAR):
            for u in (edges[x] + NEAR, edges[x + 1] - NEAR):
                asked.append((i, min(max(u, LOW), HIGH)))
                wanted.append(int(x))
    is_right = [True] * len(cells)
    for (i, _), got, x in zip(asked, last(asked), wanted, strict=True):
        is_right[i] &= got == x
    distributions = [probs / probs.sum() for probs in guesses]
    unsure = [(i, x) for i, right in enumerate(is_right) if not right for x in range(size - 1)]
    if unsure:

        def is_below(at: list[float]) -> list[bool]:
            tokens = last([(i, u) for (i, _), u in zip(unsure, at, strict=True)])
            return [token <= x for token, (_, x) in zip(tokens, unsure, strict=True)]

        edges = dict(zip(unsure, _bisect(is_below, len(unsure)), strict=True))
        for i in {i for i, _ in unsure}:
            distributions[i] = np.diff([0.0, *(edges[i, x] for x in range(size - 1)), 1.0])
    return distributions


def compute_step_distribution(system: SystemUnderTest, world: StepScenario, is_block: bool = False) -> StepDistribution:
    """Integrate a rule over all its uniforms, draft by draft.

    Each accept uniform is cut at the one threshold where its node stops surviving, the sample's uniform where the token
    changes; every cut is confirmed by the rule on both sides, 1e-9 apart. That the rule is constant between the cuts
    is checked at random points, and assumed elsewhere.
    """
    step = ScenarioStep(system, world)
    guesses = [compute_reference_cells(step, d, is_block) for d in range(len(world.drafts))]
    thresholds = _find_thresholds(step, [thresholds for thresholds, _ in guesses])
    cells: list[tuple[int, tuple[float, ...]]] = []
    masses: list[float] = []
    for d, (mass, _) in enumerate(world.drafts):
        for bits in itertools.product((True, False), repeat=world.num_nodes - 1):
            cuts = thresholds[d][1:]
            volume = math.prod(t if bit else 1 - t for bit, t in zip(bits, cuts, strict=True))
            if volume > 0:
                cells.append((d, (0.5, *(t / 2 if bit else (1 + t) / 2 for bit, t in zip(bits, cuts, strict=True)))))
                masses.append(mass * volume)
    paths = [path for path, _ in step.run([(*cell, 0.5) for cell in cells])]
    groups: dict[tuple[int, Tokens], list[int]] = defaultdict(list)
    for i, path in enumerate(paths):
        groups[cells[i][0], path].append(i)
    firsts = [members[0] for members in groups.values()]
    ends = [guesses[cells[i][0]][1][paths[i][-1]] for i in firsts]
    distributions = _find_sample_probs(step, [cells[i] for i in firsts], ends)
    prefixes: dict[Tokens, float] = defaultdict(float)
    accepted = accepts = rejects = 0.0
    for (d, path), probs in zip(groups, distributions, strict=True):
        mass = sum(masses[i] for i in groups[d, path])
        kept = world.get_context(path[-1], world.drafts[d][1])
        for x in np.flatnonzero(probs > 0):
            prefixes[(*kept, int(x))] += mass * float(probs[x])
        accepted += mass * len(kept)
        accepts += mass * bool(kept)
        rejects += mass * (len(kept) < world.num_tokens - 1)
    joint = sum(mass * world.extend_prefix(prefix) for prefix, mass in prefixes.items())
    _assert_constant(step, thresholds, groups, distributions, cells, paths)
    return StepDistribution(joint, accepted, accepts, rejects)


def _assert_constant(step, thresholds, groups, distributions, cells, paths) -> None:
    """Check at random uniforms that the rule acts as in their cell. Uniforms within 1e-5 of a cut are skipped."""

    def cell_of(d: int, uniforms: Sequence[float]) -> tuple[int, tuple[bool, ...]]:
        return d, tuple(c < t for c, t in zip(uniforms, thresholds[d], strict=True))

    known = {}
    for (d, path), probs in zip(groups, distributions, strict=True):
        for i in groups[d, path]:
            known[cell_of(d, cells[i][1])] = (paths[i], np.cumsum(probs))
    rng = np.random.default_rng(step.world.seed)
    drafts = rng.integers(len(step.world.drafts), size=100).tolist()
    uniforms_of = rng.uniform(size=(100, step.world.num_nodes))
    cases = [
        (d, (0.5, *uniforms[1:]), float(uniforms[0])) for d, uniforms in zip(drafts, uniforms_of.tolist(), strict=True)
    ]
    for (d, uniforms, u), (path, tokens) in zip(cases, step.run(cases), strict=True):
        if min(abs(c - t) for c, t in zip(uniforms, thresholds[d], strict=True)) < 1e-5:
            continue
        expected, edges = known[cell_of(d, uniforms)]
        if np.abs(edges - u).min() > 1e-5 and (path, tokens[-1]) != (expected, int((edges <= u).sum())):
            raise UnevenError(f"draft {d} at uniforms {uniforms}, {u}: {path} {tokens}")


class UnevenError(Exception):
    """Raised if a rule uses its uniforms in another way than the reference."""


def measure_step_tv(system: SystemUnderTest, world: StepScenario, is_block: bool = False) -> float:
    """Measure the distance between the distributions of the step and of the target; 1 if the rule is inconsistent."""
    try:
        return total_variation(compute_step_distribution(system, world, is_block).joint, world.joint)
    except UnevenError:
        return 1.0


@dataclass(frozen=True)
class GeneratedTexts:
    """Generated texts, and how it went."""

    texts: list[Tokens]
    num_accepted: int
    num_rejected: int

    def counts(self, world: StepScenario) -> np.ndarray:
        counts = np.zeros((world.size,) * world.num_tokens)
        np.add.at(counts, tuple(np.array(self.texts).T), 1)
        return counts


def generate(
    system: SystemUnderTest, world: StepScenario, num_texts: int, is_match: bool = False, num_drafts: int = 9
) -> GeneratedTexts:
    """Generate the first `num_tokens` tokens of every seed, step by step, with chains and the project's own noise.

    A small faithful engine: the rule decides, noise is keyed by seed and position, tables hold the distributions.
    """
    p, q = world.compute_target(system), world.compute_claimed(system)
    start, length = len(PROMPT) + len(OUTPUT) - 1, world.num_tokens
    done: list[Tokens] = [()] * num_texts
    accepted = rejected = 0
    while active := [s for s in range(num_texts) if len(done[s]) < length]:
        drafted: dict[int, Tokens] = dict.fromkeys(active, ())
        for node in range(min(length - 1, num_drafts)):
            wanting = [s for s in active if len(done[s]) + node < length - 1]
            roots = [start + len(done[s]) for s in wanting]
            paths = [
                (NoiseStream.TOKEN, root + node + 1) if is_match else (system.purpose, root, node) for root in roots
            ]
            keys = torch.tensor([rng.derive_key(s, 0, *path) for s, path in zip(wanting, paths, strict=True)])
            probs = world.draft_probs[[world.row_of[(*done[s], *drafted[s])] for s in wanting]]
            for s, x in zip(wanting, exponential_race(probs, keys.long()).argmax(-1).tolist(), strict=True):
                drafted[s] = (*drafted[s], x)
        rows = [world.row_of[(*done[s], *drafted[s][:n])] for s in active for n in range(len(drafted[s]) + 1)]
        nodes = [[(*OUTPUT, *done[s])[-1], *drafted[s]] for s in active]
        tree = TokenTree.from_chains(nodes, q[rows])
        uniforms = system.make_noise(tree, [(s, 0) for s in active], [start + len(done[s]) for s in active])
        commit = system.rule(tree, p[rows], uniforms)
        assert not commit.failed
        for s, tokens in zip(active, commit.tokens, strict=True):
            accepted += len(tokens) - 1
            rejected += len(tokens) - 1 < len(drafted[s])
            done[s] = (*done[s], *tokens)
    return GeneratedTexts([text[:length] for text in done], accepted, rejected)


def compute_p_value(system: SystemUnderTest, world: StepScenario, num_texts: int, is_match: bool = False) -> float:
    """Compute the p-value of whole texts by a chi-square test."""
    return chi_square(generate(system, world, num_texts, is_match).counts(world), world.joint)


def decode_plainly(world: StepScenario, seed: int) -> Tokens:
    """Decode a seed in plain Python: at every position the target's race, by the slow reference's distribution."""
    text: Tokens = ()
    start = len(PROMPT) + len(OUTPUT)
    for position in range(start, start + world.num_tokens):
        probs = world.target_probs[world.row_of[text]]
        times = [
            -math.log(rng.uniform(seed, 0, NoiseStream.TOKEN, position, x)) / mass if mass > 0 else math.inf
            for x, mass in enumerate(probs)
        ]
        text = (*text, times.index(min(times)))
    return text
