"""Several drafters as one: names and options, one tree of several drafts, and each member as if it were alone.

Guards against a member that takes another's nodes as its own, hidden layers of the target given to the wrong member,
failures of one member that stop the others, draft memory that differs between members, and options that no code reads.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft import LLM, ForedraftError, Sampling
from foredraft.drafters.draft import Draft, to_token_tree
from foredraft.drafters.ensemble.drafter import EnsembleDrafter
from foredraft.drafters.ensemble.fallback import FallbackDrafter
from foredraft.drafters.ensemble.members import EnsembleMember
from foredraft.drafters.ensemble.method import Config, configure, create, parse_name
from foredraft.drafters.ensemble.proposal_records import measure_match
from foredraft.drafters.ensemble.selector import SelectionMode
from foredraft.drafters.ensemble.shared_kv import combine_draft_kv
from foredraft.drafters.ensemble.spec_union import merge_layers
from foredraft.drafters.ensemble.tree_merge import MergedTree, map_path_to_member
from foredraft.drafters.failure_backoff import MAX_FAILURES
from foredraft.drafters.interface import NO_DRAFT, Drafter
from foredraft.drafters.method import DrafterContext
from foredraft.drafters.ngram.drafter import Config as NgramConfig
from foredraft.drafters.ngram.drafter import NgramDrafter
from foredraft.drafters.spec import MissedStates, TokenSteps
from foredraft.engine.sandbox import SandboxedDrafter
from foredraft.engine.tree_validation import find_tree_fault
from foredraft.kv.draft_kv import DraftKV
from foredraft.kv.pool import KVPool
from foredraft.path_features import select_columns
from foredraft.request import Batch, Request
from foredraft.tree import Commit, TokenTree
from foredraft.verification.registry import RULES
from tests.support import tiny_models
from tests.support.engine_fakes import ScriptedDrafter
from tests.support.method_cases import perturb_otherwise
from tests.support.requests import make_request

V = 9
GREEDY = Sampling(max_tokens=24, temperature=0, ignore_eos=True)
TEXT = [1, 2, 3, 4, 5, 1, 2]


def ngram(num_tokens: int = 3) -> NgramDrafter:
    return NgramDrafter(NgramConfig(), num_tokens)


def make_scripted(chain: Sequence[int], q: bool = False, seen: list[Any] | None = None, **more: Any) -> ScriptedDrafter:
    """Make a drafter that proposes the same chain for every request, cut to the budget."""

    def propose(batch: Batch) -> TokenTree:
        drafts = []
        for budget in batch.granted_nodes:
            tokens = list(chain)[:budget]
            drafts.append(Draft.from_chain(tokens, torch.eye(V)[[*tokens, 0]] if q and tokens else None))
        return to_token_tree(batch, dict(enumerate(drafts)))

    drafter = ScriptedDrafter(propose, max_nodes=4, **more)
    if seen is not None:
        drafter.observe = lambda batch, commit: seen.append(commit)  # type: ignore[method-assign]
    return drafter


def make_ensemble(mode: SelectionMode, *drafters: Drafter) -> EnsembleDrafter:
    ticks = itertools.count()
    parts = [
        EnsembleMember(str(i), drafter, SandboxedDrafter(drafter, V, name=str(i))) for i, drafter in enumerate(drafters)
    ]
    return EnsembleDrafter(parts, mode, "made", clock=lambda: float(next(ticks)))


def batch_of(*prompts: list[int], budget: int = 8, sampling: Sampling = GREEDY, verify: str = "match") -> Batch:
    requests = tuple(
        make_request(i, prompt, sampling, seed=i, num_computed=len(prompt) - 1, rule=RULES[verify])
        for i, prompt in enumerate(prompts)
    )
    return Batch(requests, (1,) * len(prompts), (budget,) * len(prompts))


# one tree of several drafts


def test_drafts_of_all_parts_become_one_tree_with_shared_beginnings() -> None:
    tree = make_ensemble("merge", ngram(), make_scripted([3, 4, 7]), make_scripted([3, 6])).propose(
        batch_of(TEXT, budget=9)
    )
    assert tree.tokens == [[2, 3, 4, 7, 6, 5]]
    assert tree.parents == [[-1, 0, 1, 2, 1, 2]]
    assert tree.q is None


def test_what_was_drawn_stands_first_and_says_so() -> None:
    sampling = replace(GREEDY, temperature=1.0)
    batch = batch_of(TEXT, [7], sampling=sampling, verify="reject")
    tree = make_ensemble("merge", ngram(), make_scripted([3, 6], q=True)).propose(batch)
    assert tree.tokens == [[2, 3, 6, 4, 5], [7, 3, 6]]
    assert tree.parents == [[-1, 0, 1, 1, 3], [-1, 0, 1]]
    assert tree.num_sampled_children == (1, 1, 0, 0, 0, 1, 1, 0)
    assert tree.q is not None
    assert tree.q.shape == (8, V)
    assert [bool(row.any()) for row in tree.q] == [True, True, True, False, False, True, True, True]
    assert find_tree_fault(batch, tree, V) is None


def test_all_that_drew_are_merged_each_with_its_q() -> None:
    sampling = replace(GREEDY, temperature=1.0)
    batch = batch_of([7], TEXT, sampling=sampling, verify="reject")
    first, second = make_scripted([3, 6], q=True), make_scripted([3, 5], q=True)
    tree = make_ensemble("merge", first, second, make_scripted([4]), ngram()).propose(batch)
    assert tree.tokens == [[7, 3, 6, 5, 4], [2, 3, 6, 5, 4, 4, 5]]
    assert tree.parents == [[-1, 0, 1, 1, 0], [-1, 0, 1, 1, 0, 1, 5]]
    assert tree.num_sampled_children == (1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0)
    assert tree.further_samples is not None
    samples = {
        place: [(one.children, int(one.q.argmax())) for one in found] for place, found in tree.further_samples.items()
    }
    assert samples == {(b, node): [(children, x)] for b in (0, 1) for node, children, x in ((0, (1,), 3), (1, (3,), 5))}
    assert find_tree_fault(batch, tree, V) is None


@pytest.mark.parametrize(
    ("verify", "budget", "shares"),
    [
        ("reject", 8, [3, 3, 2]),
        ("reject", 11, [4, 4, 3]),
        ("reject", 2, [1, 1]),
        ("match", 8, [3, 3, 3]),  # deterministic: what does not fit is left out
        ("block", 8, [4]),  # a chain, of one member
    ],
)
def test_samples_share_the_budget_so_that_none_is_left_out(verify: str, budget: int, shares: list[int]) -> None:
    seen: list[tuple[int, int]] = []

    def make(chain: list[int]) -> ScriptedDrafter:
        drafter = make_scripted(chain, q=verify != "match")
        scripted = drafter.propose

        def propose(batch: Batch) -> TokenTree:
            seen.append((batch.granted_nodes[0], batch.draft_stream))
            return scripted(batch)

        drafter.propose = propose  # type: ignore[method-assign]
        return drafter

    batch = batch_of([7], sampling=replace(GREEDY, temperature=1.0), verify=verify, budget=budget)
    drafters = [make([x, x + 1, x + 2, x + 3]) for x in (1, 3, 5)]
    tree = make_ensemble("merge", *drafters).propose(batch)
    assert seen == [(share, rank) for rank, share in enumerate(shares)], "each in a stream of its own"
    assert tree.sizes[0] - 1 == min(budget, sum(shares))


class CountingNgram(NgramDrafter):
    """Prompt lookup as a member whose drafts of sampled requests take time; it counts them."""

    def __init__(self) -> None:
        super().__init__(NgramConfig(), 3)
        self.spec = replace(self.spec, samples_drafts=True)
        self.num_drafts = 0

    def draft(self, request: Request, budget: int) -> Draft:
        self.num_drafts += 1
        return super().draft(request, budget)


@pytest.mark.parametrize(("mode", "temperature", "is_made"), [("auto", 1.0, False), ("auto", 0.0, True),
                                                              ("merge", 1.0, True)])  # fmt: skip
def test_a_draft_that_takes_time_is_made_only_if_it_is_selected(
    mode: SelectionMode, temperature: float, is_made: bool
) -> None:
    member = CountingNgram()
    ensemble = make_ensemble(mode, member, make_scripted([3, 4, 7]))
    batch = batch_of(TEXT, sampling=replace(GREEDY, temperature=temperature))
    ensemble.selector.select_kind(is_sampled=temperature > 0)
    ensemble.selector.costs.sampling_stats[0].num_uses = 9  # it is not due, and the other one is
    tree = ensemble.propose(batch)
    assert tree.tokens[0][1:4] == [3, 4, 7] or mode == "merge"
    assert bool(member.num_drafts) is is_made


def test_a_selected_draft_is_made_with_its_size_and_its_time_is_recorded() -> None:
    member = CountingNgram()
    ensemble = make_ensemble("auto", member)
    batch = batch_of(TEXT, sampling=replace(GREEDY, temperature=1.0))
    assert ensemble.propose(batch).tokens == [[2, 3, 4, 5]]
    stats = ensemble.selector.costs.sampling_stats[0]
    assert member.num_drafts == 1
    assert stats.cost.is_fitted
    assert list(stats.depth_by_nodes.values()) == [3.0]
    ensemble.observe(batch, Commit(([3],), ([0],), None))
    assert stats.num_uses == 1


def test_greedy_and_sampled_steps_have_costs_of_their_own() -> None:
    ensemble = make_ensemble("auto", ngram(), make_scripted([3, 4, 7]))
    ensemble.propose(batch_of(TEXT))
    greedy = ensemble.selector.costs
    ensemble.propose(batch_of(TEXT, sampling=replace(GREEDY, temperature=1.0)))
    assert ensemble.selector.costs is not greedy
    ensemble.propose(batch_of(TEXT))
    assert ensemble.selector.costs is greedy


def test_the_time_of_an_extension_is_recorded() -> None:
    ensemble = make_ensemble("sequence", ngram(), make_scripted([3]))
    tree = ensemble.propose(batch_of(TEXT))
    assert tree.tokens[0][:3] == [2, 3, 4]  # the second token is the other member's
    assert ensemble.selector.costs.extension_cost.predict(2) == 1.0  # one tick of the clock


def test_no_match_is_no_candidate() -> None:
    member = CountingNgram()
    member.match_strength = lambda request: NO_DRAFT  # type: ignore[method-assign]
    ensemble = make_ensemble("auto", member)
    assert ensemble.propose(batch_of(TEXT, sampling=replace(GREEDY, temperature=1.0))).tokens == [[2]]
    assert member.num_drafts == 0


def test_a_budget_is_kept_and_block_verification_gets_chains() -> None:
    both = make_ensemble("merge", ngram(), make_scripted([6, 7, 8, 6]))
    assert [both.propose(batch_of(TEXT, budget=budget)).sizes[0] - 1 for budget in (1, 2, 3, 5)] == [1, 2, 3, 5]
    tree = both.propose(batch_of(TEXT, verify="block"))
    assert tree.is_chain


def test_text_goes_on_below_the_end_of_a_draft() -> None:
    tree = make_ensemble("sequence", ngram(), make_scripted([1, 2])).propose(batch_of([1, 2, 3, 4, 9 - 1], budget=6))
    assert tree.tokens == [[8, 1, 2, 3, 4, 8]]
    assert tree.is_chain


def test_nothing_follows_an_end_of_text() -> None:
    sampling = replace(GREEDY, stop_token_ids=(2,))
    tree = make_ensemble("sequence", ngram(), make_scripted([1, 2])).propose(
        batch_of([1, 2, 3, 4, 8], sampling=sampling)
    )
    assert tree.tokens == [[8, 1, 2]]


def test_prompt_lookup_below_a_path_is_prompt_lookup_of_the_longer_text() -> None:
    drafter = ngram(5)
    [request] = batch_of([1, 2, 3, 4, 5, 6, 1]).requests
    longer = make_request(1, [*request.spec.prompt, 2, 3], GREEDY, num_computed=request.num_computed)
    assert drafter.continue_draft(request, [2, 3], 5).tokens[:3] == drafter.draft(longer, 5).tokens[:3] == (4, 5, 6)
    assert drafter.continue_draft(request, [7], 5) == Draft()


# each part as if it were alone


def test_a_part_sees_its_own_nodes_and_boundaries() -> None:
    seen: list[list[Commit]] = [[], []]
    first, second = (
        make_scripted([3, 4], seen=seen[0], hidden_layers=(2, 5)),
        make_scripted([6, 7], seen=seen[1], hidden_layers=(5,)),
    )
    both, batch = make_ensemble("merge", first, second), batch_of([7], budget=8)
    assert both.spec.hidden_layers == (2, 5)
    tree = both.propose(batch)
    assert tree.tokens == [[7, 3, 4, 6, 7]]
    features = torch.arange(12.0).view(1, 3, 4)
    both.observe(batch, Commit.from_lists([[0, 3, 4]], [[6, 7, 1]], features=features))
    [one], [other] = seen
    assert one.tokens == other.tokens == [[6, 7, 1]]
    assert other.paths == [[0, 1, 2]]
    assert one.paths[0][0] == 0
    assert min(one.paths[0][1:]) > 2, "another's nodes were taken for its own"
    assert torch.equal(one.features, features)
    assert other.features is not None
    assert torch.equal(other.features, features[..., 2:])


def test_boundaries_are_asked_for_once_and_given_to_whom_they_belong() -> None:
    assert merge_layers([(3,), (1, 3, 9), ()]) == (1, 3, 9)
    features = torch.arange(12.0).view(1, 2, 6)
    assert select_columns(features, [1, 2], 3).data_ptr() == features[..., 2:].data_ptr()
    assert torch.equal(select_columns(features, [2, 0], 3), torch.cat([features[..., 4:], features[..., :2]], -1))


@pytest.mark.parametrize(
    ("kinds", "mode", "expected"),
    [
        (("pause", "pause"), "auto", "pause"),
        (("pause", "end"), "auto", "end"),
        (("end", "forbidden"), "sequence", "forbidden"),
        (("end", "end"), "merge", "forbidden"),  # a plan would not draft with the token members either
    ],
)
def test_what_missed_states_do_is_the_strictest_of_the_members(
    kinds: Sequence[MissedStates], mode: SelectionMode, expected: str
) -> None:
    heads = [make_scripted([3], hidden_layers=(1,), missed_states=kind) for kind in kinds]
    assert make_ensemble(mode, ngram(), *heads).spec.missed_states == expected
    assert make_ensemble(mode, ngram(), make_scripted([3])).spec.missed_states == "forbidden"


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (("drafted", "drafted"), "drafted"),
        (("active", "drafted"), "active"),
        (("drafted", "all"), "all"),
        ((None, "drafted"), "drafted"),  # the first reads no tokens
        (("active", None), "active"),
    ],
)
def test_tokens_are_read_after_all_steps_whose_tokens_a_member_reads(
    steps: tuple[TokenSteps | None, TokenSteps | None], expected: str
) -> None:
    parts = [
        make_scripted([3]) if kind is None else make_scripted([3], needs_target_argmax=True, token_steps=kind)
        for kind in steps
    ]
    assert make_ensemble("auto", ngram(), *parts).spec.token_steps == expected
    assert FallbackDrafter(*(SandboxedDrafter(part, V) for part in parts)).spec.token_steps == expected


def test_a_head_that_misses_states_of_a_request_is_not_called_for_it() -> None:
    head = make_scripted([3, 4, 7], hidden_layers=(1,), missed_states="pause")
    ensemble = make_ensemble("sequence", ngram(), head)
    batch = batch_of(TEXT, TEXT)
    batch.requests[0].lacks_states = True
    tree = ensemble.propose(batch)
    assert tree.tokens == [[2, 3, 4, 5], [2, 3, 4, 7]]  # the other member's draft, and the head's
    batch.requests[1].lacks_states = True
    assert ensemble.propose(batch).tokens == [[2, 3, 4, 5], [2, 3, 4, 5]]
    assert head.num_proposed == 1
    ensemble.observe(batch, Commit(([3], [3]), ([0], [0]), None))
    assert ensemble.selector.costs.model_stats[0].num_uses == 0  # it is tried when it is ready


def test_a_path_in_anothers_numbers() -> None:
    """Nodes 0..2 are a prompt's; the drafter's own nodes 1 and 2 stand at 1 and 4 of what was verified."""
    assert map_path_to_member([0, 1, 2, 3, 6, 7], 2, [0, 1, 4]) == [0, 1, 2, 3, 4, 2 + 3 + 7]


def test_one_that_fails_fails_alone() -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("broken")

    text = ngram()
    text.draft_tokens = text.continue_tokens = broken  # type: ignore[method-assign]
    both = make_ensemble("merge", text, make_scripted([3, 4]), ScriptedDrafter(broken, max_nodes=4))
    sizes = [both.propose(batch_of(TEXT)).sizes[0] for _ in range(MAX_FAILURES + 6)]
    assert max(sizes) == 3
    assert sizes[-1] == 3
    failures = {one.name: one.failures["raised"] for one in both.spec.member_backoffs if one.failures}
    assert failures == {"0": MAX_FAILURES, "2": MAX_FAILURES}, "each has a count of its own, by name"


def test_a_part_that_changes_a_request_is_found_and_comes_back_after_its_rest() -> None:
    """The part that reads text alone has no guard before it when it drafts."""
    now = 0.0
    text, good = ngram(), ngram()

    def spoil(learnt: Any, request: Request, *_: Any) -> Draft:
        request.output.append(1)
        return Draft()

    text.draft_tokens = spoil  # type: ignore[method-assign]
    parts = [
        EnsembleMember(name, one, SandboxedDrafter(one, V), clock=lambda: now)
        for name, one in (("bad", text), ("good", good))
    ]
    both = EnsembleDrafter(parts, "merge", "made", clock=lambda: now)
    batch = batch_of(TEXT)
    for _ in range(2 * MAX_FAILURES):
        assert both.propose(batch).sizes == [4]
        assert not batch.requests[0].output
    assert {one.name: dict(one.failures) for one in both.spec.member_backoffs if one.failures} == {
        "bad": {"mutated": MAX_FAILURES}
    }
    assert both.members[0].max_nodes == 0
    both.observe(batch, Commit.from_lists([[0]], [[3]]))
    assert both.spec.max_nodes == 3
    now += 1000.0
    both.observe(batch, Commit.from_lists([[0]], [[3]]))
    assert both.members[0].max_nodes == 3
    assert both.spec.max_nodes == 6


def test_memories_as_one() -> None:
    """A hit ends with the memory that cannot be recomputed; members that can recompute theirs do not shorten it."""
    draft, head = DraftKV(KVPool(), 4), DraftKV(KVPool(), 6, 1, is_rebuildable_from_tokens=False)
    both = combine_draft_kv([draft, head])
    assert both is not None
    assert (both.bytes_per_token, both.token_lookahead, both.is_rebuildable_from_tokens) == (10, 1, False)
    draft.num_valid[0], head.num_valid[0] = 3, 16
    assert both.num_valid.get(0, 0) == 16
    both.num_valid[1] = 8
    assert (draft.num_valid, head.num_valid) == ({0: 3}, {0: 16, 1: 8})
    both.pool.capacity = 64
    assert draft.pool.capacity == head.pool.capacity == 64
    two = combine_draft_kv([draft, DraftKV(KVPool(), 1, num_valid={0: 9})])
    assert two is not None
    assert two.num_valid.get(0, 0) == 3
    assert two.num_valid.get(7, 0) == 0
    assert combine_draft_kv([head]) is head
    assert combine_draft_kv([]) is None


# what became of a draft


@pytest.mark.parametrize(
    ("tokens", "parents", "text", "expected"),
    [
        ([1, 2, 3], [0, 1, 2], [1, 2, 9], (2, 3)),
        ([1, 2, 3], [0, 1, 2], [1, 2, 3, 4], (3, 3)),
        ([1, 2, 3], [0, 1, 2], [1, 2], (2, 2)),
        ([1, 2, 3], [0, 1, 2], [5], (0, 1)),
        ([1, 4, 2, 5], [0, 0, 1, 2], [4, 5, 6], (2, 2)),
        ([1, 4, 2, 5], [0, 0, 1, 2], [4, 6], (1, 2)),
        ([], [], [4, 6], (0, 0)),
    ],
)
def test_the_fate_of_a_draft(tokens: list[int], parents: list[int], text: list[int], expected: tuple[int, int]) -> None:
    assert measure_match(tokens, parents, text) == expected


def test_a_graft_keeps_what_is_there() -> None:
    joint = MergedTree([9, 1, 2], [-1, 0, 1])
    assert joint.graft(Draft((1, 3, 4), (0, 1, 2)), 3) == [0, 1, 3, -1]
    assert (joint.tokens, joint.parents) == ([9, 1, 2, 3], [-1, 0, 1, 1])
    assert joint.find_tip() == (2, [1, 2])


# names and options


def context(**more: Any) -> DrafterContext:
    return DrafterContext(vocab_size=tiny_models.VOCAB, num_speculative_tokens=4, dtype=torch.float64, **more)


def test_names_mean_methods() -> None:
    assert parse_name("auto") == {}
    assert parse_name("ngram+eagle3") == {"parts": ["ngram", "eagle3"]}
    assert parse_name("ngram") is None


def test_options_go_to_the_part_they_are_for() -> None:
    given = configure({"parts": ["ngram", "ngram_lm"], "ngram": {"branches": 2}, "ngram_lm.order": 3, "discount": 0.5})
    made = create(given, context())
    first, second = (part.drafter for part in made.members)
    assert first.config.branches == 2  # type: ignore[attr-defined]
    assert (second.config.order, second.config.discount) == (3, 0.5)  # type: ignore[attr-defined]
    assert made.spec.title == "ngram+ngram_lm"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parts": ["ngram", "telepathy"]}, "unknown method 'telepathy' in ngram.telepathy; use some of: .*medusa"),
        ({"parts": ["ngram", "compose"]}, "unknown method 'compose'"),
        ({"parts": ["ngram", "ngram"]}, "two or more different methods"),
        ({"parts": ["ngram", "ngram_lm"], "mode": "both"}, "unknown mode 'both'.* auto, merge, sequence"),
        ({"parts": ["ngram", "ngram_lm"], "colour": 1}, "unknown drafter option 'colour'; ngram.ngram_lm takes mode"),
        (
            {"parts": ["ngram", "ngram_lm"], "medusa": {"tree": []}},
            "options for 'medusa', which is no member of the ensemble",
        ),
        ({"parts": ["ngram", "ngram_lm"], "ngram": {"order": 1}}, "ngram: unknown drafter option 'order'"),
        (
            {"parts": ["eagle", "eagle3"], "tree_nodes": 3},
            "several members have the option tree_nodes; give eagle.tree_nodes or eagle3",
        ),
        ({"parts": ["ngram", "suffix"], "ngram.model": "x"}, "ngram drafts from the tokens alone"),
        ({"parts": ["ngram", "eagle"]}, "eagle: the method eagle needs a head"),
        ({"mode": 3}, "the option mode takes a string"),
    ],
)
def test_an_option_that_is_never_read_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create(configure(options), context())


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["ngram", "suffix"], "fits no member of ngram.suffix; leave it out"),
        (["eagle.model", "x"], "unknown method"),
    ],
)
def test_a_model_for_no_part_is_refused(names: list[str], message: str) -> None:
    with pytest.raises(ForedraftError, match=message):
        create(Config(tuple(names)), context(model="somewhere"))


def test_members_of_one_method_are_numbered_and_have_their_own_options() -> None:
    given = configure({"parts": ["ngram_lm", "ngram", "ngram_lm"], "ngram_lm_2": {"order": 3}, "ngram_lm.order": 4})
    made = create(given, context())
    assert [member.name for member in made.members] == ["ngram_lm", "ngram", "ngram_lm_2"]
    assert [member.drafter.config.order for member in made.members if member.name != "ngram"] == [4, 3]  # type: ignore[attr-defined]
    shared = create(configure({"parts": ["ngram_lm", "ngram_lm"], "ngram_lm_2.order": 3, "discount": 0.5}), context())
    assert [member.drafter.config.discount for member in shared.members] == [0.5, 0.5]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parts": ["draft_model"] * 2}, "draft_model and draft_model_2 are equal, give draft_model_2.model"),
        ({"parts": ["ngram"] * 3, "ngram_2.branches": 2}, "ngram and ngram_3 are equal, give ngram_3.OPTION"),
        ({"parts": ["ngram", "ngram"], "ngram_3.branches": 2}, "ngram and ngram_2 are equal"),
        (
            {"parts": ["ngram", "ngram"], "ngram_2.branches": 2, "ngram_3.branches": 2},
            "options for 'ngram_3', which is no member of the ensemble: ngram, ngram_2",
        ),
        ({"parts": ["ngram", "ngram"], "ngram_2.branches": 0}, "ngram_2: "),
        ({"parts": ["draft_model"] * 2, "draft_model_2.model": "nowhere"}, "draft_model: .*needs a draft"),
    ],
)
def test_members_of_one_method_that_cannot_be_made_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create(configure(options), context())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Folders of two draft models."""
    folders = [str(tmp_path_factory.mktemp(name)) for name in ("first", "second")]
    for folder, model in zip(folders, (tiny_models.draft(), perturb_otherwise()), strict=True):
        model.save_pretrained(folder)
    return folders


