"""What a pass of the target costs by its number of rows, measured on the spot."""

import statistics
import time
from collections.abc import Callable

import torch

from foredraft.kv.blocks import PageAllocator
from foredraft.models.lm import LM
from foredraft.models.window import Span, Window
from foredraft.source import Source

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)
CONTEXT = 128  # tokens before every request's rows
ROWS_EACH = 4  # of one request, where there are several
REPEATS = 3


@torch.inference_mode()
def pass_times(
    target: LM,
    allocator: PageAllocator,
    device: torch.device,
    most_seconds: float = 2.0,
    clock: Callable[[], float] = time.perf_counter,
    source: Source | None = None,
) -> list[tuple[int, float]]:
    """[(rows, seconds)], rising in rows, medians. Stops early where the next would take more time than is left.

    Writes to pages that are free: call it while nothing runs. source: what all requests read, for a model that has an
    encoder.
    """
    pages: list[int] = []
    room = min((allocator.num_free - 1) * allocator.page_size, target.context_length)
    length = min(CONTEXT, room - max(ROWS_EACH, 8))
    if length <= 0:
        return []
    allocator.grow(pages, length + max(ROWS_EACH, 8))
    try:
        windows = _windows(pages, length, allocator.page_size, device, source)
        return _measure(target, windows, device, most_seconds, clock)
    finally:
        allocator.free(pages)


def _measure(
    target: LM,
    windows: Callable[[int], Window],
    device: torch.device,
    most_seconds: float,
    clock: Callable[[], float],
) -> list[tuple[int, float]]:
    began = clock()
    found: list[tuple[int, float]] = []
    target.forward(windows(8))  # the first call packs, allocates and warms
    for rows in ROWS:
        if found and clock() - began + found[-1][1] * (REPEATS + 1) * rows / found[-1][0] > most_seconds:
            break
        window = windows(rows)
        target.forward(window)
        times = [_timed(target, window, device, clock) for _ in range(REPEATS)]
        found.append((rows, statistics.median(times)))
    return found


def _timed(target: LM, window: Window, device: torch.device, clock: Callable[[], float]) -> float:
    began = clock()
    logits, _ = target.forward(window)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    else:
        float(logits[0, 0])
    return clock() - began


def _windows(
    pages: list[int], length: int, page_size: int, device: torch.device, source: Source | None
) -> Callable[[int], Window]:
    """By rows: one request of up to 8, or several of ROWS_EACH, on the same pages: what those hold does not matter."""

    def window(rows: int) -> Window:
        each = rows if rows <= 8 else ROWS_EACH
        sizes = [each] * (rows // each) + ([rows % each] if rows % each else [])
        spans = [Span(pages, length, [1] * size, range(size), source=source) for size in sizes]
        return Window.build(spans, range(rows), page_size, device)

    return window
