"""After every step, what target and draft hold of a request is what a fresh forward pass over its tokens would hold.

Guards against rollback off by one, a fully accepted draft whose last token the draft never read, positions of rejected
nodes, a tree whose accepted path was not moved to the front, and draft KV held valid that no pass ever wrote; for heads
also against pairs shifted by one, drafted features kept as true ones, and distributions of a root that was left behind.
"""

from typing import Any

import pytest
import torch

from foredraft.drafters.common.tree_builder import TreeOptions
from tests.support import tiny_heads
from tests.support.devices import TEST_DTYPE
from tests.support.kv_comparison import KVTally, simulate_draft_model, simulate_head
from tests.support.tiny_heads import HeadCase

ROUNDING = 1e-12 if torch.float64 == TEST_DTYPE else 1e-3  # of keys and values, after several hundred tokens
CASES = {
    "chain, match": (None, 4, "match"),
    "chain, reject": (None, 5, "reject"),
    "chain, block": (None, 3, "block"),
    "tree, match": ((3, 2, 1), 3, "match"),
    "tree, reject": ((2, 2, 1, 1), 4, "reject"),
    "drafts, spectr": (TreeOptions(num_drafts=3), 4, "spectr"),
    "free tree, match": (TreeOptions(tree_nodes=8, top_k=3), 4, "match"),
    "free tree, reject": (TreeOptions(tree_nodes=8, top_k=3, min_confidence=0.05), 4, "reject"),
}
FREE = {"tree_nodes": 8, "top_k": 3}
HEADS: dict[str, tuple[HeadCase, str, dict[str, Any]]] = {
    "eagle, match": (tiny_heads.EAGLE, "match", {}),
    "eagle, block": (tiny_heads.EAGLE, "block", {}),
    "eagle free tree, reject": (tiny_heads.EAGLE, "reject", FREE),
    "eagle drafts, spectr": (tiny_heads.EAGLE, "spectr", {"num_drafts": 3}),
    "eagle3 free tree, match": (tiny_heads.EAGLE3, "match", FREE),
    "dflash, block": (tiny_heads.DFLASH, "block", {}),
    "dflash free tree, match": (tiny_heads.DFLASH, "match", FREE),
}


@pytest.mark.parametrize("case", CASES)
def test_kv_equals_a_recomputation_after_every_step(case: str) -> None:
    """Differences up to ROUNDING are that; one wrong token in a cache is of the order of one."""
    branching, num_tokens, verify = CASES[case]
    check(simulate_draft_model(100, branching, num_tokens, verify, seed=len(case)))


@pytest.mark.parametrize("case", HEADS)
def test_the_memory_of_heads_equals_a_recomputation_after_every_step(case: str) -> None:
    """It is computed from true states at every position, whatever was drafted there, and is never a step behind."""
    head, verify, options = HEADS[case]
    check(simulate_head(head, 100, 4, verify, seed=len(case), **options))


def check(tally: KVTally) -> None:
    assert tally.difference <= ROUNDING
    assert tally.accepted > 0
    assert tally.rejected > 0
    assert tally.aborted > 0
    assert tally.finished > 0
    assert tally.preempted > 0
    assert tally.found > 0
    assert tally.compared > 1000


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
def test_kv_equals_a_recomputation_over_ten_thousand_steps(case: str) -> None:
    """2,000 steps of each kind."""
    branching, num_tokens, verify = CASES[case]
    assert simulate_draft_model(2000, branching, num_tokens, verify, seed=1).difference <= ROUNDING


@pytest.mark.soak
@pytest.mark.parametrize("case", HEADS)
def test_the_memory_of_heads_equals_a_recomputation_over_thousands_of_steps(case: str) -> None:
    head, verify, options = HEADS[case]
    assert simulate_head(head, 2000, 4, verify, seed=1, **options).difference <= ROUNDING
