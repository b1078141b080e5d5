import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import generation

from foredraft.sampling.distribution import TokenHistory, distribution
from foredraft.sampling.params import Sampling
from tests.support import sampling_oracle
from tests.support.sampling_cases import SETTINGS, V, assert_same, compute_expected, make_history, measure_largest_error


@pytest.mark.parametrize("name", SETTINGS)
def test_every_parameter_agrees_with_the_slow_reference_on_random_rows(name):
    """Guards every parameter, its order among the others and the rows it is applied to."""
    assert measure_largest_error(distribution, name) < 1e-12


@pytest.mark.parametrize("name", sorted(set(SETTINGS) - {"plain", "top-k beyond the vocabulary"}))
def test_every_parameter_changes_something(name):
    """Guards parameters accepted and silently ignored, and the emptiness of the test above."""
    rng, sampling = random.Random(1), Sampling(**SETTINGS[name])
    logits = torch.randn(40, V, generator=torch.Generator().manual_seed(1)).double() * 2
    history = [make_history(rng, sampling) for _ in range(40)]
    changed = (distribution(logits, sampling, history) - logits.softmax(-1)).abs().amax(-1)
    assert (changed > 1e-3).sum() >= 5


def test_rows_with_different_parameters_are_the_rows_one_by_one_to_the_last_bit():
    """Guards advanced-index copies, one row's filter leaking into another, and bits that change with the neighbours."""
    rng = random.Random(0)
    sampling = [Sampling(**SETTINGS[name]) for name in SETTINGS] * 3
    history = [make_history(rng, s) for s in sampling]
    for dtype in (torch.float64, torch.float32):
        logits = (torch.randn(len(sampling), V, generator=torch.Generator().manual_seed(3)) * 2).to(dtype)
        together = distribution(logits, sampling, history)
        alone = [distribution(logits[i : i + 1], s, [history[i]]) for i, s in enumerate(sampling)]
        assert torch.equal(together, torch.cat(alone))
    assert_same(distribution(logits.double(), sampling, history), compute_expected(logits, sampling, history))


@pytest.mark.parametrize("name", ["plain", "all filters", "top-p", "typical"])
def test_a_row_keeps_its_bits_in_every_batch(name):
    """Guards a division by 0.99999994 that only happened if another row had a filter."""
    logits = torch.randn(50, 1000, generator=torch.Generator().manual_seed(5))
    mine = [Sampling(**SETTINGS[name])] * 50
    alone = distribution(logits, mine)
    for other in ("top-p", "min-p", "typical", "top-k 5", "hot", "bias", "greedy"):
        mixed = distribution(torch.cat([logits, logits[:1]]), [*mine, Sampling(**SETTINGS[other])])
        assert torch.equal(mixed[:50], alone)


numbers = st.floats(-8, 8, allow_nan=False).map(lambda x: round(x, 3))
ids = st.integers(0, 7)
samplings = st.builds(
    Sampling,
    max_tokens=st.just(50),
    min_tokens=st.integers(0, 6),
    temperature=st.sampled_from([0.0, 1.0]) | st.floats(0.05, 3),
    top_k=st.integers(0, 10),
    top_p=st.just(1.0) | st.floats(0.01, 1),
    min_p=st.just(0.0) | st.floats(0, 1),
    typical_p=st.just(1.0) | st.floats(0.01, 1),
    repetition_penalty=st.just(1.0) | st.floats(0.2, 3),
    presence_penalty=st.just(0.0) | st.floats(-2, 2),
    frequency_penalty=st.just(0.0) | st.floats(-2, 2),
    logit_bias=st.dictionaries(ids, st.floats(-10, 10), max_size=3),
    bad_words=st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    allowed_token_ids=st.none() | st.lists(ids, min_size=1, max_size=8).map(tuple),
)


@st.composite
def rows(draw):
    logits = draw(st.lists(numbers | st.just(-math.inf), min_size=8, max_size=8))
    sampling = draw(samplings)
    texts = [draw(st.lists(ids, max_size=5)) for _ in range(3)]
    return (
        logits,
        sampling,
        TokenHistory(*texts, end_ids=draw(st.sampled_from([(), (2,), (0, 5)])), bad_words=sampling.bad_words),
    )


@given(st.lists(rows(), min_size=1, max_size=4))
def test_any_combination_of_parameters_agrees_with_the_slow_reference(cases):
    """Guards unforeseen interactions. Cases in which a filter's cut falls within rounding are skipped."""
    for logits, sampling, history in cases:
        try:
            assume(sampling_oracle.compute_distribution_and_margin(logits, sampling, history)[1] > 1e-9)
        except sampling_oracle.NoDistributionError:
            continue
    logits = torch.tensor([x for x, _, _ in cases], dtype=torch.float64)
    sampling, history = [s for _, s, _ in cases], [h for _, _, h in cases]
    assert_same(distribution(logits, sampling, history), compute_expected(logits, sampling, history), 1e-10)


