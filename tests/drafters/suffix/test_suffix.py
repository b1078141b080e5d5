"""Suffix decoding as a drafter: the sources of its drafts, their bounds, and what it keeps of a request.

Guards against drafts that outlive their request, a draft cut by a token sampled after the cut, and text of one tenant
in the drafts of another.
"""

from dataclasses import replace

import pytest
import torch

from foredraft.drafters.method import DrafterContext
from foredraft.drafters.suffix import method as suffix
from foredraft.errors import ForedraftError
from foredraft.llm import MemoryLimits
from foredraft.request import Batch, RequestStatus
from foredraft.request_options import RequestOptions
from foredraft.sampling.params import Sampling
from foredraft.tree import Commit
from foredraft.verification.registry import RULES
from foredraft.verification.rules import BLOCK, REJECT
from tests.support import tiny_models, tiny_seq2seq
from tests.support.requests import make_request

VOCAB = 50
LOOP = [9, 5, 6, 7, 5, 6, 7, 5, 6, 7]
GREEDY = Sampling(temperature=0)
SECRET = [30, 31, 32, 33, 34, 35, 36, 37]


def make_drafter(num_tokens=5, **options):
    return suffix.create(suffix.Config(**options), DrafterContext(vocab_size=VOCAB, num_speculative_tokens=num_tokens))


def request(tokens, slot=0, sampling=GREEDY, max_tokens=100, num_output=3, tenant=b"", seed=1, **more):
    """Make a request that samples the token after `tokens` next; the last three tokens are output."""
    split = len(tokens) - num_output
    sampling, options = replace(sampling, max_tokens=max_tokens), RequestOptions(salt=tenant)
    one = make_request(slot, tokens[:split], sampling, seed, options=options, **more)
    one.output = list(tokens[split:])
    one.num_computed = one.num_tokens - 1
    one.status = RequestStatus.RUNNING
    return one


def batch(*requests, budget=8):
    return Batch(requests, (1,) * len(requests), (budget,) * len(requests))


def draft_tokens(drafter, *requests, budget=8):
    return [row[1:] for row in drafter.propose(batch(*requests, budget=budget)).tokens]


def end_request(drafter, one, state=RequestStatus.FINISHED):
    """End or preempt a request in the engine's order: observe, free the slot, and only then set the status."""
    drafter.observe(batch(one), Commit.from_lists([[0]], [[1]]))
    drafter.forget([one.slot])
    one.status = state


def test_what_followed_the_longest_match_is_drafted():
    text = [1, 2, 3, 4, 10, 11, 12, 13, 14, 9, 3, 4, 20, 21, 22, 9, 1, 2, 3, 4]
    assert draft_tokens(make_drafter(), request(text)) == [[10, 11, 12, 13, 14]]
    assert draft_tokens(make_drafter(8), request(LOOP)) == [[5, 6, 7, 5, 6, 7, 5, 6]]


def test_no_match_is_no_draft_and_short_ones_need_not_be_one():
    assert draft_tokens(make_drafter(), request([1, 2, 3, 4, 5, 6])) == [[]]
    text = [1, 2, 9, 8, 7, 1, 2]
    assert draft_tokens(make_drafter(min_match=3), request(text)) == [[]]
    assert draft_tokens(make_drafter(min_match=2), request(text))[0][:1] == [9]


def test_a_draft_is_as_long_as_the_match_bears():
    text = [1, 2, 9, 8, 7, 6, 5, 4, 3, 1, 2]
    options = {"min_confidence": 0.0, "num_tokens": 8}
    assert len(draft_tokens(make_drafter(tokens_per_match=1.0, free_tokens=0, **options), request(text))[0]) == 2
    assert len(draft_tokens(make_drafter(tokens_per_match=1.5, free_tokens=1, **options), request(text))[0]) == 4
    assert len(draft_tokens(make_drafter(tokens_per_match=1e300, **options), request(text))[0]) == 8


def test_budget_and_room_bound_every_draft():
    for num in range(8):
        one = request(LOOP)
        assert len(draft_tokens(make_drafter(8), one, budget=num)[0]) == num
        assert len(draft_tokens(make_drafter(8), request(LOOP, max_tokens=4 + num))[0]) == num


def test_an_end_of_text_is_the_last_token_of_a_draft():
    assert draft_tokens(make_drafter(8), request(LOOP, eos_ids=frozenset([6]))) == [[5, 6]]


def test_two_likely_continuations_make_a_tree_of_the_likeliest():
    text = [1, 2, 3, 0, 1, 2, 4, 0, 1, 2, 3, 5, 1, 2]
    tree = make_drafter(tree_nodes=6, top_k=2, min_confidence=0.01).propose(batch(request(text)))
    assert [t for t, p in zip(tree.tokens[0], tree.parents[0], strict=True) if p == 0] == [3, 4]
    chain = make_drafter(tree_nodes=6, top_k=2, min_confidence=0.01).propose(batch(request(text, rule=BLOCK)))
    assert chain.is_chain


