"""Verification by the native library: the commit of the rules, for the same logits, trees and random numbers.

Guards against another key, position or stream of the noise; siblings in another order; residuals without the rejected
draft; sums in another order, which change the last bit; rows and nodes of other requests.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from foredraft.kernels.cpu.library import INSTRUCTION_SETS, load_library
from foredraft.kernels.tree_walker import find_tree_walker
from foredraft.sampling.params import Sampling
from foredraft.tree import Commit, TokenTree
from foredraft.verification.native import find_native_requests, needs_walk, verify_natively
from foredraft.verification.noise import SeededNoise
from foredraft.verification.probs import LazyTargetProbs
from foredraft.verification.registry import RULES
from foredraft.verification.rule import Rule
from foredraft.verification.rules import BLOCK, MATCH, REJECT, TYPICAL
from foredraft.verification.step import verify_step
from tests.support.walk_cases import (
    BATCH,
    DRAFTS,
    OUTCOMES,
    SAMPLINGS,
    SIBLINGS,
    CaseKinds,
    WalkCase,
    add_further_samples,
    add_prompt_chunk,
    count_outcomes,
    make_case,
)

pytestmark = pytest.mark.skipif(
    find_tree_walker(torch.zeros(1, 2)) is None, reason="the native library is not built, or switched off"
)
TYPICAL_MASS = Sampling(typical_p=0.7, temperature=1.2)
KINDS = CaseKinds(samplings=(*SAMPLINGS, TYPICAL_MASS), drafts=(*DRAFTS, "few"))


def read_narrow(case: WalkCase) -> WalkCase:
    """Return the case with q in float32, if it is in float64: the library reads no such q."""
    assert case.tree.q is not None
    tree = replace(case.tree, q=case.tree.q.float()) if case.tree.q.dtype == torch.float64 else case.tree
    return replace(case, tree=tree, noise=replace(case.noise, tree=tree))


def list_native(case: WalkCase) -> list[int]:
    return find_native_requests(case.tree, case.make_probs("cpu"), case.rules)


def run(case: WalkCase) -> Commit:
    return verify_step(case.tree, case.make_probs("cpu"), case.noise, case.rules, kernels=None)


def check(case: WalkCase) -> Counter[str]:
    expected, got = case.reference(), run(case)
    for b in range(len(case.rules)):
        assert got.paths[b] == expected.paths[b], case.describe(b)
        assert got.tokens[b] == expected.tokens[b], case.describe(b)
    assert got.failed == expected.failed
    return count_outcomes(case, got)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_commits_are_those_of_the_rules(instruction_set: str) -> None:
    """Guards every instruction set, and requests that several threads verify."""
    library = load_library()
    assert library is not None
    if not library.is_supported(instruction_set):
        pytest.skip(f"this processor has no {instruction_set}")
    library.select(instruction_set)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        check_many_steps()
    finally:
        library.select()
        torch.set_num_threads(num_threads)


def check_many_steps() -> None:
    seen: Counter[str] = Counter()
    for seed in range(90):
        dtype = torch.bfloat16 if seed % 3 == 0 else torch.float32
        case = read_narrow(make_case(BATCH, (5, 64, 131, 1000, 2500)[seed % 5], seed, dtype, KINDS))
        assert list_native(case) == list(range(len(BATCH)))
        seen += check(case)
    expected = {f"{rule.name} {outcome}" for rule in BATCH for outcome in OUTCOMES}
    assert expected | {"match later sibling", "reject later sibling"} <= set(seen)


def test_rejected_siblings_change_what_the_next_ones_are_compared_with() -> None:
    """Guards the residual, and q without the siblings before, over several rejections at one node."""
    seen: Counter[str] = Counter()
    for seed in range(40):
        seen += check(read_narrow(make_case((REJECT,) * 14, (12, 300)[seed % 2], seed, kinds=SIBLINGS)))
    assert seen["reject later sibling"] > 40


def test_the_weights_of_a_chain_stay_below_one() -> None:
    """Guards the joint ratio, which must not grow beyond one where q is below p, and the joint test."""
    kinds = CaseKinds(samplings=[Sampling()], logits=("plain",), drafts=("near",))
    seen: Counter[str] = Counter()
    for seed in range(60):
        seen += check(read_narrow(make_case((BLOCK,) * 10, 9, seed, kinds=kinds)))
    assert seen["block accepted"] > 100
    assert seen["block rejected"] > 10


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(top_k=20), Sampling(top_p=0.8)], ids=["all", "top-k", "top-p"]
)
def test_drafts_from_the_target_itself_are_always_accepted(sampling: Sampling) -> None:
    """Guards a q that is not normalised as p is: a draft would then be rejected now and then."""
    for seed in range(20):
        logits = torch.randn(10, 300, generator=torch.Generator().manual_seed(seed)) * 2
        probs = LazyTargetProbs(logits, [sampling] * len(logits))
        q = torch.stack([probs.get_dense_row(row) for row in range(len(logits))])
        drafts = torch.multinomial(q, 1, generator=torch.Generator().manual_seed(seed))[:, 0].tolist()
        tree = TokenTree.from_chains([[1, *drafts[:4]], [1, *drafts[5:9]]], 4 * q)  # not normalised, as q may be
        noise = SeededNoise(tree, [(seed, 0), (seed, 1)], [9, 9])
        case = WalkCase(logits, tree, noise, [REJECT, BLOCK], [sampling] * 2)
        assert list_native(case) == [0, 1]
        check(case)
        assert [tokens[:4] for tokens in run(case).tokens] == [drafts[:4], drafts[5:9]]


def test_drafts_that_were_not_sampled_have_no_q() -> None:
    """Guards drafts of n-grams and copies."""
    seen: Counter[str] = Counter()
    for seed in range(40):
        case = make_case(BATCH, 64, seed, kinds=KINDS)
        tree = replace(case.tree, q=None, num_sampled_children=None)
        seen += check(replace(case, tree=tree, noise=replace(case.noise, tree=tree)))
    assert {"block accepted", "block rejected", "reject accepted", "reject later sibling"} <= set(seen)


def test_tokens_that_rounding_decides_about_are_left_to_the_rule() -> None:
    """Guards a race whose two best scores are too close: with such a margin nearly all of them are."""
    for seed in range(10):
        case = make_case((MATCH, REJECT, MATCH), 60, seed)
        probs, walker = case.make_probs("cpu"), find_tree_walker(case.logits)
        assert walker is not None
        commit = verify_natively(case.tree, probs, case.noise, case.rules, replace(walker, margin=0.999))
        assert (commit.paths, commit.tokens) == (case.reference().paths, case.reference().tokens)


@pytest.mark.parametrize("rules", [(BLOCK, REJECT, MATCH), (MATCH, MATCH, MATCH)], ids=["sampled", "match"])
def test_a_step_without_drafts_samples_the_next_token(rules: tuple[Rule, ...]) -> None:
    """Guards plain decoding, whose tree has neither q nor children, also beside the chunk of a prompt."""
    for seed in range(10):
        case = add_prompt_chunk(make_case(rules, 50, seed))
        roots = list(zip(case.tree.roots, case.tree.sizes, strict=True))
        rows = [case.tree.row_offsets[b] for b, (root, size) in enumerate(roots) if root < size]
        tokens = [row[: root + 1] for row, (root, _) in zip(case.tree.tokens, roots, strict=True)]
        parents = [row[: root + 1] for row, (root, _) in zip(case.tree.parents, roots, strict=True)]
        tree = replace(case.tree, tokens=tokens, parents=parents, q=None, num_sampled_children=None)
        plain = replace(case, tree=tree, noise=replace(case.noise, tree=tree), logits=case.logits[rows])
        assert needs_walk(plain.tree, rules) == (BLOCK in rules)
        assert list_native(plain) == [0, 1, 2, 3]
        check(plain)


def test_other_requests_of_a_batch_keep_their_way() -> None:
    """Guards a batch in which some requests have no native walk: samples, typical, further samples, penalties."""
    case = read_narrow(make_case((REJECT, TYPICAL, MATCH, REJECT, BLOCK, MATCH), 12, 3))
    own = [*case.samplings[:4], Sampling(logprobs=2), case.samplings[5]]
    case = add_prompt_chunk(add_further_samples(replace(case, samplings=own), 3))
    assert list_native(case) == [0, 2, 4, 5, 6]
    check(case)


def test_which_requests_have_a_native_walk() -> None:
    case = read_narrow(make_case((REJECT,), 12, 3))
    for changed in (
        Sampling(min_tokens=2), Sampling(presence_penalty=0.1), Sampling(logit_bias={1: 1.0}),
        Sampling(allowed_token_ids=(1,)), Sampling(bad_words=((1,),)),
    ):  # fmt: skip
        assert list_native(replace(case, samplings=[changed])) == []
    assert case.tree.q is not None
    assert list_native(case) == [0]
    for q in (case.tree.q.double(), case.tree.q[:, :8], case.tree.q.T.contiguous().T):
        assert list_native(replace(case, tree=replace(case.tree, q=q))) == []
    branching = replace(case.tree, tokens=[[1, 2, 3]], parents=[[-1, 0, 0]], committed_next=None)
    assert list_native(replace(case, tree=branching, rules=[BLOCK])) == []
    chain = [rule.name for rule in RULES.values() if list_native(replace(case, rules=[rule]))]
    assert chain == ["match", "reject", "block"]
    assert list_native(replace(case, rules=[replace(REJECT, verify=lambda *args: REJECT.verify(*args))])) == []


def test_drafts_over_another_vocabulary_are_none() -> None:
    case = read_narrow(make_case((REJECT, BLOCK), 30, 8))
    assert case.tree.q is not None
    tree = replace(case.tree, q=case.tree.q[:, :20])
    check(replace(case, tree=tree, noise=replace(case.noise, tree=tree)))
