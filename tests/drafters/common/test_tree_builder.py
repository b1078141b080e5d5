"""How drafts grow: chains, trees of a fixed shape and trees of the likeliest paths, against slow definitions."""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.drafters.common.growing_kv_draft import GrowingKVDraft
from foredraft.drafters.common.static_tree import StaticTree
from foredraft.drafters.common.tree_builder import NodeLogits, TreeBuilder, TreeSpec
from foredraft.drafters.common.tree_level import add_level
from foredraft.drafters.draft import draft_noise_key
from foredraft.errors import ForedraftError
from foredraft.models.forward_batch import ForwardBatch
from foredraft.request import Request
from foredraft.sampling.distribution import distribution
from foredraft.sampling.params import Sampling
from foredraft.tree import TokenTree
from foredraft.verification.noise import SeededNoise
from foredraft.verification.registry import RULES
from tests.support.requests import make_request

V = 12
GREEDY = Sampling(temperature=0, max_tokens=50)
LOPSIDED = StaticTree.from_paths([[0], [1], [2], [0, 0], [0, 1], [2, 0], [0, 0, 0], [0, 1, 0]])


def request(sampling: Sampling = GREEDY, verify: str = "match", **more: Any) -> Request:
    return make_request(0, [1, 2, 3], sampling, seed=5, rule=RULES[verify], **more)


def logits_after(path: list[int]) -> Tensor:
    """Return [V] logits, different for every path."""
    seed = sum((token + 1) * 31**i for i, token in enumerate(path))
    return 2 * torch.randn(V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def grow(growths: list[TreeBuilder], after: Callable[[list[int]], Tensor] = logits_after) -> list[TreeBuilder]:
    """Add levels until every tree is complete, all together, as a drafter does."""
    while growing := [g for g in growths if g.frontier]:
        rows = [after(g.collect_path(node)) for g in growing for node in g.frontier]
        add_level(growing, NodeLogits(torch.stack(rows), V))
    return growths


def log_chance(path: list[int]) -> float:
    return sum(float(logits_after(path[:i]).log_softmax(-1)[token]) for i, token in enumerate(path))


def paths_of(tokens: tuple[int, ...], parents: tuple[int, ...]) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*found[parent], token))
    return set(found[1:])


@pytest.mark.parametrize("nodes", [1, 3, 7, 15])
def test_a_free_tree_holds_the_likeliest_paths(nodes: int) -> None:
    """With a width that hides nothing, the nodes kept are the likeliest of all paths, by enumeration."""
    draft = grow([TreeBuilder(request(), TreeSpec(2, nodes, V))])[0].to_draft()
    every = [path for size in (1, 2) for path in itertools.product(range(V), repeat=size)]
    best = sorted(every, key=lambda path: -log_chance(list(path)))[:nodes]
    assert paths_of(draft.tokens, draft.parents) == set(best)


AUTHORS = [(60, 7, 10), (32, 7, 8), (26, 4, 8), (16, 4, 5)]  # total_tokens, depth, top_k as EAGLE-2 is started with
WORDS = 24


def chances_after(seed: int) -> Callable[[tuple[int, ...]], Tensor]:
    """[WORDS] logarithms of a distribution for every path, some of them nearly certain."""

    @cache
    def after(path: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *path)) % 2**31)
        scale = (1.0, 2.0, 6.0)[int(torch.randint(3, (), generator=generator))]
        return (scale * torch.randn(WORDS, generator=generator, dtype=torch.float64)).log_softmax(-1)

    return after


def tree_of_the_authors(
    after: Callable[[tuple[int, ...]], Tensor], total: int, depth: int, top_k: int
) -> set[tuple[int, ...]]:
    """EAGLE-2's expansion and reranking (2406.16858, section 4): after the root, `depth` times the top_k likeliest
    nodes of the newest level get top_k children each; the total - 1 likeliest nodes of all are drafted."""
    found: dict[tuple[int, ...], float] = {}
    level: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(1 + depth):
        below: dict[tuple[int, ...], float] = {}
        for path, chance in level.items():
            top = after(path).topk(top_k)
            below |= {(*path, int(i)): chance + float(x) for x, i in zip(top.values, top.indices, strict=True)}
        found |= below
        level = dict(sorted(below.items(), key=lambda item: -item[1])[:top_k])
    return {path for path, _ in sorted(found.items(), key=lambda item: -item[1])[: total - 1]}


