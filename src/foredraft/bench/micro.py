"""The kernels by themselves: products with weights that no cache holds, against the bandwidth measured between them."""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from foredraft.bench.report import Report, Table, machine, machine_note
from foredraft.errors import ForedraftError
from foredraft.kernels import arena
from foredraft.kernels.arena import Arena
from foredraft.kernels.attention import attend
from foredraft.kernels.cpu.library import Library, library
from foredraft.kernels.linear import PackedWeight, linear
from foredraft.kernels.quantize import packers
from foredraft.models.window import Span, Window

COLD = 256 << 20  # bytes of weights in turn: more than a cache holds
READ = 512 << 20
KINDS = {"bfloat16": None, "float32": None, "int8": "int8", "int4": "int4"}
PAGE = 16


@dataclass(frozen=True)
class Plan:
    shapes: tuple[tuple[int, int], ...] = ((6144, 1536), (1536, 4096))  # outputs, inputs
    rows: tuple[int, ...] = (1, 2, 4, 5, 8, 16, 32)
    kinds: tuple[str, ...] = tuple(KINDS)
    contexts: tuple[int, ...] = (256, 1024)
    heads: tuple[int, int, int] = (24, 8, 64)  # of queries, of keys, their width
    rounds: int = 7

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in KINDS:
                raise ForedraftError(f"unknown kind of weights {kind!r}; use {', '.join(KINDS)}")


@dataclass(frozen=True)
class Product:
    kind: str
    outputs: int
    inputs: int
    rows: int
    microseconds: float
    gigabytes: float  # of weights per second
    share: float  # of the bandwidth read in the same run
    ratio: float  # time over that of one row
    over_torch: float | None  # torch's time over ours; None where torch has no such product


@dataclass(frozen=True)
class Mix:
    context: int
    rows: int
    microseconds: float
    over_torch: float


@dataclass(frozen=True)
class Bandwidth:
    one_thread: float  # GB/s
    all_threads: float


def run(plan: Plan, step: Callable[[str], None] = lambda title: None) -> Report:
    """Everything in turn, round by round; medians. Raises ForedraftError without native kernels."""
    native = library()
    if native is None:
        raise ForedraftError("there are no native kernels to measure; run: python -m foredraft.kernels.cpu.build")
    step("reading memory")
    bandwidth = _bandwidth(native, plan.rounds)
    products = []
    for kind in plan.kinds:
        for shape in plan.shapes:
            step(f"{kind} {shape[0]} x {shape[1]}")
            products += list(_products(native, plan, kind, shape))
    mixes = []
    for context in plan.contexts:
        step(f"attention to {context} tokens")
        mixes += [_mix(plan, context, rows) for rows in plan.rows]
    return _report(native, plan, bandwidth, products, mixes)


def _bandwidth(native: Library, rounds: int) -> Bandwidth:
    memory = arena.zeros((READ,), torch.uint8).fill_(1)  # pages of zeros may all be the same one
    threads, found = torch.get_num_threads(), []
    for count in (1, threads):
        torch.set_num_threads(count)
        native.follow_threads()
        times = [_timed(lambda: native.handle.fd_read(memory.data_ptr(), READ)) for _ in range(rounds)]
        found.append(READ / statistics.median(times) / 1e9)
    torch.set_num_threads(threads)
    return Bandwidth(*found)


