"""Native arithmetic on the masses of a distribution. `verification/masses.py` has the reference, with the same bits."""

import ctypes
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from foredraft.kernels.cpu.library import load_library

Floats = NDArray[np.float64]
SUM_BLOCK = 1024  # masses of a block of a sum, as in masses.h


@dataclass(frozen=True)
class MassFunctions:
    """Functions of the native library on arrays [n] that are contiguous."""

    handle: ctypes.CDLL

    def sum(self, mass: NDArray[np.floating]) -> float:
        """Return the sum."""
        mass = _make_contiguous(mass)
        return float(self.handle.fd_sum_masses(mass.ctypes.data, mass.dtype == np.float32, len(mass)))

    def divide(self, mass: NDArray[np.floating], total: float) -> Floats:
        """Return the masses divided by their sum, in float64."""
        mass, out = _make_contiguous(mass), np.empty(len(mass))
        self.handle.fd_divide_masses(mass.ctypes.data, mass.dtype == np.float32, len(mass), total, out.ctypes.data)
        return out

    def subtract(self, p: Floats, weight: float, q: Floats) -> Floats:
        """Return max(0, weight * p - q)."""
        p, q = np.ascontiguousarray(p, dtype=np.float64), np.ascontiguousarray(q, dtype=np.float64)
        out = np.empty(len(p))
        self.handle.fd_subtract_masses(p.ctypes.data, weight, q.ctypes.data, len(p), out.ctypes.data)
        return out

    def sample(self, mass: Floats, u: float) -> int:
        """Return the first index whose cumulative mass exceeds u * total."""
        mass = np.ascontiguousarray(mass, dtype=np.float64)
        sums = np.empty(-(-len(mass) // SUM_BLOCK))
        return int(self.handle.fd_sample_mass(mass.ctypes.data, len(mass), u, sums.ctypes.data))


@cache
def find_mass_functions() -> MassFunctions | None:
    """Return the native functions; None without the native library."""
    library = load_library()
    return None if library is None else MassFunctions(library.handle)


def _make_contiguous(mass: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return float32 and float64 arrays as they are, others as float64."""
    return np.ascontiguousarray(mass if mass.dtype in (np.float32, np.float64) else mass.astype(np.float64))
