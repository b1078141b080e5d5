"""Arithmetic on the masses of a distribution in float64, over the whole vocabulary or a few tokens.

The order of a sum is fixed: blocks of `SUM_BLOCK` masses, one after the other, and in a block `SUM_LANES` interleaved
sums, which are added by halves. The native functions (`kernels/cpu/masses.h`) and those of numpy have the same bits, so
the size alone decides which runs.
"""

import numpy as np
from numpy.typing import NDArray

from foredraft.kernels.masses import find_mass_functions

Floats = NDArray[np.float64]
MassArray = NDArray[np.floating]
SUM_LANES = 32
SUM_BLOCK = 1024
MIN_NATIVE_SIZE = 1024  # masses from which a native call is faster than numpy's


def sum_masses(mass: MassArray) -> float:
    """Return the sum of masses [n]."""
    native = find_mass_functions() if len(mass) >= MIN_NATIVE_SIZE else None
    return native.sum(mass) if native is not None else sum_by_reference(mass)


def divide_masses(mass: MassArray, total: float) -> Floats:
    """Return masses [n] divided by their sum."""
    native = find_mass_functions() if len(mass) >= MIN_NATIVE_SIZE else None
    return native.divide(mass, total) if native is not None else mass / np.float64(total)


def subtract_masses(p: Floats, weight: float, q: Floats) -> Floats:
    """Return max(0, weight * p - q), [n]."""
    native = find_mass_functions() if len(p) >= MIN_NATIVE_SIZE else None
    if native is not None:
        return native.subtract(p, weight, q)
    rest = p * weight
    rest -= q
    return np.maximum(rest, 0, out=rest)


def sample_index(mass: Floats, u: float) -> int:
    """Return the first index whose cumulative mass exceeds u * total, u in (0, 1); never an index without mass."""
    native = find_mass_functions() if len(mass) >= MIN_NATIVE_SIZE else None
    return native.sample(mass, u) if native is not None else sample_by_reference(mass, u)


def sum_by_reference(mass: MassArray) -> float:
    """Return the sum by numpy."""
    return float(_sum_blocks(mass)[-1]) if len(mass) else 0.0


def sample_by_reference(mass: Floats, u: float) -> int:
    """Return the index by numpy."""
    sums = _sum_blocks(mass)
    target = u * sums[-1]
    block = int(sums.searchsorted(target, side="right"))
    first = block * SUM_BLOCK
    part = mass[first : first + SUM_BLOCK]
    before = sums[block - 1] if block else 0.0
    cumulative = np.cumsum(np.concatenate(([before], part)))[1:]
    index = int(np.argmax(cumulative > target)) if len(part) else 0
    if len(part) and cumulative[index] > target:
        return first + index
    return int(mass[: first + len(part)].nonzero()[0][-1])  # rounding leaves no index above the target


def _sum_blocks(mass: MassArray) -> Floats:
    """Return the cumulative sums at the end of every block."""
    num_blocks = -(-len(mass) // SUM_BLOCK)
    padded = np.zeros(num_blocks * SUM_BLOCK)
    padded[: len(mass)] = mass
    lanes = padded.reshape(num_blocks, SUM_BLOCK // SUM_LANES, SUM_LANES).sum(axis=1)
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return np.cumsum(lanes[:, 0])
