"""Drafters that sample for one request must sample independently: their noise depends on `Batch.draft_stream`.

Two members of an ensemble with the same noise would sample correlated tokens, and a merged tree would then change the
distribution of the output.
"""

from dataclasses import dataclass, field, replace

import pytest

from foredraft import Sampling
from foredraft.drafters.draft import chain_noise_keys, draft_noise_key
from foredraft.drafters.interface import Drafter
from foredraft.drafters.wrapper import DrafterWrapper
from foredraft.request import Batch
from foredraft.tree import TokenTree
from foredraft.verification.registry import RULES
from tests.support import tiny_models
from tests.support.method_cases import METHOD_CASES
from tests.support.requests import make_request

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6], [33], [44, 45], [50] * 5, [61, 62, 63, 64, 61, 62], [12, 13, 14, 15]]
SAMPLING = Sampling(max_tokens=6, temperature=1.0, seed=3, ignore_eos=True)


@dataclass
class Recorder(DrafterWrapper):
    """Drafter in a stream; keeps the first draft of every request, and whether it was sampled."""

    drafter: Drafter
    stream: int
    drafts: dict[int, list[int]] = field(default_factory=dict)  # by slot
    has_q: bool = False

    def propose(self, batch: Batch) -> TokenTree:
        tree = self.drafter.propose(replace(batch, draft_stream=self.stream))
        self.has_q |= tree.q is not None
        for b, request in enumerate(batch.requests):
            if tree.sizes[b] > 1:
                self.drafts.setdefault(request.slot, tree.tokens[b])
        return tree


def draft_in(name: str, stream: int, verify: str) -> Recorder:
    recorder = Recorder(METHOD_CASES[name].make(4), stream)
    tiny_models.plain().with_drafter(recorder, verify=verify).generate(PROMPTS, SAMPLING)
    return recorder


@pytest.mark.parametrize("name", [name for name in METHOD_CASES if name.split(",")[0] != "compose"])
def test_a_sampled_draft_depends_on_the_stream(name: str) -> None:
    first, again, other = (draft_in(name, stream, "reject") for stream in (0, 0, 1))
    assert first.drafts == again.drafts
    if first.has_q and not first.spec.is_token_source:  # an ensemble merges no samples of a token member with others
        assert first.drafts != other.drafts


@pytest.mark.parametrize("name", ["draft_model", "medusa"])
def test_under_a_rule_that_shares_noise_it_does_not(name: str) -> None:
    first, other = (draft_in(name, stream, "match") for stream in (0, 1))
    assert first.drafts
    assert first.drafts == other.drafts


def test_streams_and_nodes_have_different_keys() -> None:
    def keys(verify: str) -> list[int]:
        request = make_request(0, [1, 2], Sampling(), seed=7, rule=RULES[verify])
        return [draft_noise_key(request, node, 0, stream) for node in range(20) for stream in range(5)]

    assert len(set(keys("reject"))) == 100
    assert len(set(keys("match"))) == 1


@pytest.mark.parametrize("verify", ["reject", "match"])
@pytest.mark.parametrize("stream", [0, 3])
def test_the_keys_of_a_chain_are_those_of_its_nodes(verify: str, stream: int) -> None:
    for seed in (0, 7, 2**64 - 1):
        request = make_request(0, [1, 2, 5, 6], Sampling(), seed=seed, rule=RULES[verify])
        keys = [draft_noise_key(request, node, node, stream) for node in range(6)]
        assert chain_noise_keys(request, 6, stream) == keys
    assert chain_noise_keys(request, 0, stream) == []
