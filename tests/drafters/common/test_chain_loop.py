"""Chains in one native call: the tokens, q and KV entries of the loop that takes a call per level.

Guards against a row that reads another draft's entry or feature, noise of another depth, a chain that goes on after an
end token, and rows of q that are left unwritten.
"""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft import RequestOptions, Sampling
from foredraft.drafters.draft_model.drafter import DraftModel
from foredraft.drafters.method import DrafterContext
from foredraft.drafters.wrapper import DrafterWrapper
from foredraft.models.hf import HFModel
from foredraft.request import Batch
from foredraft.tree import TokenTree
from tests.invariants.test_bits import drafter, plain, weights
from tests.support import tiny_models
from tests.support.library_setups import NATIVE, ThreadSetup, use_library
from tests.support.method_cases import METHOD_CASES
from tests.support.tiny_vocabularies import CROSS_VOCAB_CASES

pytestmark = NATIVE

METHODS = ("draft_model", "eagle", "eagle3")
ONE_PASS_CASES = (
    "eagle3, parallel",
    "draft_model, parallel",
)  # all rows of these drafts are one pass, so there is no loop
CASES = [
    name
    for name, case in METHOD_CASES.items()
    if name.split(",")[0] in METHODS and case.is_chain and name not in (*CROSS_VOCAB_CASES, *ONE_PASS_CASES)
]
SAMPLING = Sampling(max_tokens=16, temperature=0, ignore_eos=True)
STOPS = tuple(range(1, tiny_models.VOCAB, 5))  # end many drafts
SAMPLINGS = {
    "match": [
        replace(SAMPLING, temperature=0.9, seed=1),
        SAMPLING,
        replace(SAMPLING, temperature=1.2, top_p=0.8, seed=2),
        replace(SAMPLING, temperature=0.7, top_k=5, min_p=0.02, seed=3),
    ],
    "reject": [
        replace(SAMPLING, temperature=1.0),
        replace(SAMPLING, temperature=0.8, top_p=0.9),
        SAMPLING,
        replace(SAMPLING, temperature=1.1, top_k=4),
    ],
    "block": [
        replace(SAMPLING, temperature=1.0, min_p=0.05, stop_token_ids=STOPS),
        replace(SAMPLING, temperature=0.5, typical_p=0.9),
        replace(SAMPLING, stop_token_ids=STOPS),
    ],
}