def test_penalties_count_the_drafted_prefix_at_every_position():
    """Guards one penalty vector for all drafted positions, and counting only the last token of a step."""
    sampling = Sampling(frequency_penalty=0.7, presence_penalty=0.2, repetition_penalty=1.3)
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(0)).double().expand(5, -1)
    prompt, output, draft = [1, 1, 2], [3, 4], [4, 4, 5, 4]
    history = [TokenHistory(prompt, output, draft[:depth]) for depth in range(5)]
    p = distribution(logits, sampling, history)
    committed = [TokenHistory(prompt, output + draft[:depth]) for depth in range(5)]
    assert torch.equal(p, distribution(logits, sampling, committed))
    assert_same(p, compute_expected(logits, [sampling] * 5, history))
    odds = (p[:, 4] / p[:, 7]).log()
    torch.testing.assert_close(odds.diff(), torch.tensor([-0.7, -0.7, 0.0, -0.7]).double())


def test_rows_that_share_a_prompt_do_not_share_their_counts():
    """Guards the counting of a shared text once: rows of one request differ by their drafted path alone."""
    prompt, output = [1, 2], [3]
    sampling = Sampling(frequency_penalty=1.0)
    history = [TokenHistory(prompt, output, d) for d in ([5], [], [6, 6], [5, 6])] + [TokenHistory([9], output, [5])]
    logits = torch.zeros(5, V).double()
    assert_same(distribution(logits, sampling, history), compute_expected(logits, [sampling] * 5, history))


def test_presence_and_frequency_look_at_the_output_and_repetition_at_the_prompt_too():
    logits = torch.ones(1, 4).double()
    history = [TokenHistory(prompt=[1], output=[2])]
    assert distribution(logits, Sampling(presence_penalty=1.0), history)[0].argsort(stable=True).tolist()[0] == 2
    p = distribution(logits, Sampling(presence_penalty=1.0, frequency_penalty=1.0), history)[0]
    assert p[1] == p[0] == p[3] > p[2]
    p = distribution(logits, Sampling(repetition_penalty=2.0), history)[0]
    assert p[1] == p[2] < p[0] == p[3]


def test_min_tokens_counts_tokens_of_the_path_and_not_steps():
    """Guards min_tokens counted per step: a drafted position beyond the minimum may end the text."""
    sampling = Sampling(min_tokens=3)
    history = [TokenHistory([0], [1], [2] * depth, end_ids=(6, 8)) for depth in range(4)]
    p = distribution(torch.zeros(4, V).double(), sampling, history)
    assert (p[:, 6] > 0).tolist() == [False, False, True, True]
    assert torch.equal(p[:, 6], p[:, 8])


@pytest.mark.parametrize(
    ("prompt", "output", "drafted", "is_banned"),
    [
        ([7, 1, 2], [], [], True),
        ([7, 1], [2], [], True),
        ([7, 1], [], [2], True),
        ([7], [1], [2], True),
        ([7], [], [1, 2], True),
        ([], [1, 2], [], True),
        ([], [], [1, 2], True),
        ([2, 1], [], [], False),
        ([1, 2], [0], [], False),
        ([1, 2], [], [0], False),
        ([1], [0], [2], False),
        ([2], [], [], False),
        ([], [], [], False),
    ],
)
def test_a_bad_word_is_seen_across_the_borders_of_prompt_output_and_draft(prompt, output, drafted, is_banned):
    """Guards a ban that looked at the committed text alone."""
    sampling = Sampling(bad_words=((1, 2, 5),))
    history = [TokenHistory(prompt, output, drafted, bad_words=((1, 2, 5),))]
    p = distribution(torch.zeros(1, V).double(), sampling, history)[0]
    assert (p[5] == 0) == is_banned
    assert (p > 0).sum() == V - is_banned


