"""Verification of drafts by the native library."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foredraft.kernels.cpu.library import NativeLibrary
from foredraft.kernels.cpu.records import SettingsRecord, WalkRequestRecord, WalksRecord
from foredraft.kernels.sampler import RACE_MARGIN, RowSettings, find_sampler
from foredraft.kernels.tree_walk import TreeWalk

INT_BYTES = 4


class WalkRequest(NamedTuple):
    """A request whose draft is verified. Its rows are consecutive, that of the root first."""

    settings: RowSettings
    seed: int  # its lowest 64 bits count
    sample_index: int
    position: int  # of the root in the sequence
    first_row: int
    num_rows: int
    walk: TreeWalk


@dataclass(frozen=True)
class TreeWalker:
    """Walks of the native library, for float32 and bfloat16 logits on the CPU."""

    library: NativeLibrary
    margin: float = RACE_MARGIN

    def walk(
        self,
        logits: Tensor,
        q: Tensor | None,
        requests: Sequence[WalkRequest],
        tokens: Sequence[int],
        parents: Sequence[int],
        num_sampled: Sequence[int] | None,
    ) -> list[tuple[list[int], list[int]] | None]:
        """Verify the drafts of B requests.

        Args:
            logits: [R, V].
            q: distributions that children were sampled from, [R, V] float32; None = none was sampled.
            requests: B requests.
            tokens: R tokens of the nodes.
            parents: R parents of the nodes, counted from the root of their request; -1 for a root.
            num_sampled: R numbers of leading children that were sampled; None = all of a row that has a q.

        Returns:
            For each request its committed nodes, counted from the root, and the token after each of them. If the logits
            at its last node are invalid, that node is missing, and no node is left if those at the root are. None for a
            request with a token that rounding decides about; it is left to the reference.
        """
        packed = (WalkRequestRecord * len(requests))(
            *[WalkRequestRecord(SettingsRecord(*request.settings), *request[1:]) for request in requests]
        )
        size, num_requests = len(tokens), len(requests)
        given = np.array([*tokens, *parents, *(num_sampled or ())], dtype=np.int32)
        out = np.empty(2 * size + num_requests, dtype=np.int32)  # nodes, the tokens after them, counts
        inputs, outputs, step = given.ctypes.data, out.ctypes.data, INT_BYTES * size
        self.library.sync_threads()
        job = WalksRecord(
            logits.data_ptr(),
            None if q is None else q.data_ptr(),
            inputs,
            inputs + step,
            None if num_sampled is None else inputs + 2 * step,
            packed,
            outputs,
            outputs + step,
            outputs + 2 * step,
            logits.stride(0),
            0 if q is None else q.stride(0),
            self.margin,
            num_requests,
            logits.shape[-1],
            logits.dtype == torch.bfloat16,
        )
        if self.library.handle.fd_walk_trees(job):
            raise MemoryError(f"no memory to verify drafts over {logits.shape[-1]} tokens")
        numbers = out.tolist()
        spans = [(r.first_row, count) for r, count in zip(requests, numbers[2 * size :], strict=True)]
        return [
            None if count < 0 else (numbers[row : row + count], numbers[size + row : size + row + count])
            for row, count in spans
        ]


def find_tree_walker(logits: Tensor) -> TreeWalker | None:
    """Return the walker for logits [R, V]; None if they are not its kind, or without the native library."""
    sampler = find_sampler(logits)
    return None if sampler is None else TreeWalker(sampler.library)