@pytest.mark.parametrize(("total", "depth", "top_k"), AUTHORS)
def test_a_free_tree_is_the_tree_of_eagle_2s_authors(total: int, depth: int, top_k: int) -> None:
    """Guards a bound on the nodes looked at, which ended trees early: none was as deep as theirs."""
    deepest = 0
    for seed in range(12):
        after = chances_after(seed)
        plan = TreeSpec.from_options(depth + 1, tree_nodes=total - 1, top_k=top_k)
        growth = TreeBuilder(request(), plan)
        while growth.frontier:
            rows = [after(tuple(growth.collect_path(node))) for node in growth.frontier]
            add_level([growth], NodeLogits(torch.stack(rows), WORDS))
        draft = growth.to_draft()
        assert len(draft.tokens) == total - 1
        assert paths_of(draft.tokens, draft.parents) == tree_of_the_authors(after, total, depth, top_k)
        deepest = max(deepest, *growth.depths)
    assert deepest == depth + 1


@pytest.mark.parametrize(("total", "depth", "top_k"), AUTHORS)
def test_a_draft_needs_no_more_places_than_its_tree_has_nodes(total: int, depth: int, top_k: int) -> None:
    """Every expanded node finds its path in memory, though several nodes use one position in turn."""
    reused = 0
    for seed in range(12):
        after = chances_after(seed)
        growth = TreeBuilder(
            request(pages=[0, 1, 2, 3]), TreeSpec.from_options(depth + 1, tree_nodes=total - 1, top_k=top_k)
        )
        branch, written, looked_at = GrowingKVDraft(growth, start=7), {0: 0}, 0
        add_level([growth], NodeLogits(after(())[None], WORDS))
        while growth.frontier:
            span = branch.build_span()
            written |= dict(zip(span.node_indices, span.tokens, strict=True))
            window = ForwardBatch.from_spans([span], 16, "cpu")
            for row, node in enumerate(growth.frontier):
                path = growth.collect_path(node)
                assert [written[place] for place in span.find_path(span.node_indices[row])[1:]] == path
                assert window.packed_rows.list_slots(row) == [
                    *range(7),
                    *(7 + place for place in span.find_path(span.node_indices[row])),
                ]
                assert span.build_ancestor_mask()[row].nonzero().flatten().tolist() == sorted(
                    span.find_path(span.node_indices[row])
                )
                assert int(window.positions[0, row]) == 7 + len(path)
            assert window.write_slots.tolist() == [7 + place for place in span.node_indices]
            assert span.num_keys <= 7 + total
            looked_at += len(growth.frontier)
            rows = [after(tuple(growth.collect_path(node))) for node in growth.frontier]
            add_level([growth], NodeLogits(torch.stack(rows), WORDS))
        looked_at_and_kept = [node for node in growth.verified_nodes if node in branch.offsets]
        assert len({branch.offsets[node] for node in looked_at_and_kept}) == len(looked_at_and_kept)
        reused += looked_at > max(branch.offsets.values())
    assert reused


def test_a_chain_is_the_likeliest_token_again_and_again() -> None:
    draft = grow([TreeBuilder(request(), TreeSpec.from_options(4))])[0].to_draft()
    path: list[int] = []
    for _ in range(4):
        path.append(int(logits_after(path).argmax()))
    assert draft.tokens == tuple(path)
    assert draft.parents == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("sampling", "verify"),
    [(GREEDY, "match"), (Sampling(max_tokens=50), "reject"), (Sampling(max_tokens=50), "match")],
    ids=str,
)
def test_a_fixed_shape_gives_every_node_its_own_number_of_children(sampling: Sampling, verify: str) -> None:
    growth = grow([TreeBuilder(request(sampling, verify), TreeSpec.from_static_tree(LOPSIDED))])[0]
    draft = growth.to_draft()
    assert draft.parents == LOPSIDED.parents
    for node, children in enumerate(LOPSIDED.children):
        tokens = [draft.tokens[child - 1] for child in children]
        assert len(set(tokens)) == len(tokens)
        probs = logits_after(growth.collect_path(node)).softmax(-1)
        if sampling.is_greedy:
            assert tokens == probs.topk(len(children)).indices.tolist()
        if growth.uses_q and children:
            assert draft.q is not None
            assert torch.allclose(draft.q[node], probs)


SPECTR = (Sampling(max_tokens=50, temperature=0.4), "spectr")  # cold, so that samples are often equal