BROKEN = {
    "NaN": lambda x: x.index_fill_(0, torch.tensor([3]), math.nan),
    "all NaN": lambda x: x.fill_(math.nan),
    "+inf": lambda x: x.index_fill_(0, torch.tensor([3]), math.inf),
    "all +inf": lambda x: x.fill_(math.inf),
    "+inf and NaN": lambda x: x.index_fill_(0, torch.tensor([3]), math.inf).index_fill_(0, torch.tensor([1]), math.nan),
    "+inf and -inf": lambda x: x.fill_(-math.inf).index_fill_(0, torch.tensor([3]), math.inf),
    "all -inf": lambda x: x.fill_(-math.inf),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("fault", BROKEN)
def test_a_row_without_a_distribution_is_nan_throughout_and_touches_no_other(fault, name, dtype):
    """Guards NaN logits that became token 0, the last id, or the neighbours' trouble."""
    sampling = Sampling(**SETTINGS[name])
    history = [make_history(random.Random(i), sampling) for i in range(5)]
    logits = torch.randn(5, V, generator=torch.Generator().manual_seed(2)).to(dtype)
    clean = distribution(logits, sampling, history)
    BROKEN[fault](logits[2])
    p = distribution(logits, sampling, history)
    assert p[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(p[others], clean[others])
    torch.testing.assert_close(clean.double().sum(-1), torch.ones(5).double())
    mixed = distribution(logits, [sampling, Sampling(), sampling, Sampling(temperature=0), sampling], history)
    assert mixed.isnan().any(-1).tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("token", [3, 4, 6])
def test_a_nan_is_found_even_where_the_token_is_forbidden(token):
    """Guards a model gone wrong hidden by an assignment of -inf over its NaN."""
    sampling = Sampling(bad_words=((3,),), allowed_token_ids=(0, 3, 6), min_tokens=1)
    logits = torch.zeros(1, V)
    logits[0, token] = math.nan
    history = [TokenHistory(bad_words=((3,),), end_ids=(6,))]
    assert distribution(logits, sampling, history).isnan().all()


def test_nothing_left_to_draw_is_not_a_distribution():
    sampling = [Sampling(allowed_token_ids=(3,), bad_words=((3,),)), Sampling(allowed_token_ids=(3,))]
    history = [TokenHistory(bad_words=((3,),))] * 2
    p = distribution(torch.zeros(2, V), sampling, history)
    assert p[0].isnan().all()
    assert p[1, 3] == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_the_inputs_are_not_modified(name, dtype):
    """Guards logits zeroed in place before another reader (logprobs, a second sample)."""
    sampling = Sampling(**SETTINGS[name])
    logits = torch.randn(6, V).to(dtype)
    history = [make_history(random.Random(i), sampling) for i in range(6)]
    texts = [(list(h.prompt), list(h.output), list(h.draft_path)) for h in history]
    before = logits.clone()
    p = distribution(logits, sampling, history)
    assert torch.equal(logits, before)
    assert [(list(h.prompt), list(h.output), list(h.draft_path)) for h in history] == texts
    assert p.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    p.fill_(7)
    assert torch.equal(logits, before)


WARPERS = {
    "temperature": ({"temperature": 0.6}, lambda: generation.TemperatureLogitsWarper(0.6)),
    "top_k": ({"top_k": 9}, lambda: generation.TopKLogitsWarper(9)),
    "top_p": ({"top_p": 0.7}, lambda: generation.TopPLogitsWarper(0.7)),
    "min_p": ({"min_p": 0.1}, lambda: generation.MinPLogitsWarper(0.1)),
    "typical_p": ({"typical_p": 0.5}, lambda: generation.TypicalLogitsWarper(0.5)),
}


@pytest.mark.parametrize("name", WARPERS)
def test_a_filter_is_the_one_of_transformers(name):
    kwargs, warper = WARPERS[name]
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(7)).double() * 3
    assert_same(distribution(logits, Sampling(**kwargs)), warper()(None, logits.clone()).softmax(-1))


def test_all_filters_together_are_those_of_transformers_in_its_order():
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(8)).double() * 3
    x = logits.clone()
    for warper in (
        generation.TemperatureLogitsWarper(1.3),
        generation.TopKLogitsWarper(20),
        generation.TopPLogitsWarper(0.9),
        generation.MinPLogitsWarper(0.03),
        generation.TypicalLogitsWarper(0.9),
    ):
        x = warper(None, x)
    sampling = Sampling(temperature=1.3, top_k=20, top_p=0.9, min_p=0.03, typical_p=0.9)
    assert_same(distribution(logits, sampling), x.softmax(-1))


def test_the_repetition_penalty_is_the_one_of_transformers():
    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(9)).double()
    text = torch.randint(0, 50, (40, 12), generator=torch.Generator().manual_seed(9))
    x = generation.RepetitionPenaltyLogitsProcessor(1.5)(text, logits.clone())
    history = [TokenHistory(row[:5], row[5:9], row[9:]) for row in text.tolist()]
    assert_same(distribution(logits, Sampling(repetition_penalty=1.5), history), x.softmax(-1))


def test_ties_with_the_kth_largest_are_kept():
    logits = torch.tensor([[3.0, 2.0, 2.0, 1.0, 2.0]])
    assert (distribution(logits, Sampling(top_k=2)) > 0).tolist() == [[True, True, True, False, True]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-46, 5e-324])