@pytest.mark.parametrize("sampling", [GREEDY, replace(GREEDY, temperature=1.0, seed=5)])
@pytest.mark.parametrize("form", ["list", "list without method", "list for parts", "members", "nested"])
def test_two_draft_models_write_the_same_text(form: str, sampling: Sampling, models: list[str]) -> None:
    one, other = models
    spec: dict[str, Any] = {
        "list": {"method": "draft_model", "model": [one, other]},
        "list without method": {"model": [one, other]},
        "list for parts": {"method": "ngram+draft_model+draft_model", "model": [one, other]},
        "members": {"method": "draft_model+draft_model", "draft_model.model": one, "draft_model_2.model": other},
        "nested": {
            "method": "draft_model+draft_model",
            "draft_model": {"model": one},
            "draft_model_2": {"model": other, "branching": [2, 1]},
        },
    }[form]
    plain: LLM = tiny_models.plain()
    llm = plain.with_drafter({**spec, "mode": "merge", "num_speculative_tokens": 3}, verify="match")
    assert "draft_model+draft_model_2" in llm.drafter_name
    prompts = [[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6], [33], [44, 45]]
    done = llm.generate(prompts, sampling)
    assert [c.token_ids for c in done] == [c.token_ids for c in plain.generate(prompts, sampling)]
    assert llm.engine.drafter.num_failures == 0
    assert sum(c.stats.num_accepted for c in done) > 0
    found = llm.engine.drafter.spec.draft_kv
    assert found is not None
    if sampling.is_greedy:
        return
    rejecting = plain.with_drafter({**spec, "mode": "merge", "num_speculative_tokens": 3}, verify="reject")
    unseeded = rejecting.generate(prompts, replace(sampling, seed=None))
    assert sum(c.stats.num_accepted for c in unseeded) > 0
    assert rejecting.engine.drafter.num_failures == 0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"method": "draft_model", "model": []}, "the list of draft models is empty"),
        ({"method": "ngram", "model": ["a", "b"]}, "2 draft models are given, and 0 of ngram.ngram_2 take one"),
        (
            {"method": "ngram+draft_model", "model": ["a", "b"]},
            "2 draft models are given, and 1 of ngram.draft_model take one",
        ),
        ({"method": "draft_model", "model": ["a", 3]}, "a list of draft models takes folders or hub ids, got int"),
    ],
)
def test_a_list_of_models_that_does_not_fit_is_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ForedraftError, match=message):
        tiny_models.plain().with_drafter(spec)


