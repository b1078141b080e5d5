import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats as scipy_stats

from foredraft.certify.extremes import MASK, find_state, to_signed
from foredraft.sampling.rng import (
    NoiseStream,
    _mix,
    derive_key,
    exponential_race,
    extend_key,
    extend_keys,
    race_argmax,
    uniform,
    uniform_matrix,
)
from tests.support.statistical_checks import ALPHA, chi_square

EXTREMES = [0, 1, (1 << 12) - 1, 1 << 12, 1 << 63, MASK >> 1, MASK ^ ((1 << 12) - 1), MASK - 1, MASK]


@pytest.mark.parametrize("bits", EXTREMES)
def test_the_extreme_bits_give_uniforms_strictly_between_zero_and_one(bits):
    """Guards u = 0 (a token of probability zero is accepted) and u = 1 (a race divides by zero, no token is found)."""
    u = uniform(find_state(bits))
    assert derive_key(find_state(bits)) & MASK == bits
    assert 0 < u < 1
    assert 1 - u > 0
    assert u in (2.0**-53, 3 * 2.0**-53, 1 - 2.0**-53, 0.5 + 2.0**-53, 0.5 - 2.0**-53)
    column = uniform_matrix(torch.tensor([to_signed(find_state(bits))]), 1)
    assert column.item() == u


def test_the_stream_never_changes_by_accident():
    """Guards the seed contract across releases: a seed that gave a text must go on giving it.

    key(0) is the first number of SplitMix64 seeded with 0, as published: 0xE220A8397B1DCDAF.
    """
    golden = {
        (0,): -2152535657050944081,
        (7, 0, 0, 12): -274576419002966352,
        (-1, 3): -1347316446087456332,
        (123456789, 1, int(NoiseStream.RESIDUAL), 40, 2): 5373987202323619261,
        (MASK, 0): 6755974106381971767,
    }
    assert {path: derive_key(*path) for path in golden} == golden
    assert uniform(7, 0, 1, 12) == 0.8896986933149694
    assert uniform_matrix(torch.tensor([derive_key(7, 0, 0, 12)]), 4)[0].tolist() == [
        0.9638637997737037,
        0.11859103184099362,
        0.3715455486785729,
        0.6352755878471806,
    ]


def test_purposes_keep_their_numbers():
    """Guards the streams against a member put in the middle of the enumeration."""
    assert {p.name: int(p) for p in NoiseStream} == {"TOKEN": 0, "ACCEPT": 1, "RESIDUAL": 2, "DRAFT": 3}


def test_a_column_of_the_tensor_stream_is_the_scalar_uniform_one_counter_deeper():
    """Guards the tensor arithmetic (logical shifts emulated on signed integers) against the exact integers."""
    paths = [(s, *c) for s in (0, 1, 2**31, 2**63, MASK, -5) for c in ((), (0,), (3, 1, 2**40))]
    table = uniform_matrix(torch.tensor([derive_key(*path) for path in paths]), 50)
    assert table.tolist() == [[uniform(*path, i) for i in range(50)] for path in paths]


def test_mixing_is_a_bijection_that_moves_half_the_bits():
    generator = np.random.default_rng(0)
    flips = []
    for value in generator.integers(0, 2**63, 300).tolist():
        assert derive_key(find_state(value)) & MASK == value
        flips += [(_mix(value) ^ _mix(value ^ (1 << bit))).bit_count() for bit in range(64)]
    assert 31.5 < np.mean(flips) < 32.5


def test_a_row_does_not_depend_on_its_batch_nor_on_how_many_columns_are_read():
    """Guards batch invariance: a request's noise may not change with its neighbours or a padded vocabulary."""
    keys = torch.tensor([derive_key(5, i) for i in range(64)])
    together = uniform_matrix(keys, 100)
    assert torch.equal(together[17:18], uniform_matrix(keys[17:18], 100))
    assert torch.equal(together[:, :7], uniform_matrix(keys, 7))
    order = torch.randperm(64)
    assert torch.equal(together[order], uniform_matrix(keys[order], 100))


