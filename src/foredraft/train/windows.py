"""Rows of equal length, cut from documents, and the order in which they are read. This file does not know models."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.source import EncoderSource
from foredraft.train.documents import Document, TokenIds

OPEN_ROWS = 16  # partly filled rows that are considered for a short piece


@dataclass(frozen=True)
class TokenWindows:
    """Rows of `context` + 1 tokens.

    A document begins its own row and continues in the next, with one token repeated. The ends of documents share rows.
    Rows are padded with token 0, which has no loss. A document with a source has one row, which is cut at `context` + 1
    tokens.
    """

    context: int
    ids: TokenIds  # [T] all documents, concatenated
    loss_mask: NDArray[np.bool_]  # [T]
    rows: tuple[tuple[tuple[int, int], ...], ...]  # the pieces [start, stop) of every row
    sources: tuple[tuple[int, ...], ...] = ()  # token ids of the source of every row; () without sources

    @classmethod
    def pack(cls, documents: Sequence[Document], context: int) -> "TokenWindows":
        """Pack documents into rows. Pieces without a token to learn are dropped.

        Args:
            documents: Documents in order; all of them have a source, or none.
            context: Tokens per row, without the last label.

        Raises:
            ForedraftError: if no token is left to learn.
        """
        if not documents:
            raise ForedraftError("the data holds no text to learn from; give files with text in them")
        ids = np.concatenate([document.ids for document in documents])
        loss_mask = np.concatenate([document.loss_mask for document in documents])
        counts = np.concatenate([[0], np.cumsum(loss_mask)])
        full: list[tuple[tuple[int, int], ...]] = []
        short: list[tuple[int, int]] = []
        sources: list[tuple[int, ...]] = []
        offset = 0
        for document in documents:
            end = offset + len(document.ids)
            # A row with a source must begin where the decoder begins.
            for start in range(offset, end - 1, context) if document.source is None else (offset,):
                stop = min(start + context + 1, end)
                if counts[stop] == counts[start + 1]:  # the first token of a piece is never learnt
                    continue
                if document.source is not None:
                    sources.append(document.source)
                if stop - start == context + 1 or document.source is not None:
                    full.append(((start, stop),))
                else:
                    short.append((start, stop))
            offset = end
        rows = (*full, *_pack_pieces(short, context + 1))
        if not rows:
            raise ForedraftError(
                "the data holds no token to learn: the documents are empty, or no reply is the assistant's"
            )
        return cls(context, ids, loss_mask, rows, tuple(sources))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_loss_tokens(self) -> int:
        """Number of tokens that one pass over all rows learns."""
        return sum(int(self.loss_mask[start + 1 : stop].sum()) for row in self.rows for start, stop in row)

    def read(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Read rows.

        Returns:
            [B, context + 1] token ids, and [B, context + 1] mask of the tokens to learn.
        """
        tokens = np.zeros((len(indices), self.context + 1), dtype=np.int64)
        mask = np.zeros(tokens.shape, dtype=np.bool_)
        for b, index in enumerate(indices):
            offset = 0
            for start, stop in self.rows[index]:
                tokens[b, offset : offset + stop - start] = self.ids[start:stop]
                mask[b, offset + 1 : offset + stop - start] = self.loss_mask[start + 1 : stop]
                offset += stop - start
        return torch.from_numpy(tokens), torch.from_numpy(mask)

    def read_with_sources(self, indices: Sequence[int]) -> tuple[Tensor, Tensor, tuple[EncoderSource, ...]]:
        """Read rows and their sources. Rows with sources end at the last token to learn of the longest one.

        Returns:
            [B, L + 1] token ids, [B, L + 1] mask of the tokens to learn, and B sources, () for a decoder alone.
        """
        tokens, mask = self.read(indices)
        sources = self.get_sources(indices)
        length = 1 + int(mask.any(0).nonzero().max()) if sources else tokens.shape[1]
        return tokens[:, :length], mask[:, :length], sources

    def get_sources(self, indices: Sequence[int]) -> tuple[EncoderSource, ...]:
        """Return the sources of rows; () for a decoder alone."""
        return tuple(EncoderSource(self.sources[index]) for index in indices) if self.sources else ()


def _pack_pieces(pieces: Sequence[tuple[int, int]], size: int) -> list[tuple[tuple[int, int], ...]]:
    """Pack pieces shorter than a row: each goes into the first open row with room."""
    closed: list[tuple[tuple[int, int], ...]] = []
    rows: list[list[tuple[int, int]]] = []
    room: list[int] = []
    for start, stop in pieces:
        length = stop - start
        index = next((i for i, free in enumerate(room) if free >= length), None)
        if index is None:
            if len(rows) == OPEN_ROWS:
                fullest = room.index(min(room))
                closed.append(tuple(rows.pop(fullest)))
                room.pop(fullest)
            rows.append([])
            room.append(size)
            index = len(rows) - 1
        rows[index].append((start, stop))
        room[index] -= length
    return closed + [tuple(row) for row in rows]


class RowOrder:
    """Order of the rows: every pass over the data has its own permutation, which depends only on the seed."""

    def __init__(self, num_rows: int, seed: int) -> None:
        self.num_rows = num_rows
        self.seed = seed
        self._epoch, self._permutation = -1, np.zeros(0, dtype=np.int64)

    def take(self, first: int, count: int) -> list[int]:
        """Return rows [first, first + count) of the endless sequence of passes."""
        return [self._find_row(i) for i in range(first, first + count)]

    def _find_row(self, index: int) -> int:
        epoch, offset = divmod(index, self.num_rows)
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = np.random.default_rng((self.seed, epoch)).permutation(self.num_rows)
        return int(self._permutation[offset])
