"""The exact distribution of a step whose tree was merged from several sampling drafters, by enumeration.

As `test_merged_trees`, with every combination of the drafts that can be sampled. Guards against a q of another drafter,
samples that count as deterministic, that are dropped or not tried, and drafters that share their noise.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from foredraft.drafters.draft import Draft
from foredraft.drafters.ensemble.tree_merge import MergedTree, stack_trees
from foredraft.engine.tree_validation import find_tree_fault
from foredraft.tree import SampledSiblings, TokenTree
from foredraft.verification import rules, siblings
from foredraft.verification.noise import NoiseTable
from foredraft.verification.probs import Probs
from foredraft.verification.rules import REJECT, combine_rules
from foredraft.verification.siblings import SiblingGroup
from tests.invariants.test_merged_trees import (
    BATCH,
    BOTH,
    ROW,
    SHAPES,
    Drawn,
    P,
    Q,
    Tokens,
    V,
    World,
    below_the_end,
    branches,
    by_all_that_was_drawn,
    compute_joint_probs,
    enumerate_drafts,
    likeliest,
    make_distributions,
    own_tree,
    truth,
)

Guess = Callable[[Drawn], list[tuple[int, Draft]]]
OTHER = (P * 0.3 + make_distributions(2, 1.5) * 0.7) ** 0.8  # a second drafter
OTHER /= OTHER.sum(-1, keepdim=True)
CHAIN, SINGLE, SIBLINGS, WIDE, BELOW = (
    SHAPES["chain"],
    (-1, 0),
    SHAPES["siblings"],
    (-1, 0, 0),
    SHAPES["siblings below"],
)


def no_guess(draft: Drawn) -> list[tuple[int, Draft]]:
    return []


@dataclass(frozen=True)
class Merge:
    """Drafters in the order of merging, each with the parents of its nodes and its q; then deterministic tokens."""

    sources: tuple[tuple[Tokens, torch.Tensor], ...]
    guess: Guess = no_guess
    most: int = 12
    is_first_deterministic: bool = False  # the first drafter's tokens are taken from its argmax, without a q
    worlds: list[World] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "worlds", [World(parents, no_guess, q) for parents, q in self.sources])

    def enumerate(self) -> Iterator[tuple[float, list[Drawn]]]:
        """Enumerate independent drafts of all drafters."""
        for drafts in itertools.product(*map(list, map(enumerate_drafts, self.worlds))):
            yield float(np.prod([mass for mass, _ in drafts])), [draft for _, draft in drafts]

    def own_trees(self, drafts: Sequence[Drawn]) -> list[TokenTree]:
        trees = [own_tree(world, draft) for world, draft in zip(self.worlds, drafts, strict=True)]
        return [replace(trees[0], q=None), *trees[1:]] if self.is_first_deterministic else trees

    def build(self, drafts: Sequence[Drawn]) -> TokenTree:
        """Merge the drafts with the code under test."""
        first, *others = self.own_trees(drafts)
        joint = MergedTree.from_tree(first, 0, 0)
        for tree in others:
            joint.graft_samples(tree, 0, 0)
        for at, guess in self.guess(drafts[0]):
            joint.graft(guess, self.most, at)
        return stack_trees(BATCH, [joint])


MERGES = {
    "chains": Merge(((CHAIN, BOTH), (CHAIN, OTHER))),
    "chains of one drafter": Merge(((CHAIN, Q), (CHAIN, Q))),
    "chains of the target": Merge(((CHAIN, P), (CHAIN, P))),
    "a chain and siblings": Merge(((CHAIN, Q), (SIBLINGS, OTHER))),
    "siblings of both": Merge(((WIDE, Q), (WIDE, OTHER))),
    "one and siblings": Merge(((SINGLE, BOTH), (WIDE, OTHER))),
    "siblings below both": Merge(((BELOW, OTHER), (CHAIN, Q))),
    "a longer second": Merge(((SINGLE, BOTH), (BELOW, Q))),
    "three": Merge(((CHAIN, Q), (SINGLE, OTHER), (SINGLE, BOTH))),
    "three with siblings": Merge(((SINGLE, Q), (WIDE, OTHER), (SINGLE, Q))),
    "three of one drafter": Merge(((SINGLE, OTHER), (SINGLE, OTHER), (WIDE, OTHER))),
    "and the likeliest": Merge(((CHAIN, Q), (CHAIN, OTHER)), likeliest),
    "and branches": Merge(((SINGLE, Q), (WIDE, OTHER)), branches),
    "and below the end": Merge(((CHAIN, BOTH), (CHAIN, OTHER)), below_the_end),
    "and by the samples": Merge(((CHAIN, Q), (CHAIN, OTHER)), by_all_that_was_drawn),
    "and what fits": Merge(((CHAIN, Q), (CHAIN, OTHER)), branches, most=4),
    "a deterministic first": Merge(((CHAIN, Q), (CHAIN, OTHER)), is_first_deterministic=True),
}
FIXED: Tokens = (1, 2)


def drafts_of(merge: Merge) -> Iterator[tuple[float, list[Drawn]]]:
    for mass, drafts in merge.enumerate():
        if not merge.is_first_deterministic:
            yield mass, drafts
        elif drafts[0].tokens == FIXED:
            yield mass / next(m for m, draft in enumerate_drafts(merge.worlds[0]) if draft.tokens == FIXED), drafts


def joint_of(merge: Merge, build: Callable[[Merge, Sequence[Drawn]], TokenTree]) -> tuple[np.ndarray, float]:
    return compute_joint_probs((mass, build(merge, drafts)) for mass, drafts in drafts_of(merge))


@pytest.mark.parametrize("name", MERGES)
def test_merged_samples_keep_the_joint_distribution_of_three_tokens(name: str) -> None:
    merge = MERGES[name]
    probs, accepted = joint_of(merge, Merge.build)
    assert np.abs(probs - truth()).max() < 1e-12
    _, alone = joint_of(merge, lambda merge, drafts: merge.own_trees(drafts)[0])
    assert accepted >= alone - 1e-12
    if name != "chains of the target":
        assert accepted > alone + 1e-3


def test_the_order_of_the_drafters_does_not_matter_for_the_distribution() -> None:
    for sources in itertools.permutations(((SINGLE, Q), (SINGLE, OTHER), (SINGLE, BOTH))):
        assert np.abs(joint_of(Merge(sources), Merge.build)[0] - truth()).max() < 1e-12


def test_equal_samples_are_one_node_with_a_trial_for_each_drafter() -> None:
    merge = Merge(((SIBLINGS, Q), (BELOW, OTHER)), lambda _: [(0, Draft.from_chain([3, 3]))])
    tree = merge.build([Drawn((1, 2, 0), SIBLINGS), Drawn((2, 3, 0), BELOW)])
    assert (tree.tokens, tree.parents) == ([[0, 1, 2, 0, 3, 0, 3, 3]], [[-1, 0, 0, 1, 2, 2, 0, 6]])
    assert tree.further_samples is not None
    assert {place: [one.children for one in found] for place, found in tree.further_samples.items()} == {
        (0, 0): [(2,)],
        (0, 2): [(4, 5)],
    }
    [[samples]] = [found for place, found in tree.further_samples.items() if place == (0, 2)]
    assert torch.equal(samples.q, OTHER[ROW[2,]])
    trials = [(child, q[x]) for child, x, q in siblings.iterate_siblings(tree, 0, 0, V)]
    assert [child for child, _ in trials] == [1, 2, 2, 6], "of the first drafter, of the second, deterministic"
    assert trials[2][1] == pytest.approx(float(OTHER[ROW[()], 2]))
    assert trials[3][1] == 1
    assert find_tree_fault(BATCH, tree, V) is None


def test_a_node_that_was_rejected_once_is_never_accepted_later() -> None:
    """So one uniform per node is enough. Checked in floating-point numbers, at uniforms close to the threshold."""
    generator = torch.Generator().manual_seed(0)
    num_rejected = 0
    for _ in range(2000):
        p, q, other = torch.rand(3, V, generator=generator, dtype=torch.float64) ** 3
        samples = {(0, 0): (SampledSiblings(other, (1,)),)}
        tree = TokenTree([[0, 1]], [[-1, 0]], torch.stack([q, q * 0]), further_samples=samples)
        r = Probs.from_row(p)
        (_, x, first), (_, _, second) = siblings.iterate_siblings(tree, 0, 0, V)
        ratio = r[x] / first[x]
        for u in (ratio, float(np.nextafter(ratio, 1)), ratio * (1 + 1e-15), (1 + ratio) / 2):
            if u < 1 and not u * first[x] < r[x]:
                left = r.compute_residual(first).normalise(fallback=r)
                assert left[x] == 0
                assert not u * second[x] < left[x]
                num_rejected += 1
    assert num_rejected > 1000


def test_a_step_of_several_requests_keeps_whose_samples_are_whose() -> None:
    """Selection by rule, a chunk before the root, and copies."""
    merge = Merge(((SIBLINGS, Q), (CHAIN, OTHER)))
    tree = merge.build([Drawn((1, 2, 0), SIBLINGS), Drawn((3, 0), CHAIN)])
    [request] = BATCH.requests
    pair = replace(BATCH, requests=(request, request), num_new_tokens=(1, 1), granted_nodes=(9, 9))
    joint = MergedTree.from_tree(tree, 0, 0)
    joint.further_samples = {0: list((tree.further_samples or {})[0, 0])}
    two = stack_trees(pair, [MergedTree.from_root(0), joint])
    assert two.further_samples is not None
    assert list(two.further_samples) == [(1, 0)]
    only = two.select([1])
    assert only.further_samples is not None
    assert list(only.further_samples) == [(0, 0)]
    assert two.select([0]).further_samples == {}
    assert two.copy().further_samples == two.further_samples
    grown = two.prepend_committed([[], [2, 3]], [[], [3, 0]])
    p = torch.rand(grown.row_offsets[-1], V, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    noise = NoiseTable.from_seeds(grown, [(3, 0), (4, 0)], [5, 6])
    plain = NoiseTable.from_seeds(two, [(3, 0), (4, 0)], [5, 8])
    whole, moved = rules.reject(two, p, plain), rules.reject(grown, p, noise)
    assert moved.tokens[1][2:] == whole.tokens[1]
    split = combine_rules([REJECT, replace(REJECT)])(two, p, plain)
    assert split.tokens == whole.tokens


@pytest.mark.parametrize(
    ("place", "samples", "message"),
    [
        ((0, 0), SampledSiblings(BOTH[0], (3,)), "no children of it"),
        ((0, 0), SampledSiblings(BOTH[0], (9,)), "no children of it"),
        ((0, 0), SampledSiblings(BOTH[0][:3], (1,)), "has shape"),
    ],
)
def test_samples_that_cannot_be_verified_are_refused(
    place: tuple[int, int], samples: SampledSiblings, message: str
) -> None:
    tree = TokenTree([[0, 1, 2, 3]], [[-1, 0, 0, 1]], further_samples={place: (samples,)})
    assert message in (find_tree_fault(BATCH, tree, V) or "")


# faults


def _use_q_of_the_first(merge: Merge, drafts: Sequence[Drawn]) -> TokenTree:
    tree = merge.build(drafts)
    assert tree.further_samples is not None
    samples = {
        place: tuple(replace(one, q=merge.sources[0][1][ROW[tuple(tree.get_draft_path(0, place[1]))]]) for one in found)
        for place, found in tree.further_samples.items()
    }
    return replace(tree, further_samples=samples)


def _try_equal_samples_once(merge: Merge, drafts: Sequence[Drawn]) -> TokenTree:
    """Leave out the trial of a sample that equals one of an earlier drafter."""
    tree = merge.build(drafts)
    assert tree.further_samples is not None
    size = len(merge.sources[0][0])
    samples = {
        place: tuple(replace(one, children=tuple(c for c in one.children if c >= size)) for one in found)
        for place, found in tree.further_samples.items()
    }
    return replace(tree, further_samples=samples)


def _drop_what_does_not_fit(merge: Merge, drafts: Sequence[Drawn]) -> TokenTree:
    """Leave out the last sample if it has no room, which depends on the number of equal samples."""
    first, second = merge.own_trees(drafts)
    tokens, parents = second.tokens[0], second.parents[0]
    if len({*first.tokens[0][1:], *tokens[1:]}) == len(first.tokens[0][1:] + tokens[1:]):
        tokens, parents = tokens[:-1], parents[:-1]
    joint = MergedTree.from_tree(first, 0, 0)
    joint.graft_samples(TokenTree([tokens], [parents], second.q[: len(tokens)]), 0, 0)  # type: ignore[index]
    return stack_trees(BATCH, [joint])


def _put_likelier_first(merge: Merge, drafts: Sequence[Drawn]) -> TokenTree:
    """Order the drafters by what they sampled."""
    first, second = merge.own_trees(drafts)
    chances = [float(P[0, draft.tokens[0]]) for draft in drafts]
    if chances[1] > chances[0]:
        first, second = second, first
    joint = MergedTree.from_tree(first, 0, 0)
    joint.graft_samples(second, 0, 0)
    return stack_trees(BATCH, [joint])


FAULTS = [
    _use_q_of_the_first, _try_equal_samples_once, _drop_what_does_not_fit, _put_likelier_first,
]  # fmt: skip


def is_killed(merge: Merge, build: Callable[[Merge, Sequence[Drawn]], TokenTree]) -> bool:
    return bool(np.abs(joint_of(merge, build)[0] - truth()).sum() / 2 > 1e-3)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_distribution_of_a_step_kills_a_fault_of_merging_samples(
    fault: Callable[[Merge, Sequence[Drawn]], TokenTree],
) -> None:
    assert is_killed(MERGES["chains"], fault)


def test_the_distribution_of_a_step_kills_drafters_that_share_their_noise() -> None:
    """Two drafters of one q and one noise sample the same tokens."""
    merge = MERGES["chains of one drafter"]
    same = ((mass, merge.build([draft, draft])) for mass, draft in enumerate_drafts(merge.worlds[0]))
    assert np.abs(compute_joint_probs(same)[0] - truth()).sum() / 2 > 1e-3


_groups = siblings.group_siblings


def _repeat_as_guess(tree: TokenTree, b: int, node: int, children: Sequence[int]) -> Iterator[SiblingGroup]:
    """Try the deterministic children that equal a sample before it."""
    found = list(_groups(tree, b, node, children))
    return iter([SiblingGroup(None, [c for q, group, _ in found if q is not None for c in group][:1]), *found])


def _stop_after_the_first(tree: TokenTree, b: int, node: int, children: Sequence[int]) -> Iterator[SiblingGroup]:
    """Verify the samples of the first drafter alone: right, but no merge."""
    return iter(list(_groups(tree, b, node, children))[:1])


def _pool_samples(tree: TokenTree, b: int, node: int, children: Sequence[int]) -> Iterator[SiblingGroup]:
    """Verify all samples by the first drafter's q."""
    found = [(q, group) for q, group, _ in _groups(tree, b, node, children) if q is not None]
    return iter(
        [SiblingGroup(found[0][0], list(dict.fromkeys(c for _, group in found for c in group)))] if found else []
    )


