"""The native sampler: its bits and tokens are those of torch's operators, in every instruction set."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.kernels.cpu.library import NativeLibrary, load_library
from foredraft.kernels.sampler import UNCERTAIN, NativeSampler
from foredraft.sampling import rng
from foredraft.sampling.distribution import compute_reference_probs, process_logits
from foredraft.sampling.params import Sampling
from foredraft.sampling.token_sampler import NO_TOKEN, sample_tokens

LIBRARY = load_library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the native library is not built")
SETS = [
    name
    for name in ("avx512bf16", "avx512vnni", "avx512", "avx2", "portable")
    if LIBRARY and LIBRARY.is_supported(name)
]
SETTINGS = [
    Sampling(),
    Sampling(temperature=0.3),
    Sampling(temperature=2.0),
    Sampling(temperature=0),
    Sampling(temperature=1e300),
    Sampling(temperature=5e-324),
    Sampling(top_k=1),
    Sampling(top_k=5),
    Sampling(top_k=5000),
    Sampling(top_p=0.9),
    Sampling(top_p=0.5, temperature=2.0),
    Sampling(top_p=0.1, temperature=3.0),
    Sampling(top_p=1e-40),
    Sampling(top_p=1 - 2.0**-30),
    Sampling(min_p=0.05),
    Sampling(min_p=1.0),
    Sampling(min_p=1e-30, top_p=0.99),
    Sampling(typical_p=0.6),
    Sampling(typical_p=1e-9),
    Sampling(temperature=0.8, top_k=200, top_p=0.9, min_p=0.01, typical_p=0.9),
]
KINDS = ("normal", "flat", "sharp", "few values", "masked", "equal", "one token", "far apart")


@pytest.fixture(params=SETS)
def library(request: pytest.FixtureRequest) -> Iterator[NativeLibrary]:
    assert LIBRARY is not None
    LIBRARY.select(request.param)
    yield LIBRARY
    LIBRARY.select()


def make_logits(kind: str, size: int, dtype: torch.dtype) -> torch.Tensor:
    """One row for each of `SETTINGS`."""
    x = torch.randn(len(SETTINGS), size, generator=torch.Generator().manual_seed(size))
    made = {
        "normal": x * 1.5,
        "flat": x * 0.01,
        "sharp": x * 9,
        "few values": x.round(),
        "masked": torch.where(x > 0.5, x * 3, -math.inf),
        "equal": torch.zeros_like(x),
        "one token": torch.where(x == x.amax(-1, keepdim=True), x, -math.inf),
        "far apart": x * 60,
    }
    return made[kind].to(dtype)


def sample_by_reference(p: torch.Tensor, keys: list[int]) -> list[int]:
    return [
        NO_TOKEN if row.isnan().any() else rng.race_argmax(row.numpy(), key) for row, key in zip(p, keys, strict=True)
    ]


@pytest.mark.parametrize("size", [1, 5, 128, 129, 1000, 9001])
def test_probabilities_and_tokens_have_the_bits_of_the_reference(library, size):
    """Guards another rounding, a tie cut elsewhere, lost or doubled tokens at block ends, and a winner not found."""
    all_settings = [s.filter_settings for s in SETTINGS]
    keys = [rng.derive_key(7, i, size) for i in range(len(SETTINGS))]
    for kind in KINDS:
        for dtype in (torch.float32, torch.bfloat16):
            x = make_logits(kind, size, dtype)
            expected = compute_reference_probs(process_logits(x, ()), SETTINGS)
            sampler = NativeSampler(library)
            assert torch.equal(sampler.compute_probs(x, all_settings).nan_to_num(-1), expected.nan_to_num(-1)), kind
            tokens = sampler.sample_tokens(x, range(len(SETTINGS)), all_settings, keys)
            assert tokens == sample_by_reference(expected, keys), kind


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_without_a_distribution_has_no_token_and_harms_no_other(library, bad):
    x = make_logits("normal", 300, torch.float32)
    x[2, 299], x[5, 0], x[9] = bad, bad, -math.inf
    all_settings = [s.filter_settings for s in SETTINGS]
    p = NativeSampler(library).compute_probs(x, all_settings)
    assert torch.equal(p.nan_to_num(-1), compute_reference_probs(process_logits(x, ()), SETTINGS).nan_to_num(-1))
    tokens = NativeSampler(library).sample_tokens(x, range(len(SETTINGS)), all_settings, [1] * len(SETTINGS))
    invalid = [i for i, token in enumerate(tokens) if token == NO_TOKEN]
    assert invalid == p[:, 0].isnan().nonzero().flatten().tolist() == [2, 5, 9]
    for row in invalid:
        assert NativeSampler(library).compute_masses(x, [row], [all_settings[row]]) == [None]


logits = st.floats(-30, 30, width=32) | st.sampled_from([-math.inf, 0.0, -0.0, 1.0, 1.0, 2.0])
filters = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1.0]) | st.floats(0.01, 100),
    top_k=st.integers(0, 60),
    top_p=st.just(1.0) | st.floats(1e-3, 1),
    min_p=st.just(0.0) | st.floats(0, 1),
    typical_p=st.just(1.0) | st.floats(1e-3, 1),
)


@settings(max_examples=150)
@given(st.lists(logits, min_size=1, max_size=50), filters, st.integers(-(2**63), 2**63 - 1))
def test_any_row_with_any_filters_is_that_of_the_reference(row, sampling, key):
    assert LIBRARY is not None
    x = torch.tensor([row])
    expected = compute_reference_probs(x, [sampling])
    native = NativeSampler(LIBRARY)
    assert torch.equal(native.compute_probs(x, [sampling.filter_settings]).nan_to_num(-1), expected.nan_to_num(-1))
    assert native.sample_tokens(x, [0], [sampling.filter_settings], [key]) == sample_by_reference(expected, [key])


def test_a_close_race_is_left_to_the_reference():
    """Guards a winner that rounding decides: with this margin every race with two tokens of note is close."""
    assert LIBRARY is not None
    x = make_logits("flat", 400, torch.float32)
    plain = [Sampling().filter_settings] * len(x)
    keys = list(range(len(x)))
    tokens = NativeSampler(LIBRARY, margin=0.9).sample_tokens(x, range(len(x)), plain, keys)
    exact = sample_by_reference(compute_reference_probs(x, [Sampling()] * len(x)), keys)
    assert UNCERTAIN in tokens
    assert [t for t in tokens if t != UNCERTAIN] == [e for t, e in zip(tokens, exact, strict=True) if t != UNCERTAIN]


def test_rows_in_any_order_and_number_are_the_rows_one_by_one():
    """Guards the stride of a slice, rows and keys paired wrongly, and the order of threads."""
    x = make_logits("normal", 700, torch.float32)[:, 10:690]
    rows, keys = [7, 0, 7, 3], [5, 6, 7, 8]
    chosen = [SETTINGS[row] for row in rows]
    threads = torch.get_num_threads()
    together = sample_tokens(x, rows, chosen, keys)
    torch.set_num_threads(2)
    in_a_team = sample_tokens(x, rows, chosen, keys)
    torch.set_num_threads(threads)
    alone = [sample_tokens(x, [row], [s], [key])[0] for row, s, key in zip(rows, chosen, keys, strict=True)]
    assert together == in_a_team == alone


def test_weights_are_powers_to_a_rounding():
    """The reference of the reference: the weights of float32 are those of the exponential function."""
    x = torch.linspace(-60, 0, 10_001)[None]
    p = compute_reference_probs(x, [Sampling()])[0]
    exact = x[0].double().softmax(-1)
    assert ((p.double() / exact - 1).abs() < 8e-6).all()  # 60 nats of a float32 have this error
    assert ((p[-500:].double() / exact[-500:] - 1).abs() < 6e-7).all()
