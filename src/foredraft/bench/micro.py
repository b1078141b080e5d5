"""Benchmark of single kernels: matrix products and attention.

Weights exceed every processor cache. Their throughput is compared with the memory bandwidth that is measured between
the products.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from foredraft.bench.machine_speed import MemoryBandwidth, measure_bandwidth, measure_peak, time_call
from foredraft.bench.report import BenchReport, ReportTable, describe_machine, format_machine_note
from foredraft.errors import ForedraftError
from foredraft.kernels import arena
from foredraft.kernels.arena import Arena
from foredraft.kernels.attention import attend, pack_codes
from foredraft.kernels.cpu.library import NativeLibrary, load_library
from foredraft.kernels.linear import PackedWeight, linear
from foredraft.kernels.quantize import select_packers
from foredraft.kernels.tuning import Tuning, tune_products
from foredraft.models.forward_batch import ForwardBatch, Span

COLD_BYTES = 256 << 20  # bytes of weights that are multiplied in turn, more than a cache holds
WEIGHT_KINDS = {"bfloat16": None, "float32": None, "int8": "int8", "int4": "int4"}
KEY_KINDS = ("bfloat16", "int8")  # formats of keys and values
PAGE_SIZE = 16  # slots of a KV page
ATTENTION_REPEATS = 4  # measurements of attention per round


@dataclass(frozen=True)
class KernelBenchPlan:
    """Shapes and kinds of weights to measure."""

    shapes: tuple[tuple[int, int], ...] = ((6144, 1536), (1536, 4096))  # outputs, inputs
    rows: tuple[int, ...] = (1, 2, 4, 5, 8, 16, 32)  # tokens per pass
    kinds: tuple[str, ...] = tuple(WEIGHT_KINDS)
    contexts: tuple[int, ...] = (256, 1024)  # tokens before the rows of attention
    heads: tuple[int, int, int] = (24, 8, 64)  # query heads, key heads, head dimension
    rounds: int = 7

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in WEIGHT_KINDS:
                raise ForedraftError(f"unknown kind of weights {kind!r}; use {', '.join(WEIGHT_KINDS)}")


@dataclass(frozen=True)
class LinearTiming:
    """Median time of one product of activations and weights."""

    kind: str
    outputs: int
    inputs: int
    rows: int
    microseconds: float
    gigabytes: float  # weights read, GB/s
    share: float  # of the bandwidth in the same run
    limit_microseconds: float  # the longer of the times to read the weights and to multiply, at the speeds of the run
    ratio: float  # time over that of the first row count
    over_torch: float | None  # time of torch over that of the kernel; None if torch has no such product


@dataclass(frozen=True)
class AttentionTiming:
    """Median time of attention over a context."""

    keys: str  # format of keys and values
    context: int
    rows: int
    microseconds: float
    limit_microseconds: float  # to multiply, at the speed of bfloat16 products; keys and values may be in a cache
    over_torch: float  # time of torch, with keys and values in bfloat16, over that of the kernel


def run(plan: KernelBenchPlan, on_progress: Callable[[str], None] = lambda title: None) -> BenchReport:
    """Measure bandwidth, products and attention.

    Raises:
        ForedraftError: the native kernels are not available.
    """
    native = load_library()
    if native is None:
        raise ForedraftError("there are no native kernels to measure; run: python -m foredraft.kernels.cpu.build")
    on_progress("tuning")
    tune_products(native)
    on_progress("reading memory")
    bandwidth = measure_bandwidth(native, plan.rounds)
    linear_timings = []
    for kind in plan.kinds:
        for shape in plan.shapes:
            on_progress(f"{kind} {shape[0]} x {shape[1]}")
            linear_timings += list(_measure_linear(native, plan, kind, shape))
    attention_timings: list[AttentionTiming] = []
    for context in plan.contexts:
        on_progress(f"attention to {context} tokens")
        for rows in plan.rows:
            attention_timings += _measure_attention(plan, context, rows)
    return _build_report(native, plan, bandwidth, linear_timings, attention_timings)


def _describe_tunings(tunings: tuple[Tuning, ...]) -> str:
    parts = (
        f"{name}: prefetch {tuning.prefetch} bytes, {tuning.vectors} vectors, chunks of {tuning.chunk_bytes >> 10} KiB"
        for name, tuning in zip(("1 row", "2 to 4", "more"), tunings, strict=True)
    )
    return f"tuning by rows: {'; '.join(parts)}"


def _measure_linear(
    native: NativeLibrary, plan: KernelBenchPlan, kind: str, shape: tuple[int, int]
) -> Iterator[LinearTiming]:
    n, k = shape
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    pack = select_packers(WEIGHT_KINDS[kind])[0]
    memory = Arena()
    first_weight = pack(torch.randn(n, k, dtype=dtype), None, memory)
    size = first_weight.data.nbytes + (0 if first_weight.scale is None else first_weight.scale.nbytes)
    count = -(-COLD_BYTES // size)
    packed = [first_weight, *(pack(torch.randn(n, k, dtype=dtype), None, memory) for _ in range(count - 1))]
    dense = [torch.randn(n, k, dtype=dtype) for _ in range(-(-COLD_BYTES // (n * k * dtype.itemsize)))]
    read_buffer = arena.allocate_zeros((COLD_BYTES,), torch.uint8).fill_(1)
    has_torch = WEIGHT_KINDS[kind] is None
    times: dict[int, list[tuple[float, float, float]]] = {rows: [] for rows in plan.rows}
    peaks = []
    for _ in range(plan.rounds):
        peaks.append(measure_peak(dtype, WEIGHT_KINDS[kind]))
        for rows in plan.rows:
            x = torch.randn(rows, k, dtype=dtype)
            read_seconds = time_call(lambda: native.handle.fd_read_memory(read_buffer.data_ptr(), COLD_BYTES))
            native_seconds = time_call(lambda x=x: _multiply_all(linear, x, packed)) / count  # type: ignore[misc]
            torch_seconds = time_call(lambda x=x: _multiply_all(F.linear, x, dense)) / len(dense) if has_torch else 0.0  # type: ignore[misc]
            times[rows].append((native_seconds, torch_seconds, COLD_BYTES / read_seconds / 1e9))
    base = statistics.median(native_seconds for native_seconds, _, _ in times[plan.rows[0]])
    for rows in plan.rows:
        native_seconds, torch_seconds, read_speed = (
            statistics.median(column) for column in zip(*times[rows], strict=True)
        )
        speed = size / native_seconds / 1e9
        over_torch = torch_seconds / native_seconds if has_torch else None
        limit_seconds = max(size / read_speed, 2 * rows * n * k / statistics.median(peaks)) / 1e9
        yield LinearTiming(
            kind, n, k, rows, native_seconds * 1e6, speed, speed / read_speed, limit_seconds * 1e6,
            native_seconds / base, over_torch,
        )  # fmt: skip


def _multiply_all(product: Callable[..., Tensor], x: Tensor, weights: "list[PackedWeight] | list[Tensor]") -> None:
    for weight in weights:
        product(x, weight)


def _measure_attention(plan: KernelBenchPlan, context: int, rows: int) -> Iterator[AttentionTiming]:
    heads, kv_heads, width = plan.heads
    pages = list(range(1, 2 + -(-(context + rows) // PAGE_SIZE)))
    slots = (pages[-1] + 1) * PAGE_SIZE
    keys, values = (torch.randn(slots, kv_heads, width).bfloat16() for _ in range(2))
    query = torch.randn(rows, heads, width).bfloat16()
    packed = ForwardBatch.build([Span(pages, context, [0] * rows, range(rows))], [0], PAGE_SIZE, "cpu").packed_rows
    used_slots = slice(PAGE_SIZE, PAGE_SIZE + context + rows)
    mask = torch.ones(rows, context + rows, dtype=torch.bool).tril(context)
    q, k, v = (x.transpose(0, 1)[None] for x in (query, keys[used_slots], values[used_slots]))
    pools = {"bfloat16": (keys, values), "int8": (pack_codes(keys), pack_codes(values))}

    def attend_with_torch() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    times: dict[str, list[float]] = {name: [] for name in (*KEY_KINDS, "torch")}
    peaks = [measure_peak(torch.bfloat16) for _ in range(plan.rounds)]
    for _ in range(ATTENTION_REPEATS * plan.rounds):
        for kind in KEY_KINDS:
            seconds = time_call(lambda kind=kind: attend(query, *pools[kind], packed, width**-0.5))  # type: ignore[misc]
            times[kind].append(seconds)
        times["torch"].append(time_call(attend_with_torch))
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    # every row sees the context, the rows before it and itself; scores and the sum of values take a product each
    pairs = rows * context + rows * (rows + 1) // 2
    limit_seconds = 2 * 2 * heads * width * pairs / statistics.median(peaks) / 1e9
    for kind in KEY_KINDS:
        yield AttentionTiming(
            kind, context, rows, medians[kind] * 1e6, limit_seconds * 1e6, medians["torch"] / medians[kind]
        )


def _build_report(
    native: NativeLibrary,
    plan: KernelBenchPlan,
    bandwidth: MemoryBandwidth,
    linear_timings: list[LinearTiming],
    attention_timings: list[AttentionTiming],
) -> BenchReport:
    facts = describe_machine()
    notes = (
        format_machine_note(facts) + f"; kernels for {native.instruction_set}",
        f"memory read at {bandwidth.one_thread:.1f} GB/s by one thread, {bandwidth.all_threads:.1f} by all; the share "
        "is of the bandwidth measured between the products",
        "limit: the longer of the times to read the weights and of the products in a cache, in brackets how much of it "
        "is reached; of attention the products alone",
        _describe_tunings(tune_products(native)),
        f"{COLD_BYTES >> 20} MB of weights take turns, so that no cache holds them; medians of {plan.rounds} rounds",
        f"attention of {plan.heads[0]} heads on {plan.heads[1]}, {plan.heads[2]} wide, queries in bfloat16; torch gets "
        "contiguous keys in bfloat16, the kernel reads pages",
    )
    linear_rows = tuple(
        (
            p.kind,
            f"{p.outputs} x {p.inputs}",
            str(p.rows),
            f"{p.microseconds:.0f}",
            f"{p.gigabytes:.1f}",
            f"{100 * p.share:.0f} %",
            f"{p.limit_microseconds:.0f} ({100 * p.limit_microseconds / p.microseconds:.0f} %)",
            f"{p.ratio:.2f}",
            "" if p.over_torch is None else f"{p.over_torch:.2f}x",
        )
        for p in linear_timings
    )
    header = ("weights", "shape", "rows", "us", "GB/s", "of memory", "limit, us", "T(rows) / T(1)", "torch takes")
    attention_rows = tuple(
        (
            m.keys,
            str(m.context),
            str(m.rows),
            f"{m.microseconds:.0f}",
            f"{m.limit_microseconds:.0f}",
            f"{m.over_torch:.2f}x",
        )
        for m in attention_timings
    )
    tables = (
        ReportTable("Products", header, linear_rows, 3),
        ReportTable("Attention", ("keys", "context", "rows", "us", "limit, us", "torch takes"), attention_rows, 3),
    )
    data = {
        "machine": facts,
        "bandwidth": bandwidth,
        "products": linear_timings,
        "attention": attention_timings,
        "plan": plan,
    }
    return BenchReport("Kernels", notes, tables, data)
