"""Chains of DFlash in few operations against chains level by level: the same tokens and the same q."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from foredraft import Sampling
from foredraft.drafters.dflash import block_levels
from foredraft.request import Batch
from foredraft.verification.registry import RULES
from tests.drafters.dflash.test_native_block import (
    HIDDEN,
    LENGTHS,
    PAGE,
    PAGES,
    SIZE,
    make_drafter,
    make_target,
    observe,
)
from tests.support.requests import make_request

GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=0.8, top_p=0.9)


def draft(sampling: Sampling, verify: str, is_native: bool, end_ids: frozenset[int], **shape: Any) -> Any:
    target = make_target()
    drafter = make_drafter(target, is_native, **shape)
    g = torch.Generator().manual_seed(5)
    states = [torch.randn(n, 2 * HIDDEN, generator=g) for n in LENGTHS]
    tokens = [torch.randint(0, target.vocab_size, (n + 1,), generator=g).tolist() for n in LENGTHS]
    requests = [
        make_request(
            i, tokens[i], replace(sampling, max_tokens=20), seed=i, pages=PAGES[i], rule=RULES[verify], eos_ids=end_ids
        )
        for i in range(2)
    ]
    observe(drafter, requests, states)
    for request, n in zip(requests, LENGTHS, strict=True):
        request.num_computed = n
    return drafter.propose(Batch(tuple(requests), (1, 1), (SIZE - 1, 3), PAGE))


@pytest.mark.parametrize("is_native", [False, True])
@pytest.mark.parametrize("markov_rank", [0, 16])
@pytest.mark.parametrize(
    ("sampling", "verify"), [(GREEDY, "match"), (SAMPLED, "match"), (SAMPLED, "reject"), (SAMPLED, "block")]
)
def test_tokens_and_q_are_those_of_single_levels(
    sampling: Sampling, verify: str, markov_rank: int, is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = draft(sampling, verify, is_native, frozenset(), markov_rank=markov_rank)
    ended = frozenset({fast.tokens[0][2]})
    fast_ended = draft(sampling, verify, is_native, ended, markov_rank=markov_rank)
    monkeypatch.setattr(block_levels, "_is_plain_chain", lambda draft: False)
    for found, end_ids in ((fast, frozenset[int]()), (fast_ended, ended)):
        slow = draft(sampling, verify, is_native, end_ids, markov_rank=markov_rank)
        assert found.tokens == slow.tokens
        assert found.parents == slow.parents
        assert (found.q is None) == (slow.q is None)
        if found.q is not None:
            torch.testing.assert_close(found.q, slow.q)  # torch's products round by the number of rows
    assert fast.sizes == [SIZE, 4]
    assert fast_ended.sizes[0] == 2 + fast.tokens[0][1:].index(*ended)
