"""Network of the speculator with an LSTM cell (Arctic): a module for training and a runner for drafting.

With u = [projections of the state] + share * embedding, per gate: f, i, o = sigmoid(u), and

    cell  = f * cell + i * gelu(norm(u_cell))
    state = o * gelu(norm(cell))

The first cell is zero. All gates read the same embedding. A node's state is [state, cell]; the first is the target's.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.drafters.common.last_hidden_state import LinearFactory
from foredraft.drafters.common.native_steps import NativeStepRunner, collect_packed
from foredraft.drafters.mlp_speculator.lstm_checkpoint import EMBEDDING, GATES
from foredraft.drafters.mlp_speculator.network import (
    EPS,
    MLPSpeculatorNorm,
    compute_token_share,
    make_first_state,
    make_input_weight,
    normalize_rms,
    promote_precision,
)
from foredraft.drafters.mlp_speculator.shape import MlpSpeculatorShape
from foredraft.models.native.step_network import NativeStepNetwork, StepKind, StepWeights


class LSTMSpeculator(nn.Module):
    """Network for training. Its tensors have the names that MlpSpeculatorShape documents."""

    def __init__(self, shape: MlpSpeculatorShape) -> None:
        super().__init__()
        self.shape = shape
        inner, size = shape.inner, shape.vocab_size
        self.forget_emb = nn.ModuleList([nn.Embedding(size, inner)])
        for gate in GATES:
            widths = (shape.hidden, inner)
            self.add_module(f"{gate}_proj", nn.ModuleList(nn.Linear(width, inner, bias=False) for width in widths))
        self.cell_ln = nn.ModuleList([MLPSpeculatorNorm(inner)])
        self.state_ln = nn.ModuleList([MLPSpeculatorNorm(inner)])
        self.head = nn.ModuleList([nn.Linear(inner, size, bias=False)])
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=inner**-0.5)

    def begin(self, hidden: Tensor) -> Tensor:
        """Convert target states [.., H] to the states before the first step."""
        return make_first_state(self.shape, hidden)

    def forward(self, step: int, state: Tensor, tokens: Tensor) -> Tensor:
        """Compute the next states [.., 2 inner] from states [.., H or 2 inner] and the tokens [..] after them."""
        cell = state[..., self.shape.inner :] if step else None
        previous = state[..., : self.shape.inner] if step else state
        products = [getattr(self, f"{gate}_proj")[min(step, 1)] for gate in GATES]
        projected = [promote_precision(linear(previous.to(linear.weight.dtype))) for linear in products]
        embedded = compute_token_share(self.shape) * promote_precision(self.forget_emb[0](tokens))
        forget, take, give, candidate = (x + embedded for x in projected)
        candidate = torch.sigmoid(take) * F.gelu(self.cell_ln[0](candidate))
        cell = candidate if cell is None else torch.sigmoid(forget) * cell + candidate
        return torch.cat([torch.sigmoid(give) * F.gelu(self.state_ln[0](cell)), cell], -1)

    def compute_logits(self, step: int, state: Tensor) -> Tensor:
        """Compute logits [.., V] of the next token."""
        head: Any = self.head[0]
        logits: Tensor = head(state[..., : self.shape.inner].to(head.weight.dtype))
        return logits


class LSTMStepRunner:
    """Network for drafting: one packed matrix product for all gates, the rest in float32 or wider.

    Args:
        shape: sizes of the speculator.
        tensors: weights, by the names that MlpSpeculatorShape documents.
        linears: factory of the matrix products.
        vocab_size: V of the target; further rows are left out.
    """

    def __init__(
        self, shape: MlpSpeculatorShape, tensors: dict[str, Tensor], linears: LinearFactory, vocab_size: int
    ) -> None:
        self.shape = shape
        self._token_share = compute_token_share(shape)
        norm_dtype = torch.promote_types(linears.dtype, torch.float32)
        self._embedding = tensors[EMBEDDING][:vocab_size].to(linears.device, linears.dtype)
        self._projections = [
            linears.make(torch.cat([tensors[f"{gate}_proj.{i}.weight"] for gate in GATES])) for i in (0, 1)
        ]
        self._norms = {
            kind: (
                tensors[f"{kind}.0.weight"].to(linears.device, norm_dtype),
                tensors[f"{kind}.0.bias"].to(linears.device, norm_dtype),
            )
            for kind in ("cell_ln", "state_ln")
        }
        self._head = linears.make(tensors["head.0.weight"][:vocab_size], is_head=True)

    def make_native(self, depth: int) -> NativeStepRunner | None:
        """Make the native form of `depth` steps; None if a product is no native kernel."""
        packed = collect_packed([*self._projections, self._head])
        if packed is None or not depth:
            return None
        *projections, head = packed
        steps = [
            StepWeights(
                head,
                projections[min(step, 1)],
                norm=self._norms["state_ln"],
                cell_norm=self._norms["cell_ln"],
                embedding=self._embedding.contiguous(),
            )
            for step in range(depth)
        ]
        return NativeStepRunner(
            NativeStepNetwork.from_steps(
                StepKind.LSTM,
                steps,
                self.shape.hidden,
                self.shape.inner,
                input_weight=make_input_weight(self.shape),
                token_share=self._token_share,
                eps=EPS,
            )
        )

    def begin(self, hidden: Tensor) -> Tensor:
        """Convert target states [R, H] to the states before the first step."""
        return make_first_state(self.shape, hidden)

    def __call__(self, step: int, states: Tensor, tokens: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Read one more token per row. Returns states [R, 2 inner], and logits [R, W] of the next tokens."""
        inner = self.shape.inner
        previous = states[:, :inner].contiguous() if step else states
        projected = promote_precision(self._projections[min(step, 1)](previous)).view(len(states), len(GATES), inner)
        embedded = F.embedding(torch.as_tensor(tokens, device=self._embedding.device), self._embedding)
        mixed = torch.add(projected, promote_precision(embedded)[:, None], alpha=self._token_share)
        forget, take, give = torch.sigmoid(mixed[:, :3]).unbind(1)
        cell = take * self._activate("cell_ln", mixed[:, 3])
        if step:
            cell = forget * states[:, inner:] + cell
        state = give * self._activate("state_ln", cell)
        return torch.cat([state, cell], -1), self._head(state)

    def _activate(self, norm: str, x: Tensor) -> Tensor:
        scale, shift = self._norms[norm]
        return F.gelu(normalize_rms(x, scale) + shift)
