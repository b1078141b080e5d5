"""Sampled chains in one native call: the tokens, q and expectation of the reference, which grows them level by level.

Guards against a filter or a race that reads the tokens of a level by their index instead of their id, a q with other
bits than the distribution that was sampled, and a chain that ends elsewhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from foredraft.drafters.draft import Draft
from foredraft.drafters.method import DrafterContext
from foredraft.drafters.suffix import drafter as suffix_drafter
from foredraft.drafters.suffix import method as suffix
from foredraft.drafters.suffix.drafter import SuffixDrafter
from foredraft.drafters.suffix.native_chain import create_chain_sampler
from foredraft.kernels.cpu.library import INSTRUCTION_SETS, load_library
from foredraft.models.native import draft_plans
from foredraft.request import Request, RequestStatus
from foredraft.sampling.params import Sampling
from foredraft.verification.registry import RULES
from tests.support.requests import make_request

pytestmark = pytest.mark.skipif(load_library() is None, reason="no native kernels")

VOCAB, DEPTH = 300, 6
SETTINGS = {
    "plain": Sampling(),
    "cold": Sampling(temperature=0.3),
    "hot": Sampling(temperature=3.0),
    "top-k": Sampling(top_k=2),
    "top-p": Sampling(top_p=0.6),
    "min-p": Sampling(min_p=0.4),
    "typical-p": Sampling(typical_p=0.5),
    "all filters": Sampling(temperature=1.3, top_k=9, top_p=0.9, min_p=0.02, typical_p=0.95),
}


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    library = load_library()
    assert library is not None
    if not library.is_supported(request.param):
        pytest.skip("this processor has no such instructions")
    library.select(request.param)
    yield request.param
    library.select()


def make_text(seed: int, size: int = 160) -> list[int]:
    """Make a sequence of few different tokens, whose contexts have several continuations; ids are far apart."""
    noise = torch.Generator().manual_seed(seed)
    ids = torch.randperm(VOCAB, generator=noise)[: 3 + seed % 9]
    return ids[torch.randint(len(ids), (size,), generator=noise)].tolist()


def make_one(tokens: Sequence[int], sampling: Sampling, rule: str = "reject", seed: int = 1, **more: object) -> Request:
    sampling = replace(sampling, max_tokens=100)
    one = make_request(0, list(tokens[:-3]), sampling, seed, rule=RULES[rule], **more)
    one.output = list(tokens[-3:])
    one.num_computed = one.num_tokens - 1
    one.status = RequestStatus.RUNNING
    return one


def make_drafter(**options: object) -> SuffixDrafter:
    return suffix.create(suffix.Config(**options), DrafterContext(vocab_size=VOCAB, num_speculative_tokens=DEPTH))


def draft_both(one: Request, budget: int = DEPTH, **options: object) -> tuple[Draft, Draft]:
    """Draft natively and by the reference, and compare the expectations."""
    native, reference = make_drafter(**options), make_drafter(**options)
    reference.chain_sampler = None
    drafts = native.draft(one, budget), reference.draft(one, budget)
    assert native.get_expected_accepted(0) == pytest.approx(reference.get_expected_accepted(0), rel=1e-12)
    return drafts


def assert_equal_drafts(native: Draft, reference: Draft) -> None:
    assert (native.tokens, native.parents) == (reference.tokens, reference.parents)
    assert (native.q is None) == (reference.q is None)
    if native.q is not None and reference.q is not None:
        assert torch.equal(native.q, reference.q)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("rule", ["reject", "block", "match"])
def test_a_chain_is_that_of_the_reference(instruction_set, rule, setting):
    lengths, branches = set(), set()
    for seed in range(24):
        one = make_one(make_text(seed), SETTINGS[setting], rule, seed)
        native, reference = draft_both(one, min_confidence=0.01 * (seed % 3))
        assert_equal_drafts(native, reference)
        lengths.add(len(native.tokens))
        if native.q is not None:
            branches |= {int(row.count_nonzero()) for row in native.q[:-1]}
    assert len(lengths) > 2
    if rule != "match":
        assert max(branches) > (1 if setting in ("top-k", "min-p") else 2), "levels of several tokens occur"


def test_a_chain_ends_at_its_limits():
    text = make_text(4)
    full, _ = draft_both(make_one(text, Sampling(), seed=3), min_confidence=0.0)
    assert len(full.tokens) == DEPTH
    for budget in range(DEPTH):
        cut, reference = draft_both(make_one(text, Sampling(), seed=3), budget, min_confidence=0.0)
        assert_equal_drafts(cut, reference)
        assert cut.tokens == full.tokens[:budget]
    end = full.tokens[2]
    cut, reference = draft_both(make_one(text, Sampling(), seed=3, eos_ids=frozenset([end])), min_confidence=0.0)
    assert_equal_drafts(cut, reference)
    assert cut.tokens == full.tokens[: full.tokens.index(end) + 1]
    assert cut.q is not None
    assert not cut.q[-1].any()


def test_several_sources_are_one_chain(tmp_path):
    (tmp_path / "tokens.jsonl").write_text("\n".join(f"{make_text(seed)}" for seed in range(9)), encoding="utf-8")
    files = str(tmp_path / "tokens.jsonl")
    for seed in range(9):
        one = make_one(make_text(seed, 20), Sampling(), seed=seed)
        native, reference = draft_both(one, files=files, min_confidence=0.01)
        assert_equal_drafts(native, reference)
        assert native.tokens


def test_no_level_is_grown_in_python(monkeypatch):
    """A chain without shaped logits takes one call. A tree, or logits that depend on earlier tokens, takes levels."""
    levels: list[int] = []
    add_level = suffix_drafter.add_level
    monkeypatch.setattr(suffix_drafter, "add_level", lambda *args: (levels.append(1), add_level(*args)))
    text = make_text(4)
    assert make_drafter().draft(make_one(text, Sampling()), DEPTH).tokens
    assert not levels
    assert make_drafter(tree_nodes=6).draft(make_one(text, Sampling()), DEPTH).tokens
    num_levels = len(levels)
    assert num_levels
    assert make_drafter().draft(make_one(text, Sampling(repetition_penalty=1.1)), DEPTH).tokens
    assert len(levels) > num_levels


def test_a_race_that_rounding_decides_is_left_to_the_reference(monkeypatch):
    one = make_one(make_text(4), Sampling())
    expected = make_drafter().draft(one, DEPTH)
    monkeypatch.setattr(draft_plans, "RACE_MARGIN", 1.0)
    levels: list[int] = []
    add_level = suffix_drafter.add_level
    monkeypatch.setattr(suffix_drafter, "add_level", lambda *args: (levels.append(1), add_level(*args)))
    assert_equal_drafts(make_drafter().draft(one, DEPTH), expected)
    assert levels


def test_a_token_outside_of_the_vocabulary_is_not_drafted():
    """Memory behind a row of q is not written, whatever a source holds."""
    drafter = make_drafter(min_confidence=0.0)
    drafter.chain_sampler = create_chain_sampler(6, drafter.discount_table)
    for seed in range(20):
        draft = drafter.draft(make_one([1, 2, 299, 1, 2, 3, 1, 2, 299, 1, 2], Sampling(), seed=seed), DEPTH)
        assert draft.tokens[:1] == (3,)
        assert max(draft.tokens) < 6


def test_the_chain_stops_where_nothing_follows():
    draft, reference = draft_both(make_one([1, 2, 3, 9, 8, 7], Sampling()), min_confidence=0.0)
    assert_equal_drafts(draft, reference)
    assert draft == Draft()
