"""Cases of the GPU kernels: on a GPU if there is one, else in triton's interpreter on CPU tensors.

The slots that no row sees hold NaN, so that reading one of them shows.
"""

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from torch import Tensor

from foredraft.kernels.gpu.rows import DeviceRows
from foredraft.kernels.rows import PackedRows
from foredraft.models.forward_batch import Span

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def explain_skip() -> str | None:
    """Return why the kernels cannot be tested here; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton, a dependency of development on Linux, is not installed"
    version = importlib.metadata.version("triton")
    if DEVICE == "cpu" and tuple(map(int, version.split(".")[:2])) < (3, 9):
        return f"without a GPU the tests need triton 3.9: the interpreter of {version} fails with numpy 2.4"
    return None


TRITON = pytest.mark.skipif(explain_skip() is not None, reason=str(explain_skip()))
PAGE_SIZE = 4
NUM_PAGES = 120
# Two branches of unequal depth.
TREE = (-1, 0, 0, 1, 2, 3)


@dataclass(frozen=True)
class Heads:
    """Sizes of an attention layer."""

    group: int  # query heads of a key head
    kv_heads: int = 1
    width: int = 32
    value_width: int | None = None  # None = width
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False

    def __str__(self) -> str:
        parts = [f"{self.group}x{self.kv_heads}", str(self.width)]
        parts += [f"values{self.value_width}"] if self.value_width else []
        parts += [f"window{self.window}"] if self.window else []
        parts += ["cap"] if self.softcap else []
        return "-".join([*parts, "sinks"] if self.has_sinks else parts)


@dataclass(frozen=True)
class AttentionCase:
    """Queries [T, Hq, D], keys and values of every slot [S, Hkv, D], and what the rows see."""

    heads: Heads
    spans: Sequence[Span]
    query: Tensor
    keys: Tensor
    values: Tensor
    sinks: Tensor | None
    rows: PackedRows
    counts: Sequence[int]  # rows of each request; requests without rows may stand between others
    page_size: int = PAGE_SIZE
    scale: float = 0.2

    @classmethod
    def make(
        cls, heads: Heads, spans: Sequence[Span], dtype: torch.dtype = torch.float32, page_size: int = PAGE_SIZE,
        num_pages: int = NUM_PAGES,
    ) -> "AttentionCase":  # fmt: skip
        """Make a case with random numbers; the pages of the spans lie below `num_pages`."""
        rows = PackedRows.pack(spans, [0], page_size)
        noise = torch.Generator().manual_seed(0)
        value_width = heads.value_width or heads.width
        num_heads = heads.group * heads.kv_heads
        query = torch.randn(rows.num_rows, num_heads, heads.width, generator=noise).to(dtype)
        keys = torch.randn(num_pages * page_size, heads.kv_heads, heads.width, generator=noise).to(dtype)
        values = torch.randn(num_pages * page_size, heads.kv_heads, value_width, generator=noise).to(dtype)
        sinks = torch.randn(num_heads, generator=noise).to(dtype) if heads.has_sinks else None
        seen = sorted({slot for row in range(rows.num_rows) for slot in rows.list_slots(row)})
        unseen = torch.ones(len(keys), dtype=torch.bool)
        unseen[seen] = False
        keys[unseen], values[unseen] = torch.nan, torch.nan
        counts = [len(span.tokens) for span in spans]
        return cls(heads, spans, query, keys, values, sinks, rows, counts, page_size)

    def run(self, **sizes: int) -> Tensor:
        """Run the kernel with small tiles and splits, so that short rows have several; `sizes` change its plan."""
        return self.run_plan(**({"tile": 16, "split": 32} | sizes))

    def run_plan(self, **sizes: int) -> Tensor:
        """Run the kernel with the plan of the layer, or with other sizes."""
        from foredraft.kernels.gpu.attention import AttentionPlan, attend

        heads = self.heads
        width = max(heads.width, heads.value_width or 0)
        chosen = replace(AttentionPlan.make(heads.group, width, self.keys.element_size()), **sizes)
        rows = DeviceRows.pack(self.rows, self.counts, DEVICE)
        query, keys, values = (x.to(DEVICE) for x in (self.query, self.keys, self.values))
        sinks = None if self.sinks is None else self.sinks.to(DEVICE)
        return attend(query, keys, values, rows, self.scale, heads.window, heads.softcap, sinks, chosen).cpu()

    def reference(self) -> Tensor:
        """Attend row by row in float64, over the slots that each row sees."""
        out = []
        for row in range(self.rows.num_rows):
            slots = self.rows.list_slots(row)[-self.heads.window :]
            k, v = (x[slots].double().repeat_interleave(self.heads.group, 1) for x in (self.keys, self.values))
            scores = torch.einsum("hd,lhd->hl", self.query[row].double(), k) * self.scale
            if self.heads.softcap:
                scores = self.heads.softcap * torch.tanh(scores / self.heads.softcap)
            if self.sinks is not None:
                scores = torch.cat([scores, self.sinks.double()[:, None]], 1)
            out.append(torch.einsum("hl,lhd->hd", scores.softmax(-1)[:, : len(slots)], v))
        return torch.stack(out)

    def select_row(self, row: int, seed: int = 5) -> "AttentionCase":
        """Decode the same sequence up to one row alone, as a committed sequence on other pages."""
        seen = self.rows.list_slots(row)
        (pages,) = scatter_pages([len(seen)], seed, self.page_size, len(self.keys) // self.page_size)
        rows = PackedRows.pack([Span(pages, len(seen) - 1, [7], [0])], [0], self.page_size)
        keys, values = torch.full_like(self.keys, torch.nan), torch.full_like(self.values, torch.nan)
        keys[rows.list_slots(0)], values[rows.list_slots(0)] = self.keys[seen], self.values[seen]
        return replace(self, query=self.query[row : row + 1], keys=keys, values=values, rows=rows, counts=[1])

    def select_span(self, index: int) -> "AttentionCase":
        """Run one request without the others."""
        begin = sum(len(span.tokens) for span in self.spans[:index])
        span = self.spans[index]
        rows = PackedRows.pack([span], [0], self.page_size)
        return replace(self, query=self.query[begin : begin + rows.num_rows], rows=rows, counts=[rows.num_rows])


def scatter_pages(
    lengths: Sequence[int], seed: int = 0, page_size: int = PAGE_SIZE, num_pages: int = NUM_PAGES
) -> list[list[int]]:
    """Assign pages in random order to requests of these lengths."""
    free = list(range(1, num_pages))
    Random(seed).shuffle(free)
    return [[free.pop() for _ in range(-(-length // page_size))] for length in lengths]


def make_chain(pages: Sequence[int], start: int, size: int) -> Span:
    return Span(pages, start, [7] * size, range(size))


def make_tree(pages: Sequence[int], start: int, parents: Sequence[int] = TREE) -> Span:
    depths = [0] * len(parents)
    for node, parent in enumerate(parents[1:], 1):
        depths[node] = depths[parent] + 1
    return Span(pages, start, [7] * len(parents), depths, parents)


def make_mixed_spans(seed: int = 0) -> list[Span]:
    """Make a long tree, a lone token, a prompt without committed tokens, and a chain that crosses a split."""
    starts, sizes = (78, 16, 0, 29), (len(TREE), 1, 9, 5)
    pages = scatter_pages([a + b for a, b in zip(starts, sizes, strict=True)], seed)
    return [make_tree(pages[0], starts[0])] + [make_chain(pages[i], starts[i], sizes[i]) for i in (1, 2, 3)]


def bound_error(case: AttentionCase) -> float:
    """Bound the error: of the weights and of the output by rounding to the type, and of float32 sums."""
    rounding = torch.finfo(case.query.dtype).eps
    largest = case.values.nan_to_num().abs().max().item()
    return largest * ((0 if case.query.dtype == torch.float32 else 1.5 * rounding) + 4e-6)
