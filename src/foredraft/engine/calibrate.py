"""Measurement of the target's forward-pass time by number of rows, for draft-length policies."""

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import islice

import torch

from foredraft.kv.allocator import PageAllocator
from foredraft.models.forward_batch import ForwardBatch, Span
from foredraft.models.hf import LM
from foredraft.source import EncoderSource

ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)
CONTEXT_TOKENS = 128  # cached tokens before the rows of each request
MAX_SINGLE_ROWS = 8  # rows: up to this count the pass is one request
ROWS_PER_REQUEST = 4  # rows of each request in larger passes
TOKEN_STEP = 7919  # between the token ids of adjacent rows; prime, so that ids repeat late
REPEATS = 3  # timed passes per row count


@torch.inference_mode()
def measure_pass_times(
    target: LM,
    allocator: PageAllocator,
    device: torch.device,
    max_seconds: float = 2.0,
    clock: Callable[[], float] = time.perf_counter,
    source: EncoderSource | None = None,
    row_counts: Sequence[int] = ROW_COUNTS,
) -> list[tuple[int, float]]:
    """Measure the median time of a forward pass for each number of rows.

    Writes to free pages: call it only while no request runs.

    Args:
        target: model to measure.
        allocator: allocator of the KV pages of the target.
        device: device of the target.
        max_seconds: time limit in seconds; row counts that would exceed it are left out.
        clock: returns seconds.
        source: encoder input of all requests, for encoder-decoder models.
        row_counts: rising numbers of rows.

    Returns:
        [(rows, seconds)], rising in rows; empty if the pool or the context is too small.
    """
    pages: list[int] = []
    max_tokens = min((allocator.num_free - 1) * allocator.page_size, target.context_length)
    length = min(CONTEXT_TOKENS, max_tokens - max(ROWS_PER_REQUEST, MAX_SINGLE_ROWS))
    if length <= 0:
        return []
    allocator.grow(pages, length + max(ROWS_PER_REQUEST, MAX_SINGLE_ROWS))
    try:
        build_batch = _make_batch_builder(target, pages, length, allocator.page_size, device, source)
        return _measure_row_counts(target, build_batch, row_counts, device, max_seconds, clock)
    finally:
        allocator.free(pages)


def _measure_row_counts(
    target: LM,
    build_batch: Callable[[int], ForwardBatch],
    row_counts: Sequence[int],
    device: torch.device,
    max_seconds: float,
    clock: Callable[[], float],
) -> list[tuple[int, float]]:
    start = clock()
    costs: list[tuple[int, float]] = []
    target.forward(build_batch(MAX_SINGLE_ROWS))  # the first call packs weights and allocates buffers
    for rows in row_counts:
        # The next row count is predicted by proportion: one untimed pass and REPEATS timed ones.
        if costs and clock() - start + costs[-1][1] * (REPEATS + 1) * rows / costs[-1][0] > max_seconds:
            break
        batch = build_batch(rows)
        target.forward(batch)
        times = [_time_pass(target, batch, device, clock) for _ in range(REPEATS)]
        costs.append((rows, statistics.median(times)))
    return costs


def _time_pass(target: LM, batch: ForwardBatch, device: torch.device, clock: Callable[[], float]) -> float:
    start = clock()
    logits, _ = target.forward(batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    else:
        float(logits[0, 0])  # reading a value waits for devices that compute asynchronously
    return clock() - start


def _make_batch_builder(
    target: LM, pages: list[int], length: int, page_size: int, device: torch.device, source: EncoderSource | None
) -> Callable[[int], ForwardBatch]:
    """Return a function that builds a batch with a given number of rows.

    All requests share the same pages, because the cached values do not affect the time.
    """

    def build_batch(rows: int) -> ForwardBatch:
        rows_each = rows if rows <= MAX_SINGLE_ROWS else ROWS_PER_REQUEST
        sizes = [rows_each] * (rows // rows_each) + ([rows % rows_each] if rows % rows_each else [])
        if target.pool.states is not None:  # the rows continue after a state, whose value does not affect the time
            target.pool.states.get_table(page_size).add(pages, length - 1)
        tokens = iter(spread_tokens(rows, target.vocab_size))
        spans = [Span(pages, length, list(islice(tokens, size)), range(size), source=source) for size in sizes]
        return ForwardBatch.build(spans, range(rows), page_size, device)

    return build_batch


def spread_tokens(count: int, vocab_size: int) -> list[int]:
    """Return token ids from all parts of a vocabulary: equal tokens would choose the same experts of a mixture."""
    return [TOKEN_STEP * (i + 1) % vocab_size for i in range(count)]