@pytest.mark.parametrize(
    "plan", [TreeSpec.from_options(3, num_drafts=6), TreeSpec.from_static_tree(LOPSIDED)], ids=["chains", "tree"]
)
def test_equal_samples_with_replacement_share_a_node_and_keep_their_number_and_order(plan: TreeSpec) -> None:
    """Every node of the shape is one sample. Guards samples dropped with their equals, and q of another node."""
    num_shared = 0
    for seed in range(20):
        growth = grow([TreeBuilder(make_request(0, [1, 2, 3], SPECTR[0], seed, rule=RULES["spectr"]), plan)])[0]
        draft = growth.to_draft()
        assert draft.q is None
        assert draft.samples is not None
        paths = [tuple(growth.collect_path(node)) for node in range(1 + len(draft.tokens))]
        assert len(set(paths)) == len(paths)
        num_samples = sum(len(found.children) for found in draft.samples.values())
        assert num_samples == len(plan.static_tree or ())
        num_shared += num_samples - len(draft.tokens)
        for node, found in draft.samples.items():
            assert found.is_independent
            assert list(dict.fromkeys(found.children)) == [n + 1 for n, p in enumerate(draft.parents) if p == node]
            assert torch.equal(found.q, distribution(logits_after(growth.collect_path(node))[None], SPECTR[0])[0])
        for depth in (1, 2):
            cut = draft.limit_depth(depth)
            assert cut.samples is not None
            assert {child for found in cut.samples.values() for child in found.children} == {
                node + 1 for node in range(len(cut.tokens))
            }
    assert num_shared > 20


def test_samples_follow_their_chains() -> None:
    """As many chains go on below a node as reached it."""
    growth = grow([TreeBuilder(request(*SPECTR), TreeSpec.from_options(3, num_drafts=6))])[0]
    samples = growth.to_draft().samples or {}
    reached = Counter(child for found in samples.values() for child in found.children)
    assert len(samples[0].children) == 6
    assert max(reached.values()) > 1
    assert all(len(found.children) == reached[node] for node, found in samples.items() if node)


def test_one_draft_is_a_chain_and_several_are_a_tree_for_other_rules() -> None:
    assert TreeSpec.from_options(4, num_drafts=1) == TreeSpec.from_options(4)
    plan = TreeSpec.from_options(3, num_drafts=4)
    for sampling, verify in ((GREEDY, "spectr"), (SPECTR[0], "reject"), (SPECTR[0], "match")):
        draft = grow([TreeBuilder(request(sampling, verify), plan)])[0].to_draft()
        assert draft.samples is None
        assert (draft.q is not None) == (verify == "reject")
        assert draft.parents == (0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8)
        assert len(set(draft.tokens[:4])) == 4


def test_no_distribution_is_computed_for_a_leaf_of_a_fixed_shape() -> None:
    looked_at: list[tuple[int, ...]] = []

    def after(path: list[int]) -> Tensor:
        looked_at.append(tuple(path))
        return logits_after(path)

    growth = grow([TreeBuilder(request(), TreeSpec.from_static_tree(LOPSIDED))], after)[0]
    assert looked_at == [tuple(growth.collect_path(node)) for node in LOPSIDED.inner_nodes]


def test_requests_of_other_shapes_grow_side_by_side() -> None:
    """The draft of a request does not depend on the rest of the batch."""
    plans = [
        TreeSpec.from_options(3),
        TreeSpec.from_options(3, tree_nodes=6),
        TreeSpec.from_static_tree(LOPSIDED),
        TreeSpec.from_options(5, branching=(2, 1)),
    ]
    samplings = [GREEDY, Sampling(seed=3), Sampling(presence_penalty=0.5), Sampling(temperature=0, bad_words=((4,),))]
    for shift in range(4):
        chosen = [*samplings[shift:], *samplings[:shift]]
        alone = [grow([TreeBuilder(request(s), plan)])[0].to_draft() for s, plan in zip(chosen, plans, strict=True)]
        together = grow([TreeBuilder(request(s), plan) for s, plan in zip(chosen, plans, strict=True)])
        for draft, growth in zip(alone, together, strict=True):
            assert (draft.tokens, draft.parents) == (growth.to_draft().tokens, growth.to_draft().parents)


def test_tokens_without_probability_are_not_drafted_and_their_branch_ends() -> None:
    """Three children from a distribution of two tokens are two children. The third one has no descendants."""
    sampling = Sampling(top_k=2, max_tokens=50)
    for verify in ("match", "reject"):
        draft = grow([TreeBuilder(request(sampling, verify), TreeSpec.from_static_tree(LOPSIDED))])[0].to_draft()
        assert draft.parents.count(0) == 2
        assert len(draft.tokens) == 6


def test_nothing_grows_below_an_end_of_text() -> None:
    end = int(logits_after([]).argmax())
    draft = grow([TreeBuilder(request(eos_ids=frozenset([end])), TreeSpec.from_options(4))])[0].to_draft()
    assert draft.tokens == (end,)


def test_confidence_ends_a_chain_where_its_path_is_unlikely() -> None:
    full = grow([TreeBuilder(request(), TreeSpec.from_options(6, min_confidence=1e-12))])[0]
    bar = math.exp(full.log_probs[3]) * 1.0001  # just above the path of three
    draft = grow([TreeBuilder(request(), TreeSpec.from_options(6, min_confidence=bar))])[0].to_draft()
    assert draft.tokens == tuple(full.tokens[:3])  # the third is drafted, and nothing below it