@pytest.mark.parametrize("fault", [_repeat_as_guess, _pool_samples])
def test_the_distribution_of_a_step_kills_a_fault_between_the_drafters(
    fault: Callable[..., Iterator[SiblingGroup]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(siblings, "group_siblings", fault)
    assert is_killed(MERGES["one and siblings"], Merge.build)


def _keep_residual(tree: TokenTree, b: int, node: int, size: int) -> Iterator[tuple[int, int, Probs]]:
    """Keep the residual unchanged after a sample of a further drafter is rejected."""
    own = tree.num_sampled_children[tree.get_row(b, node)] if tree.num_sampled_children else 0
    for i, (child, token, q) in enumerate(_siblings(tree, b, node, size)):
        yield child, token, q if i < own else replace(q, mass=q.mass * 1e-9)


_siblings = siblings.iterate_siblings


def test_the_distribution_of_a_step_kills_samples_that_leave_the_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "iterate_siblings", _keep_residual)
    assert is_killed(MERGES["chains"], Merge.build)


def _forget_further_samples(merge: Merge, drafts: Sequence[Drawn]) -> TokenTree:
    """Forget that the further drafters sampled. A deterministic token may be chosen at random, so this is lossless."""
    return replace(merge.build(drafts), further_samples=None)


def test_the_acceptance_shows_samples_that_count_as_deterministic() -> None:
    merge = MERGES["one and siblings"]
    probs, fewer = joint_of(merge, _forget_further_samples)
    assert np.abs(probs - truth()).max() < 1e-12
    assert fewer < joint_of(merge, Merge.build)[1] - 1e-3


def test_the_acceptance_shows_samples_that_are_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    merge = MERGES["one and siblings"]
    _, accepted = joint_of(merge, Merge.build)
    monkeypatch.setattr(siblings, "group_siblings", _stop_after_the_first)
    probs, fewer = joint_of(merge, Merge.build)
    assert np.abs(probs - truth()).max() < 1e-12
    assert fewer < accepted - 1e-3
