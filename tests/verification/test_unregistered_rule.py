"""A rule that is not in the registry: it works through `LLM` and `Request`, and everything follows its properties."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from torch import Tensor

from foredraft.drafters.common.tree_builder import TreeOptions
from foredraft.llm import LLM
from foredraft.sampling.params import Sampling
from foredraft.tree import Commit, TokenTree
from foredraft.verification.noise import Noise
from foredraft.verification.probs import TargetProbs
from foredraft.verification.registry import RULES
from foredraft.verification.rule import Rule, VerifyFunction
from foredraft.verification.rules import match, reject
from tests.support import engine_fakes, tiny_models
from tests.support.requests import change_spec

PROMPTS = [[5, 6, 7, 8], [9, 8, 7]]
SEEDED = Sampling(max_tokens=24, temperature=0.8, seed=4, ignore_eos=True)


@dataclass(eq=False)
class Recorder:
    """Function of a rule that keeps the trees that it verified."""

    verify: VerifyFunction
    trees: list[TokenTree] = field(default_factory=list)

    def __call__(self, tree: TokenTree, p: Tensor | TargetProbs, noise: Noise) -> Commit:
        self.trees.append(tree)
        return self.verify(tree, p, noise)

    @property
    def has_branches(self) -> bool:
        return not all(tree.is_chain for tree in self.trees)

    @property
    def has_q(self) -> bool:
        return any(tree.q is not None for tree in self.trees)


def make_rule(recorder: Recorder, **properties: bool) -> Rule:
    declared = {"takes_trees": True, "uses_q": False, "shares_noise": True, "is_lossless": True}
    return Rule("recorded", recorder, **declared | {"is_reproducible": False} | properties)


def generate_with(rule: Rule | str) -> list:
    drafter = tiny_models.draft_model(6, options=TreeOptions(branching=(2, 2, 1)))
    return tiny_models.plain().with_drafter(drafter, verify=rule).generate(PROMPTS, SEEDED)


@pytest.mark.parametrize("takes_trees", [True, False])
def test_drafters_draft_trees_only_for_a_rule_that_takes_them(takes_trees):
    recorder = Recorder(match)
    done = generate_with(make_rule(recorder, takes_trees=takes_trees))
    assert recorder.has_branches == takes_trees
    assert not recorder.has_q
    assert {c.verification for c in done} == {"recorded"}
    assert [c.token_ids for c in done] == [c.token_ids for c in generate_with("match")]
    assert sum(c.stats.num_accepted for c in done) > 0


def test_drafters_return_q_to_a_rule_that_uses_it():
    recorder = Recorder(reject)
    done = generate_with(make_rule(recorder, uses_q=True, shares_noise=False))
    assert recorder.has_q
    assert [c.token_ids for c in done] == [c.token_ids for c in generate_with("reject")]


def test_drafts_that_share_noise_are_accepted_more_often():
    shares, own = (generate_with(make_rule(Recorder(match), shares_noise=shares)) for shares in (True, False))
    assert [c.token_ids for c in shares] == [c.token_ids for c in own]
    assert sum(c.stats.num_accepted for c in shares) > sum(c.stats.num_accepted for c in own)


def test_an_llm_takes_a_rule_and_hands_it_on():
    rule = make_rule(Recorder(match))
    llm = LLM(tiny_models.target(), None, verify=rule)
    assert llm.rule is llm.with_drafter("ngram").rule is rule
    assert llm.with_drafter(None, verify="block").rule is RULES["block"]
    assert llm.with_drafter(None, verify="auto").rule is None
    assert llm.generate([PROMPTS[0]], SEEDED)[0].verification == "recorded"


def test_requests_under_an_unregistered_and_a_named_rule_share_a_batch():
    """The rule sees its own requests alone, as chains, beside the trees of the other ones."""
    recorder, others = Recorder(reject), Recorder(match)
    target = engine_fakes.TableLM.from_seed(23, seed=7)
    rules = [make_rule(recorder, takes_trees=False, uses_q=True, shares_noise=False), make_rule(others)] * 2

    def generate(chosen: Sequence[int]) -> list[list[int]]:
        engine = engine_fakes.make_engine(target, engine_fakes.make_drafter(target.perturb(0.3), 4, (2, 2, 1)))
        transcripts = [engine_fakes.make_transcript([3, 1 + n], SEEDED, n) for n in chosen]
        for n, transcript in zip(chosen, transcripts, strict=True):
            change_spec(transcript.request, rule=rules[n])
        return [completion.token_ids for completion, _ in engine_fakes.run(engine, transcripts)]

    together = generate(range(4))
    assert max(len(tree.sizes) for tree in recorder.trees) == 2
    assert recorder.has_q
    assert not recorder.has_branches
    assert others.has_branches
    assert together == [generate([n])[0] for n in range(4)]