def test_text_that_came_in_unseen_steps_counts_and_another_request_starts_afresh():
    drafter, one = make_drafter(min_confidence=0.0), request([*LOOP, 40])
    assert draft_tokens(drafter, one) == [[]]
    one.output += [41, 42, 40]  # in steps that had no budget
    one.num_computed = one.num_tokens - 1
    assert draft_tokens(drafter, one) == [[41, 42, 40, 41, 42]]
    other = request([20, 21, 40], slot=0)
    assert draft_tokens(drafter, other) == [[]], "even if the slot was not forgotten"
    drafter.forget([0])
    assert not drafter._states
    assert draft_tokens(drafter, one) == [[41, 42, 40, 41, 42]]


def test_match_and_expectation_say_what_a_draft_is_worth():
    drafter = make_drafter()
    assert (drafter.get_match_length(0), drafter.get_expected_accepted(0)) == (0, 0.0)
    draft_tokens(drafter, request(LOOP), request([1, 2, 3, 4], slot=1))
    assert drafter.get_match_length(0) == 6
    assert 3.5 < drafter.get_expected_accepted(0) < 5
    assert (drafter.get_match_length(1), drafter.get_expected_accepted(1)) == (0, 0.0)


@pytest.mark.parametrize("verify", ["reject", "block"])
def test_a_drawn_draft_brings_the_distribution_it_was_drawn_from(verify):
    text = [1, 2, 3, 0, 1, 2, 4, 9, 1, 2]
    drafter = make_drafter(1, min_confidence=0.0)
    prediction = drafter.automaton_class.predict(
        [drafter._update_state(request(text)).automaton.match_end()], drafter.discount_table
    )
    seen = set()
    for seed in range(40):
        one = request(text, slot=seed, sampling=Sampling(), rule=RULES[verify], seed=seed)
        tree = drafter.propose(batch(one))
        (token,) = tree.tokens[0][1:]
        seen.add(token)
        q = torch.zeros(VOCAB).index_put((torch.tensor(prediction.tokens),), torch.tensor(prediction.probs))
        assert torch.allclose(tree.q[0].float(), q / q.sum(), atol=1e-6)
    assert seen == {3, 4}


def test_the_length_of_a_drawn_draft_does_not_tell_how_likely_its_last_token_was():
    """After "1 2" come 3 or, less often, 4. Neither is rare enough on its path to be left out once it is sampled."""
    text = [1, 2, 3, 0, 1, 2, 3, 9, 1, 2, 4, 8, 7, 1, 2, 3, 5, 1, 2]
    drafter = make_drafter(1, min_confidence=0.15)
    lengths = set()
    for seed in range(60):
        one = request(text, slot=seed, sampling=Sampling(), rule=REJECT, seed=seed)
        (tokens,) = draft_tokens(drafter, one)
        lengths.add((len(tokens), *tokens))
    assert {(1, 3), (1, 4)} <= lengths
    assert all(length == 1 for length, *_ in lengths)


def test_past_outputs_of_the_same_tenant_are_drafted_from_and_no_others():
    drafter = make_drafter(store_tokens=1024)
    end_request(drafter, request([1, *SECRET], num_output=8, tenant=b"a"))
    assert draft_tokens(drafter, request([2, 3, 30, 31, 32], tenant=b"a")) == [[33, 34, 35, 36, 37]]
    stranger = request([2, 3, 30, 31, 32], slot=1, tenant=b"b")
    assert draft_tokens(drafter, stranger) == [[]]
    assert (drafter.get_match_length(1), drafter.get_expected_accepted(1)) == (0, 0.0)


def test_what_other_tenants_wrote_changes_no_draft_at_all():
    texts = [[(7 * i + j) % 11 for i in range(40)] for j in range(6)]
    alone, crowded = make_drafter(store_tokens=4096), make_drafter(store_tokens=4096)
    for j, text in enumerate(texts[:3]):
        end_request(crowded, request(text, slot=j, num_output=30, tenant=b"a"))
        end_request(alone, request(text[::-1], slot=j, num_output=30, tenant=b"b"))
        end_request(crowded, request(text[::-1], slot=j, num_output=30, tenant=b"b"))
    for slot, sampling in enumerate((GREEDY, Sampling(), Sampling(temperature=0, repetition_penalty=1.2))):
        for text in texts:
            seen = []
            for drafter in (alone, crowded):
                one = request(text, slot, sampling, tenant=b"b", rule=REJECT)
                tree = drafter.propose(batch(one))
                q = None if tree.q is None else tree.q.tolist()
                seen.append((tree.tokens, q, drafter.get_match_length(slot), drafter.get_expected_accepted(slot)))
                drafter.forget([slot])
            assert seen[0] == seen[1]


