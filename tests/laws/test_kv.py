"""After every step, what target and draft hold of a request is what a fresh forward pass over its tokens would hold.

Guards against rollback off by one, a fully accepted draft whose last token the draft never read, positions of rejected
nodes, a tree whose accepted path was not moved to the front, and draft KV held valid that no pass ever wrote.
"""

import pytest

from kv_compared import lived

CASES = {
    "chain, match": (None, 4, "match"),
    "chain, reject": (None, 5, "reject"),
    "chain, block": (None, 3, "block"),
    "tree, match": ((3, 2, 1), 3, "match"),
    "tree, reject": ((2, 2, 1, 1), 4, "reject"),
}


@pytest.mark.parametrize("case", CASES)
def test_kv_equals_a_recomputation_after_every_step(case: str) -> None:
    """Differences of 1e-12 are rounding; one wrong token in a cache is of the order of one."""
    branching, num_tokens, verify = CASES[case]
    tally = lived(100, branching, num_tokens, verify, seed=len(case))
    assert tally.difference <= 1e-12
    assert tally.accepted > 0
    assert tally.rejected > 0
    assert tally.aborted > 0
    assert tally.finished > 0
    assert tally.preempted > 0
    assert tally.compared > 1000


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
def test_kv_equals_a_recomputation_over_ten_thousand_steps(case: str) -> None:
    """2,000 steps of each kind."""
    branching, num_tokens, verify = CASES[case]
    assert lived(2000, branching, num_tokens, verify, seed=1).difference <= 1e-12