def test_every_counter_and_purpose_opens_another_stream():
    """Guards shared uniforms: 40,000 paths of counters, no key twice (odds of an honest collision: 4e-11)."""
    paths = itertools.product(range(5), range(2), NoiseStream, range(100), range(10))
    keys = [derive_key(seed, sample, purpose, a, b) for seed, sample, purpose, a, b in paths]
    prefixes = [
        derive_key(seed, sample, purpose, a)
        for seed in range(5)
        for sample in range(2)
        for purpose in NoiseStream
        for a in range(100)
    ]
    assert len(set(keys) | set(prefixes)) == len(keys) + len(prefixes)


@pytest.mark.parametrize("seed", [0, 1, 1 << 63, MASK])
def test_a_key_is_extended_by_further_counters(seed):
    for counters in ((), (5,), (0, 0), (5, 0, 1 << 40)):
        for split in range(len(counters) + 1):
            key = derive_key(seed, *counters[:split])
            assert extend_key(key, *counters[split:]) == derive_key(seed, *counters)


def test_counters_are_a_path_and_not_a_sum():
    assert (
        len(
            {
                derive_key(0, 1, 2),
                derive_key(0, 2, 1),
                derive_key(0, 3),
                derive_key(1, 2),
                derive_key(2, 1),
                derive_key(0, 1, 2, 0),
                derive_key(3),
                derive_key(1, 0, 2),
            }
        )
        == 8
    )


@pytest.mark.parametrize("axis", ["columns", "seeds", "positions", "uniforms"])
def test_numbers_are_uniform_along_every_axis(axis):
    """Kolmogorov-Smirnov and the correlation of neighbours; false alarm 8e-6 for the eight statistics together."""
    n = 100_000
    if axis == "columns":
        u = uniform_matrix(torch.tensor([derive_key(3)]), n)[0].numpy()
    elif axis == "seeds":
        u = uniform_matrix(torch.tensor([derive_key(seed, 0, 0, 9) for seed in range(n)]), 1)[:, 0].numpy()
    elif axis == "positions":
        u = uniform_matrix(torch.tensor([derive_key(1, 0, 0, position) for position in range(n)]), 1)[:, 0].numpy()
    else:
        u = np.array([uniform(2, 0, NoiseStream.ACCEPT, n) for n in range(n)])
    assert scipy_stats.kstest(u, "uniform").pvalue > 1e-6
    correlation = np.corrcoef(u[:-1], u[1:])[0, 1] * np.sqrt(n)
    assert abs(correlation) < scipy_stats.norm.isf(5e-7)


@pytest.mark.parametrize(
    "pair", list(itertools.combinations(NoiseStream, 2)), ids=lambda pair: f"{pair[0].name}-{pair[1].name}"
)
def test_streams_of_two_purposes_are_independent(pair):
    """Guards the draft's bits reused for the uniform. False alarm 6e-6 for the six pairs together."""
    a, b = (np.array([uniform(seed, 0, purpose, 4, 0) for seed in range(20_000)]) for purpose in pair)
    cells = np.histogram2d(a, b, bins=8, range=[[0, 1], [0, 1]])[0]
    assert chi_square(cells, np.full(64, 1 / 64)) > ALPHA


DISTRIBUTIONS = {
    "plain": [0.4, 0.3, 0.15, 0.1, 0.05],
    "with zeros": [0.0, 0.5, 0.0, 0.3, 0.2],
    "unnormalised": [4.0, 1.0, 3.0, 2.0, 0.5],
    "skewed": [0.97, 0.01, 0.01, 0.005, 0.005],
}


