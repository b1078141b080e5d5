"""Verification on the GPU: the commit of the rules on the CPU, for the same logits, trees and random numbers.

Guards against another key, position or stream of the noise; siblings in another order; residuals without the rejected
draft; filters that keep one token more or less; rows and nodes of other requests.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from foredraft.errors import ForedraftError
from foredraft.kernels.gpu.verify_block import RequestNumbers, VerifyBlock
from foredraft.kernels.tree_walk import TreeWalk
from foredraft.sampling.params import Sampling
from foredraft.sampling.weights import SIXTEENTHS
from foredraft.verification.registry import RULES
from foredraft.verification.rules import BLOCK, MATCH, REJECT, TYPICAL
from foredraft.verification.walk import get_walk
from tests.support.gpu_cases import DEVICE, TRITON
from tests.support.walk_cases import (
    BATCH,
    OUTCOMES,
    SIBLINGS,
    CaseKinds,
    WalkCase,
    add_further_samples,
    add_prompt_chunk,
    count_outcomes,
    make_case,
)

pytestmark = TRITON
SIZES = (100, 7, 131, 64, 33, 257)
SEEDS = (24, 289, 356, 177, 214, 155)  # chosen so that every outcome occurs


@pytest.fixture(autouse=True, scope="module")
def fast_interpreter() -> Iterator[None]:
    from tests.support.fast_interpreter import patch_language_once

    with patch_language_once():
        yield


def check(case: WalkCase, **plan: int) -> Counter[str]:
    expected, got = case.reference(), case.run(**plan)
    for b in range(len(case.rules)):
        assert got.paths[b] == expected.paths[b], case.describe(b)
        assert got.tokens[b] == expected.tokens[b], case.describe(b)
    assert got.failed == expected.failed
    return count_outcomes(case, got)


def test_commits_are_those_of_the_rules() -> None:
    seen: Counter[str] = Counter()
    for seed, size in zip(SEEDS, SIZES, strict=True):
        case = make_case(BATCH, size, seed, torch.bfloat16 if seed == SEEDS[2] else torch.float32)
        assert case.list_on_device() == list(range(len(BATCH)))
        seen += check(case, tile=128)
    expected = {f"{rule.name} {outcome}" for rule in BATCH for outcome in OUTCOMES}
    assert expected | {"match later sibling", "reject later sibling"} <= set(seen)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 160))
def test_commits_are_those_of_the_rules_in_many_steps(seed: int) -> None:
    dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
    check(make_case(BATCH, (5, 40, 64, 129, 300, 1000)[seed % 6], seed, dtype), tile=128, shortlist=24 + seed % 50)


def test_rejected_siblings_change_what_the_next_ones_are_compared_with() -> None:
    """Guards the residual, and q without the siblings before, over several rejections at one node."""
    seen: Counter[str] = Counter()
    for seed in (5, 7):  # in both, several requests end otherwise if q keeps a rejected token
        seen += check(make_case((REJECT,) * 14, 12, seed, kinds=SIBLINGS), tile=16)
    assert seen["reject later sibling"] > 3


def test_weights_of_a_chain_stay_below_one() -> None:
    """Guards the joint ratio, which must not grow beyond one where q is below p."""
    kinds = CaseKinds(samplings=[Sampling()], logits=("plain",), drafts=("near",))
    for seed in (6, 13):
        check(make_case((BLOCK,) * 10, 9, seed, kinds=kinds), tile=16)


def test_the_first_of_equal_logits_is_the_greedy_token() -> None:
    """Guards equal logits that the same lane of a program reads in two tiles."""
    case = make_case((MATCH,), 70, 0)
    check(replace(case, logits=torch.zeros_like(case.logits), samplings=[Sampling(temperature=0)]), tile=16)


def test_many_requests_share_the_scratch_of_few() -> None:
    """Guards launches of one request after another against rows and results of another request."""
    case = make_case((REJECT, BLOCK, MATCH, REJECT, BLOCK), 9, 5)
    check(case, tile=16, max_scratch=16 * 9 * 2)


def test_other_requests_of_a_batch_keep_their_way() -> None:
    """Guards a batch in which some requests have no walk: typical, further samples, log-probabilities, penalties."""
    case = make_case((REJECT, TYPICAL, MATCH, REJECT, BLOCK, MATCH), 12, 3)
    own = [*case.samplings[:4], Sampling(logprobs=0), Sampling(typical_p=0.9)]
    case = add_prompt_chunk(add_further_samples(replace(case, samplings=own), 3))
    assert case.list_on_device() == [0, 2, 6]
    check(case, tile=16)


def test_which_requests_have_a_walk() -> None:
    """Guards a request whose probabilities the device does not compute."""
    case = make_case((MATCH,), 12, 3)
    for changed in (
        Sampling(typical_p=0.9), Sampling(logprobs=1), Sampling(min_tokens=2), Sampling(presence_penalty=0.1),
        Sampling(logit_bias={1: 1.0}), Sampling(allowed_token_ids=(1,)), Sampling(bad_words=((1,),)),
    ):  # fmt: skip
        assert replace(case, samplings=[changed]).list_on_device() == []
    assert case.list_on_device() == [0]
    assert replace(case, logits=case.logits.double()).list_on_device() == []
    tree = make_case((REJECT,), 12, 0)
    branching = replace(tree.tree, tokens=[[1, 2, 3]], parents=[[-1, 0, 0]], committed_next=None)
    assert replace(tree, tree=branching, rules=[BLOCK]).list_on_device() == []
    assert [get_walk(rule) is not None for rule in RULES.values()] == [True, True, True, False, False]


def test_drafts_over_another_vocabulary_are_none() -> None:
    case = make_case((REJECT, MATCH), 30, 8)
    assert case.tree.q is not None
    tree = replace(case.tree, q=case.tree.q[:, :20])
    check(replace(case, tree=tree, noise=replace(case.noise, tree=tree)))


def test_a_step_without_rows_launches_nothing() -> None:
    case = add_prompt_chunk(make_case((MATCH,), 5, 0))
    tree = case.tree.select([1])
    noise = replace(case.noise, tree=tree, seeds=[(0, 0)], positions=[9])
    alone = replace(case, logits=case.logits[:0], tree=tree, noise=noise, rules=[MATCH], samplings=[Sampling()])
    assert alone.list_on_device() == []
    assert alone.run().paths == [[0, 1, 2]]


def test_logits_that_do_not_fit_are_refused() -> None:
    from foredraft.kernels.gpu.verify import walk_trees

    case = make_case((MATCH,), 5, 0)
    request = RequestNumbers(TreeWalk.SAMPLES, 0, 0, 0, 0, True, 1.0, 0.0, 0, 1.0)
    block = VerifyBlock.pack(SIXTEENTHS, [request], [], torch.device(DEVICE))
    logits = case.logits.to(DEVICE)
    for given, q in ((logits, None), (logits.double()[:0], None), (logits[:0], logits)):
        with pytest.raises(ForedraftError, match="do not fit a step of 0 rows"):
            walk_trees(given, q, block)