def test_auto_takes_the_best_that_there_are_and_says_so() -> None:
    llm = tiny_models.plain().with_drafter("auto")
    assert llm.drafter_name.startswith("auto: ")
    assert "suffix" in llm.drafter_name
    assert llm.is_adaptive


@pytest.mark.parametrize("spec", ["ngram+suffix", {"method": "ngram+suffix", "num_speculative_tokens": 3}])
def test_a_composition_by_name_writes_the_same_text(spec: Any) -> None:
    plain: LLM = tiny_models.plain()
    llm = plain.with_drafter(spec)
    prompts = [[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6], [33]]
    ids: Callable[[LLM], list[list[int]]] = lambda one: [c.token_ids for c in one.generate(prompts, GREEDY)]  # noqa: E731
    assert ids(llm) == ids(plain)
    assert llm.drafter_name == "ngram+suffix"
    assert llm.engine.drafter.num_failures == 0


def test_each_draft_model_for_the_built_in_target_is_another_one() -> None:
    llm = LLM(None, {"method": "draft_model+draft_model", "num_speculative_tokens": 2, "mode": "merge"})
    names = [member.drafter.lm.name for member in llm.drafter.members]  # type: ignore[attr-defined,union-attr]
    assert [Path(name).name for name in names] == ["draft", "draft_2"]
    with pytest.raises(ForedraftError, match=r"draft_model and draft_model_3 are equal, give draft_model_3\.model"):
        llm.with_drafter("draft_model+draft_model+draft_model")