def keys_of(n: int) -> torch.Tensor:
    return torch.arange(n) * 6364136223846793005 + 1442695040888963407


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_winner_of_a_race_is_a_draw_from_p(name):
    """N = 200,000; false alarm 4e-6 for the four distributions together."""
    p = torch.tensor(DISTRIBUTIONS[name]).double()
    winners = exponential_race(p.expand(200_000, -1), keys_of(200_000)).argmax(-1)
    assert chi_square(np.bincount(winners, minlength=5), p.numpy()) > ALPHA


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("k", [2, 3])
def test_the_top_k_of_a_race_are_draws_without_replacement_in_order(name, k):
    """Guards the distribution in sibling verification. N = 200,000; false alarm 8e-6 for the eight cases together."""
    p = np.array(DISTRIBUTIONS[name]) / sum(DISTRIBUTIONS[name])
    k = min(k, int((p > 0).sum()))
    exact = np.zeros((5,) * k)
    for path in itertools.permutations(range(5), k):
        mass, left = 1.0, 1.0
        for token in path:
            mass, left = (mass * p[token] / left, left - p[token]) if left > 1e-12 else (0.0, left)
        exact[path] = mass
    assert abs(exact.sum() - 1) < 1e-12
    tops = exponential_race(torch.tensor(p).expand(200_000, -1), keys_of(200_000)).topk(k, -1).indices
    counts = np.zeros((5,) * k)
    for path, count in Counter(map(tuple, tops.tolist())).items():
        counts[path] = count
    assert chi_square(counts, exact) > ALPHA


@pytest.mark.parametrize("bits", EXTREMES)
def test_a_token_of_probability_zero_never_wins_whatever_its_bits(bits):
    """Guards 0 * inf: the winner's number may be as close to one as bits allow."""
    keys = torch.tensor([to_signed(find_state(bits)), to_signed(find_state(bits))])
    p = torch.tensor([[0.0, 1e-300, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    scores = exponential_race(p, keys)
    assert scores.isfinite().all()
    assert (scores[p == 0] == 0).all()
    assert scores.argmax(-1).tolist() == [1, 2]


def test_a_race_scales_with_p_and_leaves_p_alone():
    p = torch.rand(8, 11).double()
    before = p.clone()
    keys = keys_of(8)
    assert torch.equal(exponential_race(p, keys).argmax(-1), exponential_race(p * 4, keys).argmax(-1))
    assert torch.equal(p, before)


def test_half_precision_distributions_race_in_double():
    p = torch.rand(4, 9)
    assert exponential_race(p, keys_of(4)).dtype == torch.float64
    assert torch.equal(exponential_race(p.bfloat16(), keys_of(4)), exponential_race(p.bfloat16().double(), keys_of(4)))


@pytest.mark.parametrize("share", [1.0, 0.5, 0.1, 0.01])
@pytest.mark.parametrize("size", [5, 8, 1000, 4096, 40_000])
def test_the_winner_of_one_row_is_that_of_the_race(size, share):
    """Guards the seed contract: noise belongs to a token id, whether few tokens run or all of them."""
    generator = torch.Generator().manual_seed(size)
    for i in range(20):
        p = torch.rand(size, generator=generator) ** 8
        p[torch.rand(size, generator=generator) > share] = 0
        p[i % size] = 0.5
        for dtype in (torch.float32, torch.float64):
            row = p.to(dtype) / p.sum()
            for k in (derive_key(3, i), derive_key(3, i)):  # the second time its noise is there already
                assert race_argmax(row.numpy(), k) == int(exponential_race(row[None], torch.tensor([k])).argmax())


def test_a_logarithm_has_the_same_bits_wherever_it_stands():
    """A race among few tokens equals the race among all only if vector units and their remainders agree."""
    u = uniform_matrix(torch.tensor([derive_key(1)]), 5000)[0]
    whole = u.log()
    for size in (1, 2, 3, 7, 8, 9, 31, 64, 777):
        ids = torch.randperm(5000, generator=torch.Generator().manual_seed(size))[:size]
        assert torch.equal(u[ids].log(), whole[ids])


def test_keys_are_extended_as_they_are_derived() -> None:
    seeds, counters = [0, 5, -7, 2**63 - 1, 12345], [0, 1, 17, 2**40, 3]
    keys = torch.tensor([derive_key(seed, 2, 3) for seed in seeds])
    extended = extend_keys(keys[:, None], torch.tensor(counters)[None])
    assert extended.tolist() == [[derive_key(seed, 2, 3, counter) for counter in counters] for seed in seeds]
