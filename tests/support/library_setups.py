"""Setups of the native library: instruction sets, numbers of threads, and owners of the threads."""

import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Barrier
from typing import TypeVar

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from foredraft.kernels.cpu import build
from foredraft.kernels.cpu.library import (
    INSTRUCTION_SETS,
    KERNELS_VARIABLE,
    TILE_SET,
    NativeLibrary,
    _open_library,
    load_library,
)
from foredraft.kernels.cpu.openmp import share_threads
from tests.support.devices import TEST_DEVICE

T = TypeVar("T")
ROUNDING = 2.0**-24  # of a float32, relative
IS_BUILT = build.LIBRARY.exists() and os.environ.get(KERNELS_VARIABLE) != "torch"
NATIVE = pytest.mark.skipif(
    not IS_BUILT and build.find_compiler() is None, reason="no C compiler built the kernels here"
)
ON_CPU = pytest.mark.skipif(TEST_DEVICE.type != "cpu", reason="native code runs on the CPU")  # of tests of invariants
EMULATED = "amx emulated"
EACH_SET = pytest.mark.parametrize("instruction_set", [*INSTRUCTION_SETS, EMULATED])


@dataclass(frozen=True)
class ThreadSetup:
    threads: int
    has_own_pool: bool  # or shares the OpenMP threads of torch


THREAD_SETUPS = (ThreadSetup(1, False), ThreadSetup(2, False), ThreadSetup(2, True))
thread_setups = st.sampled_from(THREAD_SETUPS)


@cache
def build_emulated() -> NativeLibrary:
    """Build the library with the tiles of AMX in plain C, on top of the best set of this processor."""
    with use_library() as native:
        flags = build.list_machine_sets().get(native.instruction_set, [])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "emulated.so"
        build.build(path, {TILE_SET: [*flags, "-DFD_AMX_EMULATED"]}, ["-DFD_AMX_EMULATED"])
        return _open_library(path)


@contextmanager
def replace_handle(other: NativeLibrary) -> Iterator[NativeLibrary]:
    """Give every caller the code of another library."""
    native = load_library()
    assert native is not None
    own = native.handle
    object.__setattr__(native, "handle", other.handle)  # a hack: every caller gets this object as the library
    try:
        yield native
    finally:
        object.__setattr__(native, "handle", own)


@contextmanager
def swap_library(instruction_set: str) -> Iterator[tuple[NativeLibrary, str]]:
    """Replace the usual library by one with a given instruction set; yields it and the library's name of the set."""
    if instruction_set == EMULATED:
        with replace_handle(build_emulated()) as native:
            yield native, TILE_SET
        return
    usual = load_library()
    assert usual is not None
    yield usual, instruction_set


@contextmanager
def use_library(instruction_set: str = "", way: ThreadSetup = THREAD_SETUPS[0]) -> Iterator[NativeLibrary]:
    """Use the library in one setup, and restore the default afterwards."""
    with swap_library(instruction_set) as (native, name):
        if name and not native.is_supported(name):
            pytest.skip(f"this processor has no {name}")
        native.select(name)
        torch.set_num_threads(way.threads)
        if way.has_own_pool:
            native.handle.fd_use_openmp(None, None)
        try:
            yield native
        finally:
            share_threads(native.handle)
            torch.set_num_threads(1)
            native.select(os.environ.get(KERNELS_VARIABLE, "") if name == instruction_set else TILE_SET)


def make_normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


LAYOUTS = ("as it is", "from the middle of a larger one", "transposed", "every other")
layouts = st.sampled_from(LAYOUTS)


def change_layout(x: Tensor, layout: str) -> Tensor:
    """Copy numbers to odd addresses, or with other strides."""
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "every other":
        return x.repeat_interleave(2, -1)[..., ::2]
    if layout == "from the middle of a larger one":
        room = x.new_full((x.shape[0] + 2, *x.shape[1:-1], x.shape[-1] + 5), torch.nan)
        room[1:-1, ..., 3:-2] = x
        return room[1:-1, ..., 3:-2]
    return x


def misalign(x: Tensor) -> Tensor:
    """Copy numbers, contiguous, to an address that is a multiple of their size and of nothing more."""
    room = x.new_full((x.numel() + 1,), torch.nan)
    room[1:] = x.flatten()
    return room[1:].view(x.shape)


def run_concurrently(run: Callable[[int], T], num_threads: int = 4) -> list[T]:
    """run(0), run(1), ... in as many Python threads that set off together."""
    start = Barrier(num_threads)

    def body(number: int) -> T:
        start.wait()
        return run(number)

    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(body, range(num_threads)))