def test_penalties_count_the_path_above_a_node() -> None:
    """Without penalties, drafts repeat tokens that the target may not: the text stays right, but few are accepted."""
    sampling = Sampling(frequency_penalty=2.0, repetition_penalty=1.5, max_tokens=50)
    growth = grow([TreeBuilder(request(sampling, "reject"), TreeSpec.from_options(3, tree_nodes=9, top_k=3))])[0]
    assert max(growth.depths[node] for node in growth.draft_probs) == 2
    for node, probs in growth.draft_probs.items():
        path = growth.collect_path(node)
        assert torch.equal(
            probs[None], distribution(logits_after(path)[None], sampling, [growth.request.build_history(path)])
        )


def test_a_path_without_doubt_is_kept_from_its_beginning() -> None:
    """All of its nodes are equally likely: one kept without its parent would be no tree."""
    growth = grow(
        [TreeBuilder(request(), TreeSpec(5, 3, 2))], lambda path: 50 * torch.eye(V, dtype=torch.float64)[len(path)]
    )
    assert len(growth[0].tokens) > 3
    assert (growth[0].to_draft().tokens, growth[0].to_draft().parents) == ((0, 1, 2), (0, 1, 2))


def test_no_step_sees_again_the_noise_of_an_earlier_draft() -> None:
    """Under `block` the whole draft decides how much of it stays, so the next sample must not depend on it. Under
    `match` the noise is the target's own noise of the sampled position."""
    for verify, is_shared in (("match", True), ("reject", False), ("block", False)):
        early, late = (request(Sampling(), verify) for _ in range(2))
        late.output = [4, 5]
        keys = [[draft_noise_key(r, node, node, 0) for node in range(5)] for r in (early, late)]
        assert (keys[0][2:] == keys[1][:3]) == is_shared
        if is_shared:
            chain = TokenTree.from_chains([[3, 4, 5, 6, 7]])
            noise = SeededNoise(chain, [(early.spec.seed, early.spec.sample_index)], [early.num_tokens - 1])
            assert keys[0] == [noise.get_key(row) for row in range(5)]
        else:
            assert not {*keys[0]} & {*keys[1]}
        assert len({*keys[0]}) == 5


def test_cut_plans_have_room_for_what_they_draft() -> None:
    for plan in (
        TreeSpec.from_options(4),
        TreeSpec.from_options(4, tree_nodes=9),
        TreeSpec.from_options(4, branching=(3, 2, 1)),
        TreeSpec.from_options(4, num_drafts=3),
        TreeSpec.from_static_tree(LOPSIDED),
    ):
        for depth, budget, is_chain in itertools.product((1, 2, 9), (1, 2, 5, 99), (False, True)):
            cut = plan.restrict(depth, budget, is_chain)
            assert len(grow([TreeBuilder(request(*SPECTR), cut)])[0].to_draft().tokens) <= budget
            draft = grow([TreeBuilder(request(), cut)])[0].to_draft()
            assert 1 <= len(draft.tokens) <= budget
            assert draft.limit_depth(depth) is draft or draft.limit_depth(depth).tokens == draft.tokens
            if is_chain:
                assert draft.parents == tuple(range(len(draft.tokens)))


def test_a_smaller_vocabulary_is_named_in_the_targets() -> None:
    ids = torch.tensor([2, 3, 5, 11])
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    for sampling, wanted in ((GREEDY, (3, 11)), (Sampling(temperature=0, presence_penalty=1e-9), (3, 11))):
        growth = TreeBuilder(request(sampling), TreeSpec.from_options(1, tree_nodes=2, top_k=2))
        add_level([growth], NodeLogits(logits, V, ids))
        assert growth.to_draft().tokens == wanted


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tree_nodes": 0}, "positive"),
        ({"top_k": 0}, "positive"),
        ({"tree_nodes": 10**9}, "at most 2048"),
        ({"top_k": 10**5}, "at most 256"),
        ({"branching": (100, 100, 100, 100)}, "101010100 nodes"),
        ({"branching": ()}, "positive numbers"),
        ({"branching": (2,), "top_k": 2}, "without tree_nodes"),
        ({"min_confidence": 1.0}, "min_confidence"),
        ({"num_drafts": 0}, "num_drafts must be positive"),
        ({"num_drafts": 257}, "at most 256"),
        ({"num_drafts": 2, "branching": (2,)}, "without tree_nodes, top_k and branching"),
        ({"num_drafts": 2, "tree_nodes": 4}, "without tree_nodes, top_k and branching"),
    ],
)
def test_options_that_make_no_tree_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ForedraftError, match=why):
        TreeSpec.from_options(4, **options)
