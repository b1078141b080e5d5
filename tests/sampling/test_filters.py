"""Filters: the set searched among candidates is the one a sort of the whole row keeps, to the last tie and bit."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foredraft.sampling import filters
from foredraft.sampling.filters import (
    argmax_tokens,
    compute_greedy_probs,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    keep_typical,
    select_nucleus,
)
from foredraft.sampling.weights import compute_exponents, compute_weights, to_summands

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
MASSES = (1e-46, 0.05, 0.3, 0.5, 0.9, 0.95, 0.999, 1 - 1e-6, 1 - 2**-20, 1 - 2**-24, 1.0)


def sort_top_p(w: torch.Tensor, masses: Sequence[float]) -> torch.Tensor:
    return torch.where(select_nucleus(w, masses, w), w, 0)


def search_typical(w: torch.Tensor, masses: Sequence[float]) -> torch.Tensor:
    return keep_typical(w, w.log2(), masses)


def sort_typical(w: torch.Tensor, masses: Sequence[float]) -> torch.Tensor:
    return torch.where(select_nucleus(w, masses, -filters.compute_surprisal_gap(w, w.log2())), w, 0)


SEARCHED = {"top-p": (keep_top_p, sort_top_p), "typical": (search_typical, sort_typical)}
KINDS = ("normal", "sharp", "flat", "equal", "few values", "powers", "zeros", "one token")


def make_weights(kind: str, size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Weights [6, V] of one kind; several of them are all ties."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, size, generator=generator, dtype=torch.float64)
    made = {
        "normal": x * 2,
        "sharp": x * 9,
        "flat": x * 0.01,
        "equal": torch.zeros_like(x),
        "few values": x.round(),
        "powers": (x * 8).round() * math.log(2),
        "zeros": torch.where(x > 0.8, x * 3, -math.inf),
        "one token": torch.where(x == x.amax(-1, keepdim=True), x, -math.inf),
    }
    return compute_weights(compute_exponents(made[kind].to(dtype), 1.0))


@DTYPES
@pytest.mark.parametrize("size", [1, 2, 7, 300, 4096])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SEARCHED)
def test_a_nucleus_searched_is_the_nucleus_sorted_to_the_last_bit(name, kind, size, dtype):
    """Guards ties cut elsewhere, a crossing token lost, and sums rounded in another order."""
    search, sort = SEARCHED[name]
    w = make_weights(kind, size, dtype)
    for mass in MASSES:
        assert torch.equal(search(w, [mass] * 6).nan_to_num(-1), sort(w, [mass] * 6).nan_to_num(-1)), mass


weights = st.sampled_from([0, 1, 1, 2, 2, 3, 5, 8, 1000, 1e-3, 1e-7, 1e7]) | st.floats(1e-9, 1e9)


@given(
    st.lists(weights, min_size=1, max_size=40).filter(any),
    st.floats(1e-6, 1) | st.sampled_from(MASSES),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from(sorted(SEARCHED)),
)
def test_any_distribution_with_any_ties_is_cut_as_by_a_full_sort(row, mass, dtype, name):
    search, sort = SEARCHED[name]
    w = (torch.tensor([row], dtype=torch.float64) / max(row)).to(dtype)
    assert torch.equal(search(w, [mass]), sort(w, [mass]))


@given(st.lists(st.integers(1, 4), min_size=2, max_size=30), st.integers(1, 29))
def test_a_crossing_at_the_very_edge_of_a_tie_keeps_the_lower_ids(row, count):
    """The masses are exact sums of the likeliest tokens, so that one rounding decides."""
    p = torch.tensor([row], dtype=torch.float64) / sum(row)
    mass = min(float(p[0].sort(descending=True).values[: min(count, len(row))].sum()), 1.0)
    for dtype in (torch.float64, torch.float32):
        assert torch.equal(keep_top_p(p.to(dtype), [mass]), sort_top_p(p.to(dtype), [mass]))


def test_equal_tokens_at_the_cut_are_kept_from_the_lowest_id():
    p = torch.tensor([[0.1, 0.2, 0.2, 0.2, 0.2, 0.1]])
    assert (keep_top_p(p, [0.5]) > 0).tolist() == [[False, True, True, True, False, False]]


@pytest.mark.parametrize("name", SEARCHED)
def test_rows_with_masses_of_their_own_are_cut_one_by_one(name):
    search, sort = SEARCHED[name]
    p = make_weights("normal", 500, torch.float32)
    masses = [0.1, 0.5, 0.9, 1.0, 0.99, 0.3]
    assert torch.equal(search(p, masses), sort(p, masses))
    for i, mass in enumerate(masses):
        assert torch.equal(search(p, masses)[i : i + 1], search(p[i : i + 1], [mass]))


def test_the_common_case_is_found_above_the_bars():
    """Guards a search that always falls back to the sort it is there to spare."""
    for kind in ("normal", "sharp", "flat", "few values"):
        for row in make_weights(kind, 4096, torch.float32):
            summands = to_summands(row).numpy()
            limit = math.ceil(0.9 * float(summands.sum()))
            assert filters._search_nucleus(summands, row.numpy(), limit, filters.RELATIVE_THRESHOLDS) is not None


def test_inputs_stay_as_they_are():
    w = make_weights("normal", 50, torch.float32)
    before = w.clone()
    for keep in (keep_top_p, search_typical, keep_min_p):
        assert not torch.equal(keep(w, [0.5] * 6), w)
    assert torch.equal(w, before)


@pytest.mark.parametrize("k", [1, 2, 5, 39, 40, 50])
def test_top_k_keeps_what_is_as_large_as_the_kth(k):
    x = torch.randn(30, 40, generator=torch.Generator().manual_seed(k)).round(decimals=1)
    floor = x.sort(-1, descending=True).values[:, min(k, 40) - 1 : min(k, 40)]
    kept = keep_top_k(x, [k] * 30)
    assert torch.equal(kept > -math.inf, x >= floor)
    mixed = keep_top_k(x, [k, 0] * 15)
    assert torch.equal(mixed[::2], kept[::2])
    assert torch.equal(mixed[1::2], x[1::2])


@DTYPES
def test_the_likeliest_token_is_that_of_the_one_hot_distribution(dtype):
    """Ties go to the first; NaN, +inf and nothing at all are no distribution."""
    x = torch.randn(60, 33, generator=torch.Generator().manual_seed(1)).mul(2).round().to(dtype)
    for row, value in ((3, math.nan), (5, math.inf), (7, -math.inf)):
        x[row, 4] = value
    x[9] = -math.inf
    probs = compute_greedy_probs(x)
    expected = [-1 if math.isnan(row[0]) else int(np.argmax(row)) for row in probs.numpy()]
    assert argmax_tokens(x) == expected
    assert [i for i, token in enumerate(expected) if token < 0] == [3, 5, 9]
