"""Compaction of the target's KV and recurrent states after a step."""

import torch

from foredraft.kv.pool import KVPool, compact_accepted
from foredraft.request import Batch
from foredraft.tree import Commit


def compact_kv(pool: KVPool, batch: Batch, commit: Commit, device: torch.device) -> None:
    """Move the KV of each accepted path to consecutive positions, if rejected nodes lie between its nodes.

    Args:
        pool: KV pool of the target.
        batch: requests of the step; `num_computed` is that before the step.
        commit: accepted paths.
        device: device of the pool.
    """
    # The nodes of a path increase from 0. So a path is 0, 1, 2 and so on if its last node is its length - 1.
    has_states = pool.states is not None  # then the rejected nodes have states to free
    moved = [b for b, path in enumerate(commit.paths) if has_states or (path and path[-1] >= len(path))]
    if moved:
        requests = [batch.requests[b] for b in moved]
        starts, pages = [r.num_computed for r in requests], [r.pages for r in requests]
        compact_accepted(pool, [commit.paths[b] for b in moved], starts, pages, batch.page_size, device)