def test_a_temperature_near_zero_is_nearly_greedy(temperature, dtype):
    """Guards a temperature that float32 rounds to zero, which once sampled at temperature one."""
    logits = torch.randn(20, V, generator=torch.Generator().manual_seed(4)).to(dtype) * 5
    p = distribution(logits, Sampling(temperature=temperature))
    assert_same(p.round(decimals=6), distribution(logits, Sampling(temperature=0)).double(), 1e-6)


@pytest.mark.parametrize("name", ["top_p", "typical_p"])
@pytest.mark.parametrize("mass", [1e-9, 1e-46, 5e-324])
def test_a_mass_that_rounds_to_zero_still_leaves_a_token(name, mass):
    """Guards a legal request that failed because nothing was kept."""
    p = distribution(torch.randn(20, V), Sampling(**{name: mass}))
    assert ((p > 0).sum(-1) == 1).all()
    assert (p.sum(-1) == 1).all()


def test_huge_logits_do_not_overflow():
    p = distribution(torch.tensor([[3e38, -3e38, 3e38, 0.0]]), Sampling(temperature=0.01))
    assert p.tolist() == [[0.5, 0, 0.5, 0]]


def test_no_rows_make_an_empty_answer():
    assert distribution(torch.zeros(0, V), []).shape == (0, V)
    assert distribution(torch.zeros(0, V), Sampling(top_k=2, top_p=0.5, temperature=0.5)).shape == (0, V)


IMPOSSIBLE = [
    ("max_tokens", 0),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("min_tokens", -1),
    ("min_tokens", 129),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("top_k", -1),
    ("top_k", 2.0),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("typical_p", 0.0),
    ("typical_p", 2.0),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("presence_penalty", math.inf),
    ("frequency_penalty", math.nan),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: math.inf}),
    ("logit_bias", {1.5: 1.0}),
    ("bad_words", ("",)),
    ("bad_words", ((),)),
    ("bad_words", ((1, -2),)),
    ("allowed_token_ids", ()),
    ("allowed_token_ids", (-1,)),
    ("stop_token_ids", (-1,)),
    ("stop", ("",)),
    ("stop", ""),
    ("n", 0),
    ("seed", 1.5),
    ("seed", True),
    ("logprobs", -1),
    ("logprobs", 2.5),
    ("prompt_logprobs", -1),
]


@pytest.mark.parametrize(("name", "value"), IMPOSSIBLE, ids=lambda value: repr(value))
def test_an_impossible_value_is_refused_by_name(name, value):
    """Guards silence: a negative id would have counted from the end of the vocabulary."""
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        Sampling(**{name: value})


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_one_string_is_one_string_and_not_its_letters(name):
    """Guards bad_words="damn" banning the letters d, a, m and n."""
    assert getattr(Sampling(**{name: "damn"}), name) == ("damn",)


def test_a_list_of_parameters_must_match_the_rows():
    """Guards rows silently paired with another request's parameters."""
    with pytest.raises((ValueError, RuntimeError)):
        distribution(torch.zeros(3, V), [Sampling(logit_bias={1: 1.0})] * 2)
    with pytest.raises((ValueError, RuntimeError)):
        distribution(torch.zeros(3, V), [Sampling(top_p=0.5)] * 2)


def test_sampling_is_a_value():
    a = Sampling(stop=["x"], allowed_token_ids=[1, 2], bad_words=[[1, 2], "no"])
    assert a == Sampling(stop=("x",), allowed_token_ids=(1, 2), bad_words=((1, 2), "no"))
    assert replace(a, temperature=0).is_greedy
    assert not a.is_greedy


def test_a_logits_processor_sees_prompt_output_and_drafted_tokens_of_its_row():
    seen = []

    def processor(ids, scores):
        seen.append(ids.tolist())
        scores[:, 2] += 100.0
        return scores

    logits = torch.zeros(2, 4)
    history = [TokenHistory(prompt=[1], output=[2], draft_path=[3]), TokenHistory(prompt=[0])]
    rows = [Sampling(temperature=0, logits_processors=(processor,)), Sampling(temperature=0)]
    p = distribution(logits, rows, history)
    assert seen == [[[1, 2, 3]]]
    assert p.argmax(-1).tolist() == [2, 0]
    assert not logits.any(), "the caller's logits were changed"


def test_a_logits_processor_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="must return scores"):
        distribution(
            torch.zeros(1, 4), Sampling(logits_processors=(lambda ids, scores: scores[:, :2],)), [TokenHistory()]
        )
    with pytest.raises(ValueError, match="logits_processors takes functions"):
        Sampling(logits_processors=(3,))
