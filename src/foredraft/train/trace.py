"""Traces of the target: token windows in, hidden states and distributions out.

The forward passes are those that serve requests.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from foredraft.drafters.losses import TargetLogProbs, Trace
from foredraft.models.forward_batch import ForwardBatch, Span
from foredraft.models.hf import HFModel, scale_logits
from foredraft.source import EncoderSource
from foredraft.train.windows import TokenWindows

PAGE_SIZE = 16  # tokens
LOGIT_BYTES = 128 << 20  # limit of the float32 logits of one forward pass
FULL_VOCABULARY = 8192  # tokens; up to this vocabulary size the whole distribution is stored
TOP = 256  # likeliest tokens that are stored of a larger vocabulary
STATE_POSITIONS = 4096  # limit of the positions of a forward pass for states alone


def choose_top(vocab_size: int) -> int | None:
    """Return how many of the likeliest tokens to store; None = all."""
    return None if vocab_size <= FULL_VOCABULARY else TOP


@dataclass(frozen=True)
class TracePiece:
    """Positions [start, stop) of some rows, computed in one forward pass."""

    rows: range
    start: int
    stop: int


class Tracer:
    """Tracer of a frozen target, with its own KV memory that is reused for every batch.

    Args:
        target: Target to trace.
        hidden_layers: Layer boundaries whose states are recorded.
        top: Likeliest tokens to store per position; None = the whole distribution.
    """

    def __init__(self, target: HFModel, hidden_layers: Sequence[int] = (), top: int | None = None) -> None:
        self.target = target.with_new_kv()
        self.hidden_layers = tuple(hidden_layers)
        self.top = top

    def trace_rows(self, windows: TokenWindows, rows: Sequence[int]) -> Trace:
        """Trace rows of the data."""
        return self.trace(*windows.read_with_sources(rows))

    def trace(self, tokens: Tensor, mask: Tensor, sources: tuple[EncoderSource, ...] = ()) -> Trace:
        """Trace token windows.

        Args:
            tokens: [B, L + 1] token ids; the last token of a row is only a label.
            mask: [B, L + 1] tokens to learn.
            sources: B sources of an encoder-decoder model. Default () = a decoder alone.

        Returns:
            The trace, with all tensors on the target's device.
        """
        features, probs = self.run_target(tokens[:, :-1], sources)
        device = self.target.device
        return Trace(tokens.to(device), features, probs, mask.to(device), sources)

    @torch.no_grad()
    def run_target(self, tokens: Tensor, sources: tuple[EncoderSource, ...] = ()) -> tuple[Tensor, TargetLogProbs]:
        """Run the target over rows of tokens.

        Args:
            tokens: [B, L] token ids.
            sources: B sources of an encoder-decoder model. Default () = a decoder alone.

        Returns:
            Hidden states [B, L, F] and distributions [B, L, `top` or V] after each token.
        """
        num_rows, length = tokens.shape
        pieces = list(_split_rows(num_rows, length, max(1, LOGIT_BYTES // (4 * self.target.vocab_size))))
        if len(pieces) == 1:  # nothing is copied
            probs, states = self._run_piece(tokens, sources, pieces[0])
            return probs.logprobs.new_empty(num_rows, length, 0) if states is None else states, probs
        target = self.target
        width = target.vocab_size if self.top is None else min(self.top, target.vocab_size)
        logprobs = torch.empty(num_rows, length, width, device=target.device)
        ids = torch.empty_like(logprobs, dtype=torch.int64) if width < target.vocab_size else None
        features = logprobs.new_empty(num_rows, length, 0)
        for piece in pieces:
            probs, states = self._run_piece(tokens, sources, piece)
            index = slice(piece.rows.start, piece.rows.stop), slice(piece.start, piece.stop)
            logprobs[index] = probs.logprobs
            if ids is not None and probs.token_ids is not None:
                ids[index] = probs.token_ids
            if states is not None:
                if not features.shape[-1]:
                    features = states.new_empty(num_rows, length, states.shape[-1])
                features[index] = states
        return features, TargetLogProbs(logprobs, ids)

    @torch.no_grad()
    def compute_states(self, tokens: Tensor, layers: Sequence[int], sources: tuple[EncoderSource, ...] = ()) -> Tensor:
        """Run the target over rows of tokens for its states alone.

        Args:
            tokens: [B, L] token ids.
            layers: F layer boundaries.
            sources: B sources of an encoder-decoder model. Default () = a decoder alone.

        Returns:
            States [B, L, F * H] in the dtype of the forward pass.
        """
        num_rows, length = tokens.shape
        pieces = _split_rows(num_rows, length, STATE_POSITIONS)
        parts = [self._run_states(tokens, tuple(layers), sources, piece).flatten(0, 1) for piece in pieces]
        return torch.cat(parts).view(num_rows, length, -1)  # pieces follow each other by row and position

    def _run_states(
        self, tokens: Tensor, layers: tuple[int, ...], sources: tuple[EncoderSource, ...], piece: TracePiece
    ) -> Tensor:
        batch = replace(self._build_batch(tokens, sources, piece), logit_row_list=[0])  # a pass has at least one row
        with torch.autocast(self.target.device.type, enabled=False):
            states = self.target.forward(batch, layers)[1]
        assert states is not None
        return states.view(len(piece.rows), piece.stop - piece.start, -1)

    @torch.no_grad()
    def compute_probs(self, states: Tensor) -> TargetLogProbs:
        """Compute distributions from states [B, L, H] at AFTER_FINAL_NORM, with the output matrix in float32."""
        target = self.target
        step = max(1, LOGIT_BYTES // (4 * target.vocab_size))
        with torch.autocast(target.device.type, enabled=False):
            parts = [
                TargetLogProbs.from_logits(self._compute_logits(part), self.top)
                for part in torch.split(states.flatten(0, 1), step)
            ]
        shape = *states.shape[:-1], -1
        ids = [part.token_ids for part in parts if part.token_ids is not None]
        return TargetLogProbs(
            torch.cat([part.logprobs for part in parts]).view(shape), torch.cat(ids).view(shape) if ids else None
        )

    def _compute_logits(self, states: Tensor) -> Tensor:
        bias = None if self.target.head_bias is None else self.target.head_bias.detach().float()
        logits = F.linear(states.float(), self._head_weight, bias)
        return scale_logits(logits, self.target.model.config.get_text_config())

    @cached_property
    def _head_weight(self) -> Tensor:
        """Output matrix [V, H] in float32."""
        return self.target.head_weight.float()

    def _run_piece(
        self, tokens: Tensor, sources: tuple[EncoderSource, ...], piece: TracePiece
    ) -> tuple[TargetLogProbs, Tensor | None]:
        """Run the target over a piece of b rows and l positions: distributions and states [b, l, ..]."""
        with torch.autocast(self.target.device.type, enabled=False):  # the numerics are those of serving
            logits, states = self.target.forward(self._build_batch(tokens, sources, piece), self.hidden_layers)
        probs = TargetLogProbs.from_logits(logits, self.top)
        shape = len(piece.rows), piece.stop - piece.start, -1
        ids = None if probs.token_ids is None else probs.token_ids.view(shape)
        return TargetLogProbs(probs.logprobs.view(shape), ids), None if states is None else states.view(shape)

    def _build_batch(self, tokens: Tensor, sources: tuple[EncoderSource, ...], piece: TracePiece) -> ForwardBatch:
        per_row = -(-tokens.shape[1] // PAGE_SIZE)
        size = piece.stop - piece.start
        spans = []
        for i, b in enumerate(piece.rows):
            pages = range(1 + i * per_row, 1 + (i + 1) * per_row)
            ids, source = tokens[b, piece.start : piece.stop].tolist(), sources[b] if sources else None
            spans.append(Span(pages, piece.start, ids, range(size), source=source, num_settled=size - 1))
        return ForwardBatch.build(spans, range(size * len(piece.rows)), PAGE_SIZE, self.target.device)


def _split_rows(num_rows: int, length: int, max_positions: int) -> Iterator[TracePiece]:
    """Split rows into pieces of at most `max_positions` positions.

    A piece has several whole rows, or a part of one longer row, whose parts follow each other and share its KV.
    """
    if length <= max_positions:
        step = max_positions // length
        for first in range(0, num_rows, step):
            yield TracePiece(range(first, min(first + step, num_rows)), 0, length)
        return
    for row in range(num_rows):
        for start in range(0, length, max_positions):
            yield TracePiece(range(row, row + 1), start, min(start + max_positions, length))