def _timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _products(native: Library, plan: Plan, kind: str, shape: tuple[int, int]) -> Iterator[Product]:
    n, k = shape
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    pack = packers(KINDS[kind])[0]
    memory = Arena()
    first = pack(torch.randn(n, k, dtype=dtype), None, memory)
    size = first.data.nbytes + (0 if first.scale is None else first.scale.nbytes)
    count = -(-COLD // size)
    packed = [first, *(pack(torch.randn(n, k, dtype=dtype), None, memory) for _ in range(count - 1))]
    dense = [torch.randn(n, k, dtype=dtype) for _ in range(-(-COLD // (n * k * dtype.itemsize)))]
    probe = arena.zeros((COLD,), torch.uint8).fill_(1)
    has_torch = KINDS[kind] is None
    times: dict[int, list[tuple[float, float, float]]] = {rows: [] for rows in plan.rows}
    for _ in range(plan.rounds):
        for rows in plan.rows:
            x = torch.randn(rows, k, dtype=dtype)
            read = _timed(lambda: native.handle.fd_read(probe.data_ptr(), COLD))
            ours = _timed(lambda x=x: _each(linear, x, packed)) / count  # type: ignore[misc]
            theirs = _timed(lambda x=x: _each(F.linear, x, dense)) / len(dense) if has_torch else 0.0  # type: ignore[misc]
            times[rows].append((ours, theirs, COLD / read / 1e9))
    base = statistics.median(ours for ours, _, _ in times[plan.rows[0]])
    for rows in plan.rows:
        ours, theirs, read = (statistics.median(column) for column in zip(*times[rows], strict=True))
        speed = size / ours / 1e9
        over = theirs / ours if has_torch else None
        yield Product(kind, n, k, rows, ours * 1e6, speed, speed / read, ours / base, over)


def _each(product: Callable[..., Tensor], x: Tensor, weights: "list[PackedWeight] | list[Tensor]") -> None:
    for weight in weights:
        product(x, weight)


def _mix(plan: Plan, context: int, rows: int) -> Mix:
    heads, kv_heads, width = plan.heads
    pages = list(range(1, 2 + -(-(context + rows) // PAGE)))
    slots = (pages[-1] + 1) * PAGE
    keys, values = (torch.randn(slots, kv_heads, width).bfloat16() for _ in range(2))
    query = torch.randn(rows, heads, width).bfloat16()
    packed = Window.build([Span(pages, context, [0] * rows, range(rows))], [0], PAGE, "cpu").packed
    held = slice(PAGE, PAGE + context + rows)
    mask = torch.ones(rows, context + rows, dtype=torch.bool).tril(context)
    q, k, v = (x.transpose(0, 1)[None] for x in (query, keys[held], values[held]))

    def theirs() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    times = []
    for _ in range(4 * plan.rounds):
        ours = _timed(lambda: attend(query, keys, values, packed, width**-0.5))
        times.append((ours, _timed(theirs)))
    ours, other = (statistics.median(column) for column in zip(*times, strict=True))
    return Mix(context, rows, ours * 1e6, other / ours)


def _report(native: Library, plan: Plan, bandwidth: Bandwidth, products: list[Product], mixes: list[Mix]) -> Report:
    facts = machine()
    notes = (
        machine_note(facts) + f"; kernels for {native.instruction_set}",
        f"memory read at {bandwidth.one_thread:.1f} GB/s by one thread, {bandwidth.all_threads:.1f} by all; the share "
        "is of the reading done between the products",
        f"weights take turns, {COLD >> 20} MB of them, so that no cache holds them; medians of {plan.rounds} rounds",
        f"attention of {plan.heads[0]} heads on {plan.heads[1]}, {plan.heads[2]} wide, in bfloat16; torch's needs its "
        "keys in one piece, ours reads pages",
    )
    linear_rows = tuple(
        (
            p.kind,
            f"{p.outputs} x {p.inputs}",
            str(p.rows),
            f"{p.microseconds:.0f}",
            f"{p.gigabytes:.1f}",
            f"{100 * p.share:.0f} %",
            f"{p.ratio:.2f}",
            "" if p.over_torch is None else f"{p.over_torch:.2f}x",
        )
        for p in products
    )
    header = ("weights", "shape", "rows", "us", "GB/s", "of memory", "T(rows) / T(1)", "torch takes")
    mix_rows = tuple((str(m.context), str(m.rows), f"{m.microseconds:.0f}", f"{m.over_torch:.2f}x") for m in mixes)
    tables = (
        Table("Products", header, linear_rows, 3),
        Table("Attention", ("context", "rows", "us", "torch takes"), mix_rows, 2),
    )
    data = {"machine": facts, "bandwidth": bandwidth, "products": products, "attention": mixes, "plan": plan}
    return Report("Kernels", notes, tables, data)
