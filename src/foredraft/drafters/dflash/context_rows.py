"""Context rows of all requests on KV pages, written from the target's states when they are first needed.

Entry t of the draft KV is the context row of token t. It depends on the tokens up to t alone.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from foredraft.drafters.common.feature_drafter import MAX_PENDING_PAIRS, PendingPairs
from foredraft.drafters.dflash.native_block import NativeBlock
from foredraft.drafters.dflash.network import BlockContext, DFlashNetwork
from foredraft.kv.allocator import NULL_PAGE
from foredraft.kv.draft_kv import DraftKV
from foredraft.kv.pool import KVPool
from foredraft.kv.weak import bind_weakly
from foredraft.models.forward_batch import ForwardBatch, Span
from foredraft.path_features import read_all
from foredraft.request import Batch, Request
from foredraft.tree import Commit


class ContextRows:
    """Store of the context rows, addressed by the page ids of the target.

    Args:
        network: network that computes the rows.
        device: device of the rows.
        native: native code of the network, which then computes them. Default None.

    Attributes:
        num_pages: pages of the pool that may hold rows: ids below this.
    """

    def __init__(self, network: DFlashNetwork, device: torch.device, native: NativeBlock | None = None) -> None:
        self.network = network
        self.device = device
        self.num_pages = 0
        self._compute_context = network.compute_context if native is None else native.compute_context
        block = network.shape.block
        row_size = 2 * network.shape.num_layers * block.kv_heads * block.head_dim
        self.draft_kv = DraftKV(
            KVPool.for_device(device, native is not None),
            row_size * network.fc.weight.dtype.itemsize,
            token_lookahead=0,
            is_rebuildable_from_tokens=False,
            flush=bind_weakly(self.flush),
        )
        self._pending: dict[int, PendingPairs] = {}  # by slot: states of tokens that have no row yet

    def observe(self, batch: Batch, commit: Commit) -> None:
        """Note the states of a step. A request with missing earlier rows is left out."""
        if commit.path_features is None:
            return
        full_slots: list[int] = []
        for b, request in enumerate(batch.requests):
            slot, tokens = request.slot, commit.tokens[b]
            if tokens and request.num_computed == self.count_rows(slot):
                pending = self._pending.setdefault(slot, PendingPairs(request, batch.page_size))
                pending.add(tokens, commit.path_features.keep(b))  # one state for every token; only their number counts
                if len(pending.tokens) >= MAX_PENDING_PAIRS:
                    full_slots.append(slot)
        self.write_pending(full_slots)

    def forget(self, slots: Sequence[int]) -> None:
        """Drop the rows of requests that left their slots."""
        for slot in slots:
            self._pending.pop(slot, None)
            self.draft_kv.num_valid.pop(slot, None)

    @torch.inference_mode()
    def flush(self, slots: Sequence[int]) -> None:
        """Write the pending rows of these slots if they complete a KV page; the prefix cache shares only full pages.

        Called through `DraftKV.flush` before the prefix cache looks at the draft KV of these slots.
        """
        self.write_pending([slot for slot in slots if self._completes_page(slot)])

    def _completes_page(self, slot: int) -> bool:
        pending, valid = self._pending.get(slot), self.draft_kv.num_valid.get(slot, 0)
        return pending is not None and valid % pending.page_size + len(pending.tokens) >= pending.page_size

    def count_rows(self, slot: int) -> int:
        """Count the leading tokens of a request that have a row, or a pending one."""
        pending = self._pending.get(slot)
        return self.draft_kv.num_valid.get(slot, 0) + (0 if pending is None else len(pending.tokens))

    def write_pending(self, slots: Iterable[int]) -> None:
        """Write all pending rows of these slots, with one product per matrix."""
        late = {slot: self._pending[slot] for slot in slots if slot in self._pending}
        if not late:
            return
        spans, features = [], []
        for slot, pending in late.items():
            start, tokens = self.draft_kv.num_valid.get(slot, 0), pending.tokens
            spans.append(Span(pending.request.pages, start, tokens, range(len(tokens))))
            features += pending.features
        page_size = next(iter(late.values())).page_size
        batch = ForwardBatch.build(spans, (), page_size, self.device)
        states = read_all(features)[None].to(self.device)
        self.num_pages = max(self.num_pages, *(max(span.pages) + 1 for span in spans))
        for layer, (keys, values) in enumerate(self._compute_context(states, batch.positions)):
            self.draft_kv.pool.write(layer, batch.write_slots, keys[0], values[0], batch.num_slots)
        for slot, span in zip(late, spans, strict=True):
            self.draft_kv.num_valid[slot] = span.num_keys
            del self._pending[slot]

    def gather(self, requests: Sequence[Request], page_size: int) -> BlockContext:
        """Gather the rows of n requests for one block each. All of their rows must be written."""
        lengths = [self.draft_kv.num_valid[request.slot] for request in requests]
        slots = torch.full((len(requests), max(lengths)), NULL_PAGE * page_size)
        for i, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            pages = torch.tensor(request.pages[: -(-length // page_size)])
            slots[i, :length] = (pages[:, None] * page_size + torch.arange(page_size)).flatten()[:length]
        slots = slots.to(self.device)
        positions = torch.arange(slots.shape[1], device=self.device).expand_as(slots)
        visible = positions < torch.tensor(lengths, device=self.device)[:, None]
        layers = self.draft_kv.pool.layers
        rows = [(_gather(layers[i][0], slots), _gather(layers[i][1], slots)) for i in range(len(layers))]
        return BlockContext(rows, positions, visible[:, None])


def _gather(stored: Tensor, slots: Tensor) -> Tensor:
    """Gather rows [n, L, Hkv, D] from [slots of the pool, Hkv, D]."""
    return stored.index_select(0, slots.flatten()).view(*slots.shape, *stored.shape[1:])
