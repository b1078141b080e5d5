"""Every way the native library can run: instruction sets, numbers of threads, whose threads they are."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Barrier
from typing import TypeVar

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from foredraft.kernels.cpu import build
from foredraft.kernels.cpu.library import CHOICE, SETS, Library, library, share_threads

T = TypeVar("T")
ROUNDING = 2.0**-24  # of a float32, relative
IS_BUILT = build.LIBRARY.exists() and os.environ.get(CHOICE) != "torch"
NATIVE = pytest.mark.skipif(not IS_BUILT and build.compiler() is None, reason="no C compiler built the kernels here")
EACH_SET = pytest.mark.parametrize("instruction_set", SETS)


@dataclass(frozen=True)
class Way:
    threads: int
    has_own_pool: bool  # or shares the OpenMP threads of torch


WAYS = (Way(1, False), Way(2, False), Way(2, True))
ways = st.sampled_from(WAYS)


@contextmanager
def running(instruction_set: str = "", way: Way = WAYS[0]) -> Iterator[Library]:
    """The library in one of its ways, and afterwards as every other test expects it."""
    native = library()
    assert native is not None
    if instruction_set and not native.has(instruction_set):
        pytest.skip(f"this processor has no {instruction_set}")
    native.select(instruction_set)
    torch.set_num_threads(way.threads)
    if way.has_own_pool:
        native.handle.fd_share(None, None)
    try:
        yield native
    finally:
        share_threads(native.handle)
        torch.set_num_threads(1)
        native.select(os.environ.get(CHOICE, ""))


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


LAYOUTS = ("as it is", "from the middle of a larger one", "transposed", "every other")
layouts = st.sampled_from(LAYOUTS)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers at odd addresses, or with other strides."""
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "every other":
        return x.repeat_interleave(2, -1)[..., ::2]
    if layout == "from the middle of a larger one":
        room = x.new_full((x.shape[0] + 2, *x.shape[1:-1], x.shape[-1] + 5), torch.nan)
        room[1:-1, ..., 3:-2] = x
        return room[1:-1, ..., 3:-2]
    return x


def shifted(x: Tensor) -> Tensor:
    """The same numbers, contiguous, at an address that is a multiple of their size and of nothing more."""
    room = x.new_full((x.numel() + 1,), torch.nan)
    room[1:] = x.flatten()
    return room[1:].view(x.shape)


def at_once(run: Callable[[int], T], num_threads: int = 4) -> list[T]:
    """run(0), run(1), ... in as many Python threads that set off together."""
    start = Barrier(num_threads)

    def body(number: int) -> T:
        start.wait()
        return run(number)

    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(body, range(num_threads)))