def read_entries(made: Any, batch: Batch) -> list[Tensor]:
    """Copy the keys and values of the roots' successors: those that a draft writes, apart from its last token's."""
    slots = []
    for b in batch.find_drafting():
        request = batch.requests[b]
        first = request.num_tokens - made.draft_kv.token_lookahead
        depth = min(batch.granted_nodes[b], request.max_draft_depth)
        slots += [request.pages[i // batch.page_size] * batch.page_size + i % batch.page_size
                  for i in range(first, first + depth - 1)]  # fmt: skip
    return [x[slots].clone() for pair in made.draft_kv.pool.layers.values() for x in pair]


class ComparedDrafter(DrafterWrapper):
    """Drafts natively and level by level, and compares."""

    def __init__(self, made: Any) -> None:
        super().__init__(made)
        self.made, self.num_chains, self.longest = made, 0, 0

    def propose(self, batch: Batch) -> TokenTree:
        made, chains = self.made, self.made._chains
        valid = dict(made.draft_kv.num_valid)
        is_drafted: list[bool] = []
        draft_chains = type(made)._draft_chains
        made._draft_chains = lambda *args: is_drafted.append(draft_chains(made, *args)) or is_drafted[-1]
        tree = made.propose(batch)
        assert all(is_drafted), "the loop was not used"
        found, entries = describe(made), read_entries(made, batch)
        if not made.draft_kv.token_lookahead:  # the draft model computes its newest token again
            made.draft_kv.num_valid.clear()
            made.draft_kv.num_valid.update(valid)
        made._chains = None
        try:
            expected = made.propose(batch)
        finally:
            made._chains = chains
        assert tree.tokens == expected.tokens
        assert tree.parents == expected.parents
        assert (tree.q is None) == (expected.q is None)
        if tree.q is not None:
            assert torch.equal(tree.q.nan_to_num(-1), expected.q.nan_to_num(-1))
        assert found == describe(made)
        assert all(map(torch.equal, entries, read_entries(made, batch)))
        self.num_chains += len(is_drafted) - 1
        self.longest = max(self.longest, *map(len, tree.tokens))
        return tree


def describe(made: Any) -> list[tuple[Any, ...]]:
    """Return what `observe` reads of the drafts."""
    drafts = made._last_drafts.values() if isinstance(made, DraftModel) else ()
    return [(draft.offsets, draft.builder.verified_nodes) for draft in drafts]


def compare(name: str, dtype: torch.dtype, rule: str, max_tokens: int = 10) -> int:
    """Generate with random prompts and draft lengths, and compare every draft. Returns the most nodes of a tree."""
    noise = random.Random(f"{name} {dtype} {rule}")
    made = ComparedDrafter(drafter(name, 8, dtype))
    assert made.made._chains is not None, "its passes are no native calls"
    samplings = [replace(s, max_tokens=max_tokens) for s in SAMPLINGS[rule]]
    prompts = [[noise.randrange(1, tiny_models.VOCAB) for _ in range(noise.randrange(1, 40))] for _ in samplings]
    options = [RequestOptions(num_speculative_tokens=noise.randrange(1, 9)) for _ in samplings]
    llm = plain(dtype).with_drafter(made, verify=rule)
    llm.generate(prompts, samplings, options=options)
    assert llm.engine.drafter.num_failures == 0, llm.engine.drafter.failures
    assert made.num_chains > 1
    return made.longest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_tokens_q_and_entries_are_those_of_the_levels(name: str, dtype: torch.dtype) -> None:
    assert max(compare(name, dtype, rule) for rule in SAMPLINGS) > 4


@pytest.mark.parametrize("name", ["draft_model", "eagle3"])
def test_two_threads_draft_the_same(name: str) -> None:
    with use_library(way=ThreadSetup(2, has_own_pool=False)):
        compare(name, torch.bfloat16, "reject", 6)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_first_pass_may_have_many_more_rows_than_drafts(threads: int) -> None:
    """The draft model reads the prompts in it. Its attention needs scratch memory for all of these rows."""
    with use_library(way=ThreadSetup(threads, has_own_pool=False)):
        draft = HFModel.wrap_model(tiny_models.llama(hidden=128).bfloat16(), "heads of 32", is_fused=True)
        context = DrafterContext(vocab_size=tiny_models.VOCAB, num_speculative_tokens=3, dtype=torch.bfloat16)
        made = ComparedDrafter(DraftModel(draft, context))
        noise = random.Random(0)
        prompts = [[noise.randrange(1, tiny_models.VOCAB) for _ in range(noise.randrange(200, 230))] for _ in range(16)]
        llm = plain(torch.bfloat16).with_drafter(made, verify="reject")
        llm.generate(prompts, [replace(s, max_tokens=4) for s in 4 * SAMPLINGS["reject"]])
        assert made.num_chains > 1
        assert llm.engine.drafter.num_failures == 0, llm.engine.drafter.failures


def test_every_method_with_such_a_network_is_covered() -> None:
    assert {name.split(",")[0] for name in CASES} == set(METHODS)


@pytest.mark.parametrize("rule", ["match", "reject"])
def test_logits_that_are_no_numbers_draft_nothing(rule: str) -> None:
    model = weights(torch.float32, 0.04)
    draft = HFModel.wrap_model(model, "broken", is_fused=True)
    assert draft.fused is not None
    draft.fused.tensors[-1].fill_(math.nan)  # the final norm or a part of it: every logit is NaN
    context = DrafterContext(vocab_size=tiny_models.VOCAB, num_speculative_tokens=3, dtype=torch.float32)
    made = ComparedDrafter(DraftModel(draft, context))
    llm = plain(torch.float32).with_drafter(made, verify=rule)
    llm.generate([[5, 6], [7]], [SAMPLINGS[rule][0], SAMPLING])
    assert made.longest == 1
    assert made.num_chains > 5
    assert llm.engine.drafter.num_failures == 0
