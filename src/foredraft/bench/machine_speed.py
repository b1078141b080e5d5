"""Speed of the machine: sequential reads from memory, and products whose weights are in a processor cache."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from foredraft.kernels import arena
from foredraft.kernels.arena import Arena
from foredraft.kernels.cpu.library import NativeLibrary
from foredraft.kernels.linear import linear
from foredraft.kernels.quantize import select_packers

READ_BYTES = 512 << 20  # bytes per measurement of the bandwidth
# Products that measure the arithmetic: the smaller weight stays in a second-level cache, the larger one takes so long
# that the start of a product counts less. Either is the faster one on some processors.
PEAK_ROWS, PEAK_SIZES, PEAK_ROUNDS = 256, (512, 1024), 15


@dataclass(frozen=True)
class MemoryBandwidth:
    """Bandwidth of sequential reads, in GB/s."""

    one_thread: float
    all_threads: float


def measure_bandwidth(native: NativeLibrary, rounds: int) -> MemoryBandwidth:
    """Measure sequential reads of `READ_BYTES`: the median of `rounds`, with one thread and with all."""
    # untouched zero pages may share one physical page
    memory = arena.allocate_zeros((READ_BYTES,), torch.uint8).fill_(1)
    threads, gigabytes_per_second = torch.get_num_threads(), []
    for count in (1, threads):
        torch.set_num_threads(count)
        native.sync_threads()
        times = [time_call(lambda: native.handle.fd_read_memory(memory.data_ptr(), READ_BYTES)) for _ in range(rounds)]
        gigabytes_per_second.append(READ_BYTES / statistics.median(times) / 1e9)
    torch.set_num_threads(threads)
    return MemoryBandwidth(*gigabytes_per_second)


def measure_peak(dtype: torch.dtype, quantization: str | None = None) -> float:
    """Measure 10^9 operations per second of a product in a cache, with all threads.

    Args:
        dtype: bfloat16 or float32, the type of weights that are not quantised.
        quantization: "int8" or "int4"; default None = the faster of this project's kernel and torch's product counts.

    Returns:
        10^9 additions and multiplications per second.
    """
    return max(_measure_products(size, dtype, quantization) for size in PEAK_SIZES)


def _measure_products(size: int, dtype: torch.dtype, quantization: str | None) -> float:
    weight, x = torch.randn(size, size, dtype=dtype), torch.randn(PEAK_ROWS, size, dtype=dtype)
    packed = select_packers(quantization)[0](weight, None, Arena())
    products: list[Callable[[], object]] = [lambda: linear(x, packed)]
    if quantization is None:
        products.append(lambda: functional.linear(x, weight))
    seconds = (statistics.median(time_call(product) for _ in range(PEAK_ROUNDS)) for product in products)
    return 2 * PEAK_ROWS * size**2 / min(seconds) / 1e9


def time_call(action: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