def test_an_output_is_kept_once_and_only_when_its_request_is_over():
    drafter, one = make_drafter(store_tokens=1024), request([1, *SECRET], num_output=8)
    end_request(drafter, one, RequestStatus.PREEMPTED)
    assert draft_tokens(drafter, request([2, 30, 31, 32], slot=1)) == [[]]
    assert drafter.cache.num_tokens == 0
    one.status = RequestStatus.RUNNING
    end_request(drafter, one, RequestStatus.RUNNING)  # preempted, and running again before the next call
    drafter.propose(batch(request([1, 2, 3, 4], slot=1)))
    assert drafter.cache.num_tokens == 0
    end_request(drafter, one)
    drafter.forget([7])
    assert drafter.cache.num_tokens == len(SECRET) + 1
    drafter.forget([0])
    assert drafter.cache.num_tokens == len(SECRET) + 1
    assert not drafter._requests
    assert not drafter._released


def test_prompts_are_never_kept():
    drafter = make_drafter(store_tokens=1024)
    end_request(drafter, request([*SECRET, 1, 2, 3]))
    assert draft_tokens(drafter, request([2, 30, 31, 32], slot=1)) == [[]]


def test_a_longer_match_that_came_into_the_store_meanwhile_is_found():
    drafter, one = make_drafter(store_tokens=1024), request([40, 30, 31, 32])
    end_request(drafter, request([1, 31, 32, 20], slot=1))
    assert draft_tokens(drafter, one)[0][0] == 20
    assert drafter.get_match_length(0) == 2
    end_request(drafter, request([1, *SECRET], slot=2, num_output=8))
    assert draft_tokens(drafter, one)[0][0] == 33
    assert drafter.get_match_length(0) == 3


def test_files_are_drafted_from_by_every_request(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text(f'{{"tokens": {SECRET}}}\n')
    for files in (str(path), (str(path),)):
        drafter = make_drafter(files=files)
        assert draft_tokens(drafter, request([1, 2, 30, 31], tenant=b"a"), request([32, 33, 34], slot=1)) == [
            [32, 33, 34, 35, 36],
            [35, 36, 37],
        ]
        size = len(drafter.file_automaton)
        end_request(drafter, request([1, 2, 30, 31]))
        assert len(drafter.file_automaton) == size


def run_twice(**limits):
    """Run one prompt twice: (tokens accepted in the first and in the second run, the drafter)."""
    context = DrafterContext(vocab_size=tiny_models.VOCAB, num_speculative_tokens=4, dtype=torch.float64)
    drafter = suffix.create(suffix.Config(store_tokens=512), context)
    llm = tiny_models.limit_memory(tiny_models.plain(), drafter, MemoryLimits(**limits))
    sampling = Sampling(max_tokens=40, temperature=0, ignore_eos=True)
    runs = [llm.generate([[33, 34]], sampling)[0] for _ in range(2)]
    assert runs[0].token_ids == runs[1].token_ids
    return [run.stats.num_accepted for run in runs], drafter


def test_a_text_written_again_is_drafted_from_its_first_writing():
    (first, second), drafter = run_twice()
    assert second > first
    assert drafter.cache.num_tenants == 1


def test_past_outputs_are_the_callers_with_or_without_a_prefix_cache():
    (first, second), drafter = run_twice(prefix_cache=False)
    assert second > first
    assert drafter.cache.num_tenants == 1


def test_a_tenant_is_the_caller_whatever_an_encoder_reads():
    """Pages of an encoder-decoder's decoder depend on the source; past outputs do not."""
    asked = [([5, 6], b"a"), ([7, 8], b"a"), ([5, 6], b"b")]
    said = [tiny_seq2seq.plain().prepare(ids, Sampling(), RequestOptions(salt=salt))[0].request for ids, salt in asked]
    assert [one.spec.options.salt for one in said] == [b"a", b"a", b"b"]
    assert len({one.spec.page_salt for one in said}) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"min_confidence": 1.0},
        {"min_confidence": float("nan")},
        {"min_match": 0},
        {"free_tokens": -1},
        {"tokens_per_match": -1.0},
        {"tokens_per_match": float("nan")},
        {"store_tokens": 5},
        {"store_tokens": -1},
        {"store_tenants": 0},
        {"top_k": 0},
        {"tree_nodes": 0},
    ],
)
def test_options_that_make_no_draft_are_refused_by_name(options):
    with pytest.raises(ForedraftError, match=next(iter(options))):
        make_drafter(**options)
