"""Masses: the native functions have the bits of numpy's, and a sample is where the cumulative mass crosses."""

import numpy as np
import pytest

from foredraft.kernels.cpu.library import load_library
from foredraft.kernels.masses import find_mass_functions
from foredraft.verification import masses

SIZES = (1, 2, 31, 32, 33, 1000, 1023, 1024, 1025, 5000)


def make_masses(n: int, dtype: type) -> np.ndarray:
    generator = np.random.default_rng(n)
    mass = (generator.random(n) ** 8).astype(dtype)
    mass[generator.random(n) < 0.3] = 0
    mass[n // 2] = 0.5
    return mass


@pytest.mark.skipif(find_mass_functions() is None, reason="the native library is not built")
@pytest.mark.parametrize("name", ["avx512", "avx2", "portable"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=str)
def test_native_arithmetic_has_the_bits_of_the_reference(name, dtype):
    library, native = load_library(), find_mass_functions()
    assert library is not None
    assert native is not None
    if not library.is_supported(name):
        pytest.skip(f"this processor has no {name}")
    library.select(name)
    for n in SIZES:
        mass = make_masses(n, dtype)
        q = np.random.default_rng(1).random(n)
        assert native.sum(mass) == masses.sum_by_reference(mass)
        assert np.array_equal(native.divide(mass, 0.37), mass / np.float64(0.37))
        p = mass.astype(np.float64)
        assert np.array_equal(native.subtract(p, 0.7, q), np.maximum(p * 0.7 - q, 0))
        for u in (1e-300, 0.001, 0.3, 0.5, 0.77, 0.999, 1 - 2.0**-53):
            assert native.sample(p, u) == masses.sample_by_reference(p, u)
    library.select()


@pytest.mark.parametrize("n", SIZES)
def test_a_sample_has_mass_and_lies_at_its_uniform(n):
    """The cumulative sum in extended precision is the reference; a token without mass never comes."""
    mass = make_masses(n, np.float64)
    cumulative = mass.astype(np.longdouble).cumsum()
    for u in np.random.default_rng(2).random(50):
        index = masses.sample_index(mass, float(u))
        assert mass[index] > 0
        before = cumulative[index] - mass[index]
        assert before / cumulative[-1] - 1e-12 <= u <= cumulative[index] / cumulative[-1] + 1e-12


def test_the_sum_is_that_of_exact_arithmetic_to_rounding():
    mass = make_masses(5000, np.float64)
    assert masses.sum_masses(mass) == pytest.approx(float(mass.astype(np.longdouble).sum()), rel=1e-15)
