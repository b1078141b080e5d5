"""A drafter is untrusted: under any fault, the text is that of plain decoding, and three faults suspend the drafter.

Guards against the crashes of others: one slot's overlong draft aborting all slots, an id of -1 or of the vocabulary's
size reaching the embedding, NaN in q turning into token 0, an exception that ends every stream.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from foredraft import Sampling
from foredraft.drafters.draft import to_token_tree
from foredraft.drafters.spec import DrafterSpec
from foredraft.engine.sandbox import MAX_FAILURES, SandboxedDrafter
from foredraft.request import Batch
from foredraft.tree import Commit, TokenTree
from tests.support import engine_fakes
from tests.support.engine_fakes import ScriptedDrafter, TableLM

V = 23
LM = TableLM.from_seed(V, seed=7)
PROMPTS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10, 11, 12, 13]]
SAMPLINGS = [
    Sampling(max_tokens=14, temperature=0),
    Sampling(max_tokens=14, temperature=0.9, seed=3),
    Sampling(max_tokens=9, temperature=0.7, seed=4, frequency_penalty=0.5),
    Sampling(max_tokens=14, temperature=0),
]
RULES = ["match", "match", "match", "reject"]


def texts(drafter: ScriptedDrafter | None, **limits: int) -> list[list[int]]:
    engine = engine_fakes.make_engine(LM, drafter, max_chunk=4, **limits)
    transcripts = [
        engine_fakes.make_transcript(prompt, sampling, n, verify=rule)
        for n, (prompt, sampling, rule) in enumerate(zip(PROMPTS, SAMPLINGS, RULES, strict=True))
    ]
    return [completion.token_ids for completion, _ in engine_fakes.run(engine, transcripts)]


PLAIN = texts(None)


def change_draft(change: Callable[[Batch, TokenTree], TokenTree]) -> Callable[[Batch], TokenTree]:
    """Make a drafter that applies `change` to a good draft."""
    return lambda batch: change(batch, engine_fakes.draft_greedily(LM, batch))


def _raises(batch: Batch) -> TokenTree:
    raise RuntimeError("no draft today")


def _set(tree: TokenTree, token: int) -> TokenTree:
    """Replace the last token of the longest drafts."""
    width = max(tree.sizes)
    return TokenTree([[*row[:-1], token] if len(row) == width else row for row in tree.tokens], tree.parents)


def _parents(tree: TokenTree, column: int, parent: int) -> TokenTree:
    """Replace the parent of one node, counted in the longest drafts."""
    node = column % max(tree.sizes)
    parents = [[*row[:node], parent, *row[node + 1 :]] if node < len(row) else row for row in tree.parents]
    return TokenTree(tree.tokens, parents)


def _deep(batch: Batch) -> TokenTree:
    """Deeper than max_tokens leaves room for, and wider than any budget."""
    roots = to_token_tree(batch, {}).tokens
    return TokenTree.from_chains([[*root, *[1] * 40] for root in roots])


def _wide(batch: Batch) -> TokenTree:
    roots = to_token_tree(batch, {}).tokens
    return TokenTree.from_lists([[*root, *range(20)] for root in roots], [[-1, *[0] * 20] for _ in roots])


FAULTS: dict[str, Callable[[Batch], TokenTree]] = {
    "raises": _raises,
    "returns None": lambda batch: None,  # type: ignore[arg-type,return-value]
    "too few trees": change_draft(lambda batch, tree: tree.select(range(len(batch) - 1)) if len(batch) > 1 else None),
    "wrong root": change_draft(
        lambda batch, tree: TokenTree([[min(t + 1, V - 1) for t in row] for row in tree.tokens], tree.parents)
    ),
    "no nodes at all": change_draft(
        lambda batch, tree: TokenTree([[] for _ in tree.tokens], [[] for _ in tree.parents])
    ),
    "id of the vocabulary's size": change_draft(lambda batch, tree: _set(tree, V)),
    "huge id": change_draft(lambda batch, tree: _set(tree, 1 << 40)),
    "root with a parent": change_draft(lambda batch, tree: _parents(tree, 0, 0)),
    "parent of itself": change_draft(lambda batch, tree: _parents(tree, -1, max(tree.sizes) - 1)),
    "orphan": change_draft(lambda batch, tree: _parents(tree, -1, -1)),
    "later parent": change_draft(lambda batch, tree: _parents(tree, 1, max(tree.sizes))),
    "parents of another shape": change_draft(
        lambda batch, tree: TokenTree(tree.tokens, [row[:1] for row in tree.parents])
    ),
    "too deep": _deep,
    "too wide": _wide,
    "float ids": change_draft(lambda batch, tree: TokenTree([[*map(float, row)] for row in tree.tokens], tree.parents)),
    "tensors": change_draft(lambda batch, tree: TokenTree([*map(torch.tensor, tree.tokens)], tree.parents)),
    "q of another width": change_draft(lambda batch, tree: TokenTree(tree.tokens, tree.parents, torch.ones(3, V + 1))),
    "q of another height": change_draft(lambda batch, tree: TokenTree(tree.tokens, tree.parents, torch.ones(1, V))),
    "too few confidences": change_draft(lambda batch, tree: replace(tree, confidences={0: ()})),
    "confidences that are no numbers": change_draft(
        lambda batch, tree: replace(tree, confidences={0: (math.nan,) * (tree.sizes[0] - 1)})
    ),
    "confidences of a request that is not there": change_draft(
        lambda batch, tree: replace(tree, confidences={len(batch): (0.5,)})
    ),
    "successors it cannot know": change_draft(
        lambda batch, tree: TokenTree(tree.tokens, tree.parents, committed_next=tuple((1,) for _ in range(len(batch))))
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_proposal_is_no_draft(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    """Three of them, each logged, and the drafter rests."""
    drafter = ScriptedDrafter(FAULTS[fault])
    with caplog.at_level(logging.WARNING):
        assert texts(drafter) == PLAIN
    assert drafter.num_proposed == MAX_FAILURES
    assert len(caplog.records) == MAX_FAILURES
    assert "quarantined for" in caplog.messages[-1]


def _set_q(tree: TokenTree, batch: Batch, value: float) -> TokenTree:
    rows = sum(size for size, scored in zip(tree.sizes, batch.needs_logits, strict=True) if scored)
    return TokenTree(tree.tokens, tree.parents, torch.full((rows, V), value, dtype=torch.float64))


def _twins(batch: Batch) -> TokenTree:
    """Propose two children of the root with one token, twice."""
    roots = to_token_tree(batch, {}).tokens
    widths = [min(4, budget) for budget in batch.granted_nodes]
    tokens = [[*root, *[5, 5, 6, 6][:n]] for root, n in zip(roots, widths, strict=True)]
    return TokenTree.from_lists(tokens, [[-1, *[0] * n] for n in widths])


ODDITIES: dict[str, Callable[[Batch], TokenTree]] = {
    "NaN q": change_draft(lambda batch, tree: _set_q(tree, batch, float("nan"))),
    "infinite q": change_draft(lambda batch, tree: _set_q(tree, batch, float("inf"))),
    "negative q": change_draft(lambda batch, tree: _set_q(tree, batch, -1.0)),
    "q that is zero": change_draft(lambda batch, tree: _set_q(tree, batch, 0.0)),
    "q that does not sum to one": change_draft(lambda batch, tree: _set_q(tree, batch, 3.0)),
    "twin siblings": _twins,
    "negative ids": change_draft(lambda batch, tree: _set(tree, -7)),
    "nothing but roots": lambda batch: to_token_tree(batch, {}),
    "wrong tokens": change_draft(lambda batch, tree: _set(tree, 0)),
}


@pytest.mark.parametrize("oddity", ODDITIES)
def test_an_odd_proposal_changes_no_text(oddity: str) -> None:
    """The valid part is verified; a draft with a q that is no distribution is dropped."""
    assert texts(ScriptedDrafter(ODDITIES[oddity])) == PLAIN


def test_a_good_drafter_is_used() -> None:
    """Else the tests above would hold for a guard that refuses everything."""
    drafter = ScriptedDrafter(lambda batch: engine_fakes.draft_greedily(LM, batch))
    assert texts(drafter) == PLAIN
    assert max(max(commit.counts) for commit in drafter.observed) >= 4
    assert sorted(set(drafter.forgotten)) == [0, 1, 2, 3]


def test_faults_below_the_limit_are_forgiven() -> None:
    """Two faults, then good drafts to the end."""
    drafter = ScriptedDrafter(
        lambda batch: engine_fakes.draft_greedily(LM, batch) if drafter.num_proposed > 2 else _raises(batch)
    )
    assert texts(drafter) == PLAIN
    assert drafter.num_proposed > MAX_FAILURES
    assert max(max(commit.counts) for commit in drafter.observed) >= 4


def test_a_drafter_that_fails_to_observe_or_to_forget_changes_no_text() -> None:
    """Its memory may be wrong afterwards; the pages and slots of the engine may not."""

    def fails(*_: object) -> None:
        raise ValueError("lost my notes")

    assert texts(ScriptedDrafter(lambda batch: engine_fakes.draft_greedily(LM, batch), on_observe=fails)) == PLAIN
    drafter = ScriptedDrafter(lambda batch: engine_fakes.draft_greedily(LM, batch), on_forget=fails)
    assert texts(drafter, max_batch=1) == PLAIN
    assert drafter.forgotten == [0, 0, 0, 0]


def test_branches_under_block_verification_are_no_draft() -> None:
    """They used to raise in the verification, and so ended every request of the batch."""
    engine = engine_fakes.make_engine(LM, ScriptedDrafter(_twins))
    done = engine_fakes.run(engine, [engine_fakes.make_transcript([1, 2, 3], SAMPLINGS[0], verify="block")])
    assert done[0][0].token_ids == PLAIN[0]


def test_a_tree_drafter_drafts_chains_for_block_verification() -> None:
    """Requests under other rules in the same batch keep their trees."""
    drafter = engine_fakes.make_drafter(LM.perturb(0.3), 3, (2, 2, 1))
    engine = engine_fakes.make_engine(LM, drafter)
    rules = ["block", "match", "block", "match"]
    transcripts = [engine_fakes.make_transcript(p, SAMPLINGS[0], n, verify=rules[n]) for n, p in enumerate(PROMPTS)]
    done = [completion for completion, _ in engine_fakes.run(engine, transcripts)]
    plain = engine_fakes.run(
        engine_fakes.make_engine(LM, None), [engine_fakes.make_transcript(p, SAMPLINGS[0]) for p in PROMPTS]
    )
    assert [c.token_ids for c in done] == [c.token_ids for c, _ in plain]
    assert engine.drafter.num_failures == 0
    assert all(c.stats.num_accepted > 0 for c in done)


def test_random_faults_change_no_text() -> None:
    """Thirty engines, each with faults and good drafts in random order."""
    generator = torch.Generator().manual_seed(0)
    kinds = [*FAULTS.values(), *ODDITIES.values()]

    def propose(batch: Batch) -> TokenTree:
        if float(torch.rand((), generator=generator)) < 0.7:
            return engine_fakes.draft_greedily(LM, batch)
        return kinds[int(torch.randint(len(kinds), (), generator=generator))](batch)

    accepted = 0
    for _ in range(30):
        drafter = ScriptedDrafter(propose)
        assert texts(drafter) == PLAIN
        accepted += sum(sum(commit.counts) - len(commit.counts) for commit in drafter.observed)
    assert accepted > 100


class CountingSandbox(SandboxedDrafter):
    """A sandbox that counts its validations."""

    num_validated = 0

    def _validate_tree(self, batch: Batch, tree: TokenTree) -> str | None:
        self.num_validated += 1
        return super()._validate_tree(batch, tree)


class Passing:
    """A drafter that passes on the tree of a member's sandbox, or the one before it."""

    def __init__(self, member: CountingSandbox, is_late: bool) -> None:
        self.member, self.is_late = member, is_late
        self.trees: list[TokenTree] = []

    @property
    def spec(self) -> DrafterSpec:
        return self.member.spec

    def propose(self, batch: Batch) -> TokenTree:
        self.trees.append(self.member.propose(batch))
        return self.trees[-2 if self.is_late and len(self.trees) > 1 else -1]

    def observe(self, batch: Batch, commit: Commit) -> None:
        self.member.observe(batch, commit)

    def forget(self, slots: Sequence[int]) -> None:
        self.member.forget(slots)


def test_a_tree_is_validated_once_however_many_sandboxes_it_passes() -> None:
    member = CountingSandbox(ScriptedDrafter(change_draft(lambda batch, tree: tree)), V)
    outer = CountingSandbox(Passing(member, is_late=False), V)
    assert texts(outer) == PLAIN
    assert member.num_validated > 5
    assert outer.num_validated == 0
    assert not outer.num_failures


def test_a_validated_tree_of_another_step_is_validated_again() -> None:
    """Guards a composition that returns a tree of the step before: its root is no longer the last token."""
    member = CountingSandbox(ScriptedDrafter(change_draft(lambda batch, tree: tree)), V)
    outer = CountingSandbox(Passing(member, is_late=True), V)
    assert texts(outer) == PLAIN
    assert outer.failures["malformed"] >= MAX_FAILURES
