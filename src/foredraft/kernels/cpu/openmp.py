"""Use of torch's OpenMP threads by the native library."""

import ctypes
from ctypes import c_void_p
from pathlib import Path


def share_threads(handle: ctypes.CDLL) -> None:
    """Use torch's OpenMP threads for the team, if its runtime is found."""
    runtime = _find_openmp()
    if runtime is not None:
        handle.fd_use_openmp(_get_address(runtime.GOMP_parallel), _get_address(runtime.omp_get_num_threads))


def _find_openmp() -> ctypes.CDLL | None:
    """Return the OpenMP runtime that torch has loaded, if it has the GNU interface."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "libgomp" in line or "libomp" in line}
    for path in sorted(paths):
        runtime = ctypes.CDLL(path)
        if hasattr(runtime, "GOMP_parallel"):
            return runtime
    return None


def _get_address(function: "ctypes._NamedFuncPointer") -> int | None:
    return ctypes.cast(function, c_void_p).value
