"""Documents cut into rows of one length, and the order in which they are read. Knows nothing of models."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.train.documents import Document, TokenIds

OPEN_ROWS = 16  # half-filled rows that short pieces are offered to


@dataclass(frozen=True)
class TokenWindows:
    """Rows of `context` + 1 tokens. A document begins a row of its own and goes on in the next, one token repeated;
    what is left at its end shares a row with other ends. Rows are padded with token 0, which has no loss."""

    context: int
    ids: TokenIds  # [T] all documents end to end
    loss_mask: NDArray[np.bool_]  # [T]
    rows: tuple[tuple[tuple[int, int], ...], ...]  # the pieces [start, stop) of every row

    @classmethod
    def pack(cls, documents: Sequence[Document], context: int) -> "TokenWindows":
        """Raises ForedraftError if nothing is left to learn."""
        if not documents:
            raise ForedraftError("the data holds no text to learn from; give files with text in them")
        ids = np.concatenate([document.ids for document in documents])
        learnt = np.concatenate([document.loss_mask for document in documents])
        counts = np.concatenate([[0], np.cumsum(learnt)])
        full: list[tuple[tuple[int, int], ...]] = []
        ends: list[tuple[int, int]] = []
        offset = 0
        for document in documents:
            last = offset + len(document.ids)
            for start in range(offset, last - 1, context):
                stop = min(start + context + 1, last)
                if counts[stop] == counts[start + 1]:  # the first token of a piece is only read
                    continue
                if stop - start == context + 1:
                    full.append(((start, stop),))
                else:
                    ends.append((start, stop))
            offset = last
        rows = (*full, *_pack_pieces(ends, context + 1))
        if not rows:
            raise ForedraftError("the data holds no token to learn: texts are empty, or no reply is the assistant's")
        return cls(context, ids, learnt, rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_loss_tokens(self) -> int:
        """Tokens a pass over all rows learns from."""
        return sum(int(self.loss_mask[start + 1 : stop].sum()) for row in self.rows for start, stop in row)

    def read(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """[B, context + 1] token ids, and which of them are to be learnt."""
        tokens = np.zeros((len(indices), self.context + 1), dtype=np.int64)
        mask = np.zeros(tokens.shape, dtype=np.bool_)
        for b, index in enumerate(indices):
            at = 0
            for start, stop in self.rows[index]:
                tokens[b, at : at + stop - start] = self.ids[start:stop]
                mask[b, at + 1 : at + stop - start] = self.loss_mask[start + 1 : stop]
                at += stop - start
        return torch.from_numpy(tokens), torch.from_numpy(mask)


def _pack_pieces(pieces: Sequence[tuple[int, int]], size: int) -> list[tuple[tuple[int, int], ...]]:
    """Pieces shorter than a row, several to a row: each goes into the first open row that has room."""
    done: list[tuple[tuple[int, int], ...]] = []
    rows: list[list[tuple[int, int]]] = []
    room: list[int] = []
    for start, stop in pieces:
        length = stop - start
        spot = next((i for i, left in enumerate(room) if left >= length), None)
        if spot is None:
            if len(rows) == OPEN_ROWS:
                fullest = room.index(min(room))
                done.append(tuple(rows.pop(fullest)))
                room.pop(fullest)
            rows.append([])
            room.append(size)
            spot = len(rows) - 1
        rows[spot].append((start, stop))
        room[spot] -= length
    return done + [tuple(row) for row in rows]


class RowOrder:
    """Which rows a step reads: every pass over the data in an order of its own, which the seed alone decides."""

    def __init__(self, num_rows: int, seed: int) -> None:
        self.num_rows = num_rows
        self.seed = seed
        self._epoch, self._permutation = -1, np.zeros(0, dtype=np.int64)

    def take(self, first: int, count: int) -> list[int]:
        """Rows [first, first + count) of the endless sequence of passes."""
        return [self._find_row(i) for i in range(first, first + count)]

    def _find_row(self, index: int) -> int:
        epoch, place = divmod(index, self.num_rows)
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = np.random.default_rng((self.seed, epoch)).permutation(self.num_rows)
        return int(self._permutation[place])
