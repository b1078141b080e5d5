"""The n-gram drafter: its tokens depend on the distribution it reports, the noise of the target, and this request."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from foredraft.drafters.draft import draft_noise_key
from foredraft.drafters.method import DrafterContext
from foredraft.drafters.ngram_lm import kneser_ney
from foredraft.drafters.ngram_lm import method as ngram_lm
from foredraft.drafters.ngram_lm.counts import SequenceCounts
from foredraft.drafters.ngram_lm.table import NgramModel
from foredraft.errors import ForedraftError
from foredraft.request import Batch
from foredraft.sampling import rng
from foredraft.sampling.distribution import distribution
from foredraft.sampling.params import Sampling
from foredraft.verification.registry import RULES
from foredraft.verification.rules import MATCH, REJECT
from tests.support.requests import make_request
from tests.support.statistical_checks import chi_square

VOCAB = 12
SHAPED = Sampling(
    temperature=0.7, top_k=8, top_p=0.95, repetition_penalty=1.3, frequency_penalty=0.3, logit_bias={3: 1.0}
)
SETTINGS = {
    "T 1": Sampling(),
    "T 0.5": Sampling(temperature=0.5),
    "shaped": SHAPED,
    "bad words": Sampling(bad_words=((3,),)),
}


def text(size, seed=0):
    rng = np.random.default_rng(seed)
    return [int(i) for i in rng.zipf(1.4, size) % VOCAB]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("table")
    kneser_ney.train(text(3000), 4, VOCAB).save(path)
    return str(path)


def make_drafter(folder=None, num_tokens=4, min_confidence=0.0, **options):
    config = ngram_lm.Config(min_confidence=min_confidence, **options)
    return ngram_lm.create(config, DrafterContext(vocab_size=VOCAB, num_speculative_tokens=num_tokens, model=folder))


def request(tokens, slot=0, sampling=None, **more):
    sampling = replace(sampling or Sampling(temperature=0), max_tokens=more.pop("max_tokens", 1000))
    made = make_request(slot, tokens[:-3], sampling, seed=more.pop("seed", 5), **more)
    made.output = list(tokens[-3:])
    made.num_computed = made.num_tokens - 1
    return made


def batch(*requests, budget=4):
    return Batch(requests, (1,) * len(requests), (budget,) * len(requests))


def draft_tokens(drafter, *requests, budget=4):
    tree = drafter.propose(batch(*requests, budget=budget))
    assert tree.is_chain
    return [row[1:] for row in tree.tokens]


def compute_draft_probs(drafter, one, drafted):
    """Compute [V] float64, the distribution of the next draft token, from the request alone."""
    counts = SequenceCounts(VOCAB, drafter.config.order, drafter.config.discount, drafter.config.base_weight)
    counts.extend(one.tokens)
    q = drafter.model.compute_q([*one.tokens, *drafted], counts)
    return distribution(torch.from_numpy(np.log(q))[None], one.spec.sampling, [one.build_history(drafted)])[0]


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(temperature=0, repetition_penalty=2.0)])
def test_greedy_drafts_the_likeliest_token_after_each_prefix(folder, sampling):
    drafter = make_drafter(folder)
    for slot in range(20):
        one = request(text(30, slot), slot, sampling)
        (tokens,) = draft_tokens(drafter, one)
        assert len(tokens) == 4
        for depth, token in enumerate(tokens):
            assert token == int(compute_draft_probs(drafter, one, tokens[:depth]).argmax())


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("verify", ["match", "reject"])
def test_a_drawn_token_is_the_winner_of_the_race_with_the_key_of_its_place(folder, name, verify):
    drafter = make_drafter(folder)
    for slot in range(30):
        one = request(text(30, slot), slot, SETTINGS[name], rule=RULES[verify], seed=slot, bad_words=((3,),))
        (tokens,) = draft_tokens(drafter, one)
        assert len(tokens) == 4
        for depth, token in enumerate(tokens):
            q = compute_draft_probs(drafter, one, tokens[:depth])
            key = torch.tensor([draft_noise_key(one, depth, depth, 0)])
            assert token == int(rng.exponential_race(q[None], key).argmax())
            if name == "bad words":
                assert token != 3


def test_under_match_a_target_with_the_same_distribution_accepts_everything(folder):
    drafter = make_drafter(folder)
    for slot in range(20):
        one = request(text(40, slot), slot, Sampling(), seed=slot)
        (tokens,) = draft_tokens(drafter, one)
        for depth, token in enumerate(tokens):
            key = rng.derive_key(one.spec.seed, one.spec.sample_index, rng.NoiseStream.TOKEN, one.num_tokens + depth)
            q = compute_draft_probs(drafter, one, tokens[:depth])
            assert token == int(rng.exponential_race(q[None], torch.tensor([key])).argmax())


@pytest.mark.parametrize("name", SETTINGS)
def test_drawn_tokens_follow_the_reported_q(folder, name):
    drafter, size = make_drafter(folder, num_tokens=2), 3000
    first, second = np.zeros(VOCAB), np.zeros(VOCAB)
    tokens = text(30)
    q_first, q_second, mode = None, None, None
    for start in range(0, size, 100):
        requests = [
            request(tokens, slot, SETTINGS[name], rule=REJECT, seed=start + slot, bad_words=((3,),))
            for slot in range(100)
        ]
        tree = drafter.propose(batch(*requests, budget=2))
        drafter.forget(range(100))
        assert tree.q.shape == (300, VOCAB)
        for b, row in enumerate(tree.tokens):
            q = tree.q[tree.get_row(b, 0)]
            q_first = q if q_first is None else q_first
            assert torch.equal(q, q_first)
            mode = int(q.argmax())
            first[row[1]] += 1
            if row[1] == mode:  # the second sampled token, if the first is the commonest
                q_second = tree.q[tree.get_row(b, 1)]
                second[row[2]] += 1
    assert chi_square(first, q_first.numpy()) > 1e-6
    assert chi_square(second, q_second.numpy()) > 1e-6


def test_q_is_attached_for_rules_that_weigh_it_and_for_no_other(folder):
    requests = [
        request(text(30, 1), 0, Sampling(), rule=MATCH),
        request(text(30, 2), 1, Sampling(), rule=REJECT),
        request(text(30, 3), 2, Sampling(temperature=0), rule=REJECT),
    ]
    tree = make_drafter(folder).propose(batch(*requests))
    assert tree.q.shape == (15, VOCAB)
    assert not tree.q[:5].any()
    assert torch.allclose(tree.q[5:9].sum(-1), torch.ones(4))
    assert not tree.q[9:].any()
    assert make_drafter(folder).propose(batch(requests[0])).q is None


def test_requests_of_a_batch_are_drafted_for_as_if_alone(folder):
    requests = [request(text(30, i), i, list(SETTINGS.values())[i % 3], seed=i) for i in range(5)]
    requests.append(request(text(30, 9), 9))
    together = draft_tokens(make_drafter(folder), *requests)
    assert together == [draft_tokens(make_drafter(folder), one)[0] for one in requests]


@pytest.mark.parametrize("with_table", [False, True])
def test_learning_step_by_step_equals_learning_from_scratch(folder, with_table):
    folder = folder if with_table else None
    drafter = make_drafter(folder)
    one, rest = request(text(30)), text(150, 3)
    for step in range(40):
        if step % 4 != 1:  # it may be left out of a step
            assert draft_tokens(drafter, one) == draft_tokens(make_drafter(folder), one)
        one.output += rest[3 * step : 3 * step + 1 + step % 3]
        one.num_computed = one.num_tokens - 1


def test_a_reused_slot_knows_nothing_of_the_former_request(folder):
    drafter = make_drafter(folder)
    draft_tokens(drafter, request([7, 8, 9, 7, 8, 9] * 20))
    drafter.forget([0, 3])
    assert not drafter._states
    fresh = [request([*text(20, seed)[:17], 7, 8, 9], 0) for seed in range(10)]
    for one in fresh:
        assert draft_tokens(drafter, one) == draft_tokens(make_drafter(folder), one)
        drafter.forget([0])


def test_it_learns_from_the_running_text(folder):
    for drafter in (make_drafter(), make_drafter(folder)):
        (tokens,) = draft_tokens(drafter, request([1, 2, 3, 10, 11, 5, 9] * 4 + [1, 2, 3]))
        assert tokens == [10, 11, 5, 9]


def test_a_chain_ends_before_the_confidence_falls_under_the_threshold(folder):
    for name, sampling in {**SETTINGS, "greedy": Sampling(temperature=0)}.items():
        for slot in range(20):
            one = request(text(30, slot), slot, sampling, seed=slot, bad_words=((3,),))
            (whole,), (cut,) = (
                draft_tokens(make_drafter(folder), one),
                draft_tokens(make_drafter(folder, min_confidence=0.15), one),
            )
            product, expected = 1.0, 0
            for depth in range(4):
                plain = replace(one.spec.sampling, temperature=1.0) if sampling.is_greedy else one.spec.sampling
                shown = request(one.tokens, slot, plain, seed=slot, bad_words=((3,),))
                product *= float(compute_draft_probs(make_drafter(folder), shown, whole[:depth]).max())
                if product < 0.15:
                    break
                expected += 1
            assert cut == whole[:expected], name


def test_the_length_of_a_draft_depends_on_nothing_at_or_after_the_cut(folder):
    """Under `reject`, a cut that depended on the token sampled there would change the distribution."""
    lengths = {}
    for seed in range(300):
        one = request(text(30), 0, Sampling(), rule=REJECT, seed=seed)
        (tokens,) = draft_tokens(make_drafter(folder, min_confidence=0.2), one)
        for depth in range(len(tokens) + 1):
            lengths.setdefault(tuple(tokens[:depth]), set()).add(len(tokens) > depth)
    assert all(len(goes_on) == 1 for goes_on in lengths.values())


@pytest.mark.parametrize("budget", [0, 1, 3, 4, 9])
def test_budget_and_room_are_kept(folder, budget):
    drafter = make_drafter(folder)
    for slot in range(20):
        one = request(text(30, slot), slot, Sampling(), max_tokens=4 + slot % 6)
        (tokens,) = draft_tokens(drafter, one, budget=budget)
        assert len(tokens) == min(budget, one.max_draft_depth, drafter.spec.max_nodes)


def test_nothing_is_drafted_after_the_end_of_the_text(folder):
    text = [1, 2, 3, 0, 11, 5] * 5 + [1, 2, 3]
    assert draft_tokens(make_drafter(folder), request(text, eos_ids=frozenset({0}))) == [[0]]
    assert draft_tokens(make_drafter(folder), request(text)) == [[0, 11, 5, 1]]


def test_a_distribution_that_leaves_nothing_to_draw_is_no_draft(folder):
    nothing = Sampling(allowed_token_ids=(3,), logit_bias={3: -float(np.finfo(np.float32).max)}, bad_words=((3,),))
    assert draft_tokens(make_drafter(folder), request(text(30), 0, nothing, bad_words=((3,),))) == [[]]


def test_a_table_of_another_vocabulary_is_refused(folder):
    with pytest.raises(ForedraftError, match="is for 12 tokens and the target has 13"):
        ngram_lm.create(ngram_lm.Config(), DrafterContext(vocab_size=13, model=folder))


@pytest.mark.parametrize(
    "options", [{"min_confidence": 1.5}, {"discount": 0.0}, {"discount": 1.0}, {"order": 0}, {"base_weight": 0.0}]
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ForedraftError, match=next(iter(options))):
        make_drafter(**options)


def test_the_built_in_table_is_small_and_whole():
    from foredraft import zoo
    from foredraft.zoo_training.recipe import VOCAB_SIZE

    path = zoo.find_folder("ngram")
    assert sum(file.stat().st_size for file in path.iterdir()) <= 2_500_000
    model = NgramModel.load(path, VOCAB_SIZE)
    q = model.compute_q([1, 2, 3])
    assert abs(q.sum() - 1) < 1e-9
    assert (q > 0).all()
