"""Inputs of a recorded draft loop: everything that the host knows before the loop, in one block."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foredraft.drafters.common.device_loop.plan import LoopPlan
from foredraft.drafters.common.device_loop.shape import FixedShape
from foredraft.drafters.common.tree_builder import TreeBuilder
from foredraft.kernels.gpu.staging import Fields, StagingBlock
from foredraft.kv.allocator import NULL_PAGE
from foredraft.sampling import rng
from foredraft.sampling.rng import NoiseStream
from foredraft.sampling.row_settings import RowSettings

INT, LONG, REAL = torch.int32, torch.int64, torch.float64


@dataclass(frozen=True)
class DraftLoopInputs:
    """Inputs of one recording: the block, and the outputs of the passes before the loop."""

    plan: LoopPlan
    page_size: int
    block: StagingBlock
    roots: tuple[Tensor, ...]  # [B, ..] each: what the network reads of every root
    place_tables: tuple[Tensor, ...]  # of a fixed shape, by level: [F] places of the next frontier among the children
    numbers: Tensor  # 0, 1, 2 and so on

    @classmethod
    def make(cls, plan: LoopPlan, page_size: int, roots: Sequence[Tensor]) -> "DraftLoopInputs":
        """Make the inputs of a plan. `roots` are those of some requests, as samples of their shapes and dtypes."""
        device = roots[0].device
        block = StagingBlock.make(_list_fields(plan, page_size), device)
        made = tuple(root.new_zeros(plan.num_requests, *root.shape[1:]) for root in roots)
        levels = plan.shape.levels if isinstance(plan.shape, FixedShape) else ()
        tables = tuple(torch.tensor(level.next_rows, dtype=LONG, device=device) for level in levels)
        return cls(plan, page_size, block, made, tables, torch.arange(_count_numbers(plan), device=device))

    def count_up(self, size: int) -> Tensor:
        """Return 0 to size - 1, as a view of a tensor that was made before the recording."""
        return self.numbers[:size]

    def __getitem__(self, name: str) -> Tensor:
        """Return a list on the device."""
        return self.block.device[name]

    @property
    def num_pages(self) -> int:
        """Pages of a request."""
        return -(-self.plan.context // self.page_size)

    def fill(self, builders: Sequence[TreeBuilder], starts: Sequence[int] | None, roots: Sequence[Tensor]) -> None:
        """Write the inputs of some drafts and send them to the device.

        Args:
            builders: drafts with their roots only.
            starts: KV position of every root; None = the network has no KV cache.
            roots: what the network reads of every root, [b, ..] each.
        """
        self.block.host_block.zero_()
        host = {name: x.numpy() for name, x in self.block.host.items()}
        host["end_ids"].fill(-1)
        for b, g in enumerate(builders):
            self._fill_request(host, b, g)
            if starts is not None:
                self._fill_pages(host, b, g.request.pages, starts[b])
        host["temperature"][len(builders) :] = 1.0
        host["top_p"][len(builders) :] = 1.0
        self.block.upload()
        for mine, given in zip(self.roots, roots, strict=True):
            mine[: len(given)] = given

    def _fill_request(self, host: Any, b: int, g: TreeBuilder) -> None:
        request, spec = g.request, g.request.spec
        ends = sorted(spec.end_ids)
        host["end_ids"][b, : len(ends)] = ends
        host["root_tokens"][b] = request.get_token(request.num_tokens - 1)
        if isinstance(self.plan.shape, FixedShape):
            host["counts"][b] = self.plan.shape.count_children(g.tree_spec)
        else:
            host["max_nodes"][b], host["max_depth"][b] = g.tree_spec.max_nodes, g.tree_spec.max_depth
        s, is_greedy = spec.sampling, g.is_greedy  # a greedy draft ranks tokens, without temperature and filters
        host["temperature"][b] = 1.0 if is_greedy else s.temperature
        host["top_k"][b] = 0 if is_greedy else s.top_k
        host["top_p"][b] = 1.0 if is_greedy else s.top_p
        host["min_p"][b] = 0.0 if is_greedy else s.min_p
        host["uses_q"][b], host["is_raced"][b] = g.uses_q, g.uses_q or g.shares_noise
        # The rest of the path of counters is added on the device: see `draft_noise_key`.
        position = request.num_tokens - 1
        if g.shares_noise:
            host["key"][b] = rng.derive_key(spec.seed, spec.sample_index, NoiseStream.TOKEN)
            host["counter"][b] = position + 1
        else:
            host["key"][b] = rng.derive_key(spec.seed, spec.sample_index, NoiseStream.DRAFT, position)
        host["stream"][b] = g.draft_stream

    def _fill_pages(self, host: Any, b: int, pages: Sequence[int], start: int) -> None:
        table = np.asarray(pages, dtype=np.int32)
        host["start"][b] = start
        count = min(len(table), self.num_pages)
        host["pages"][b, :count] = table[:count]
        at = start + np.arange(self.plan.num_slots)
        page = at // self.page_size
        # a draft with a smaller budget has pages for its own positions only
        is_reserved = page < len(table)
        slots = table[np.minimum(page, len(table) - 1)] * self.page_size + at % self.page_size
        host["slots"][b] = np.where(is_reserved, slots, NULL_PAGE * self.page_size)
        host["is_reserved"][b] = is_reserved

    def select_settings(self, expand: Callable[[Tensor], Tensor]) -> RowSettings:
        """Return the sampling settings of the rows of a level; `expand` repeats one [B] for every row."""
        names = ("temperature", "top_k", "top_p", "min_p")
        return RowSettings(self.plan.filters, *(expand(self[name]) for name in names))


def _count_numbers(plan: LoopPlan) -> int:
    """Return the longest count of a loop: rows of a level, or nodes of a draft that are compared."""
    if isinstance(plan.shape, FixedShape):
        return 1 + plan.num_requests * max(len(level.paths) for level in plan.shape.levels)
    width = plan.shape.width
    return 1 + max(plan.num_requests * width, plan.shape.max_nodes + width * width)


def _list_fields(plan: LoopPlan, page_size: int) -> Fields:
    b = plan.num_requests
    fields: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "root_tokens": ((b,), LONG),
        "end_ids": ((b, plan.num_end_ids), LONG),
        "temperature": ((b,), REAL),
        "top_k": ((b,), LONG),
        "top_p": ((b,), REAL),
        "min_p": ((b,), REAL),
        "uses_q": ((b,), INT),
        "is_raced": ((b,), INT),
        "key": ((b,), LONG),
        "counter": ((b,), LONG),
        "stream": ((b,), LONG),
    }
    if isinstance(plan.shape, FixedShape):
        fields["counts"] = (b, plan.shape.num_nodes), LONG
    else:
        fields |= {"max_nodes": ((b,), LONG), "max_depth": ((b,), LONG)}
    if plan.context:
        fields |= {
            "start": ((b,), INT),
            "pages": ((b, -(-plan.context // page_size)), INT),
            "slots": ((b, plan.num_slots), INT),
            "is_reserved": ((b, plan.num_slots), INT),
        }
    return fields
