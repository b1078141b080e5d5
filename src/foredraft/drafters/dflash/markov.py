"""Heads of DSpark beside the block: logits that depend on the token before, and a prediction of acceptance.

A Markov head adds W2 u to the logits of row j, where u [r] depends on the token before row j: its embedding W1, that
embedding gated by the row's state, or the output of a recurrent cell over the tokens of the draft.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from foredraft.drafters.common.last_hidden_state import HeadLinear
from foredraft.drafters.dflash.shape import DEFAULT_MARKOV, DFlashShape


class MarkovHead(nn.Module):
    """Markov head without a gate: u is the embedding of the token before. State-dict names are DeepSpec's."""

    def __init__(self, shape: DFlashShape) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(shape.vocab_size, shape.markov_rank)
        self.markov_w2 = nn.Linear(shape.markov_rank, shape.vocab_size, bias=False)
        self.native_w2: HeadLinear | None = None  # takes the place of `markov_w2`, with float32 output

    def start(self, *size: int) -> Tensor:
        """Return the memory [*size, r] before the first row."""
        weight = self.markov_w1.weight
        return torch.zeros(*size, weight.shape[1], dtype=weight.dtype, device=weight.device)

    def step(self, tokens: Tensor, states: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Read one token of each row.

        Args:
            tokens: tokens [..] before the rows.
            states: states [.., H] of the rows.
            memory: memory [.., r] of the rows before.

        Returns:
            u [.., r], and the memory of these rows.
        """
        return self.markov_w1(tokens), memory

    def unroll(self, tokens: Tensor, states: Tensor) -> Tensor:
        """Return u [.., D, r] of D rows in order, from the tokens [.., D] before them and their states [.., D, H]."""
        memory, outputs = self.start(*tokens.shape[:-1]), []
        for j in range(tokens.shape[-1]):
            output, memory = self.step(tokens[..., j], states[..., j, :], memory)
            outputs.append(output)
        return torch.stack(outputs, -2)

    def forward(self, outputs: Tensor) -> Tensor:
        """Return what u [.., r] adds to the logits [.., V]."""
        if self.native_w2 is not None:
            return self.native_w2(outputs)
        return self.markov_w2(outputs)  # type: ignore[no-any-return]


class GatedMarkovHead(MarkovHead):
    """Markov head whose embedding is gated by the state of the row."""

    def __init__(self, shape: DFlashShape) -> None:
        super().__init__(shape)
        self.gate_proj = nn.Linear(shape.block.hidden + shape.markov_rank, shape.markov_rank)

    def step(self, tokens: Tensor, states: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.markov_w1(tokens)
        return embedded * torch.sigmoid(self.gate_proj(torch.cat([states, embedded], -1))), memory


class RecurrentMarkovHead(MarkovHead):
    """Markov head with a recurrent cell, so that a row depends on all tokens of the draft before it."""

    def __init__(self, shape: DFlashShape) -> None:
        super().__init__(shape)
        self.joint_proj = nn.Linear(shape.block.hidden + 2 * shape.markov_rank, 3 * shape.markov_rank)

    def step(self, tokens: Tensor, states: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        inputs = torch.cat([memory, self.markov_w1(tokens), states], -1)
        gate, candidate, output = self.joint_proj(inputs).chunk(3, -1)
        share = torch.sigmoid(gate)
        return torch.tanh(output), share * memory + (1 - share) * torch.tanh(candidate)


class ConfidenceHead(nn.Module):
    """Prediction of the probability that the target accepts the token of a row, if it accepts those before."""

    def __init__(self, shape: DFlashShape) -> None:
        super().__init__()
        width = shape.block.hidden + (shape.markov_rank if shape.confidence_reads_token else 0)
        self.reads_token = shape.confidence_reads_token
        self.proj = nn.Linear(width, 1)

    def forward(self, states: Tensor, markov: MarkovHead | None, tokens: Tensor) -> Tensor:
        """Compute the log-odds [..] of acceptance.

        Args:
            states: states [.., H] of the rows.
            markov: Markov head of the network, if it has one.
            tokens: tokens [..] before the rows.
        """
        inputs = [states]
        if self.reads_token:
            assert markov is not None, "the shape of a head that reads tokens has a Markov head"
            inputs.append(markov.markov_w1(tokens))
        return self.proj(torch.cat(inputs, -1)).squeeze(-1)  # type: ignore[no-any-return]


MARKOV_HEADS: dict[str, Callable[[DFlashShape], MarkovHead]] = {
    DEFAULT_MARKOV: MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RecurrentMarkovHead,
}


def make_markov_head(shape: DFlashShape) -> MarkovHead | None:
    """Make the Markov head of a shape; None if it has none."""
    return MARKOV_HEADS[shape.markov_type](shape) if shape.markov_rank else None
