"""Rule of a request under `verify="auto"`: it follows from the request and the drafter, never from a draft."""

import pytest

from foredraft import LLM, Sampling
from foredraft.drafters.common.tree_builder import TreeOptions
from foredraft.drafters.interface import Drafter
from foredraft.drafters.spec import DrafterSpec
from foredraft.drafters.wrapper import DrafterWrapper
from foredraft.request import Batch
from foredraft.request_factory import MAX_BLOCK_VOCAB, choose_sampled_rule
from foredraft.tree import TokenTree
from foredraft.verification.rules import BLOCK, REJECT
from tests.support import tiny_models
from tests.support.method_cases import METHOD_CASES

SAMPLED = Sampling(max_tokens=12, ignore_eos=True)


def test_chains_of_a_vocabulary_that_is_not_too_large_are_verified_by_block() -> None:
    chain, tree = DrafterSpec(4, is_chain=True), DrafterSpec(4)
    assert choose_sampled_rule(chain, MAX_BLOCK_VOCAB) is BLOCK
    assert choose_sampled_rule(chain, MAX_BLOCK_VOCAB + 1) is REJECT
    assert choose_sampled_rule(tree, 97) is REJECT


@pytest.mark.parametrize(
    ("options", "rule"),
    [(None, "block"), (TreeOptions(tree_nodes=6), "reject"), (TreeOptions(branching=(2, 1)), "reject")],
)
def test_unseeded_requests_have_the_rule_of_the_drafter(options: TreeOptions | None, rule: str) -> None:
    llm = LLM(tiny_models.target(), None, is_debug=True).with_drafter(tiny_models.draft_model(3, options=options))
    params = [SAMPLED, Sampling(max_tokens=12, seed=3), Sampling(max_tokens=12, temperature=0)]
    assert [c.verification for c in llm.generate([[5, 6, 7]] * 3, params)] == [rule, "match", "match"]
    assert llm.with_drafter("ngram").generate([[5, 6, 7]], SAMPLED)[0].verification == "reject"
    named = llm.with_drafter(tiny_models.draft_model(3, options=options), verify="reject")
    assert named.generate([[5, 6, 7]], SAMPLED)[0].verification == "reject"


class TreeRecorder(DrafterWrapper):
    """Drafter that keeps its trees."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self.trees: list[TokenTree] = []

    def propose(self, batch: Batch) -> TokenTree:
        tree = super().propose(batch)
        self.trees.append(tree)
        return tree


def test_drafters_that_declare_chains_propose_no_tree() -> None:
    plain = LLM(tiny_models.target(), None, is_debug=True)
    recorders = {name: TreeRecorder(case.make(4, plain)) for name, case in METHOD_CASES.items()}
    chains = {name: recorder for name, recorder in recorders.items() if recorder.spec.is_chain}
    assert {"blockwise", "draft_model", "eagle", "early_exit", "hydra"} <= set(chains)
    for name, recorder in chains.items():
        METHOD_CASES[name].prepare([[5, 6, 7]])
        plain.with_drafter(recorder, verify="reject").generate([[5, 6, 7], [8, 9, 8, 9]], SAMPLED)
        assert any(size > 1 for tree in recorder.trees for size in tree.sizes)
        assert all(tree.is_chain for tree in recorder.trees)
