"""Network of Medusa (2401.10774, section 2.1.1): a module for training and a runner for drafting."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.drafters.common.last_hidden_state import HeadLinear, LinearFactory, make_target_head
from foredraft.drafters.medusa.checkpoint import MedusaShape
from foredraft.models.hf import HFModel

OutputFunction = Callable[[Tensor, int], Tensor]  # ([R, D, H], D) -> logits [R, D, W]


class MedusaResBlock(nn.Module):
    """Residual block x + SiLU(W x + b)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """Network for training. Its tensors have the names that MedusaShape documents."""

    def __init__(self, shape: MedusaShape) -> None:
        super().__init__()
        self.shape = shape
        for _ in range(shape.num_heads):
            blocks: list[nn.Module] = [MedusaResBlock(shape.hidden) for _ in range(shape.num_layers)]
            own = [nn.Linear(shape.hidden, shape.vocab_size, bias=False)] if shape.has_own_head else []
            self.append(nn.Sequential(*blocks, *own))

    def forward(self, hidden: Tensor, head: int) -> Tensor:
        """Compute logits [.., V] of one head from states [.., H]; without own output matrices, states [.., H]."""
        return self[head](hidden)  # type: ignore[no-any-return]


class MedusaHeadRunner:
    """Heads for drafting. The first matrices of all heads are one matrix product.

    Args:
        shape: sizes of the heads.
        tensors: weights, by the names that MedusaShape documents.
        depth: D, number of heads to run.
        linears: factory of the matrix products.
    """

    def __init__(self, shape: MedusaShape, tensors: dict[str, Tensor], depth: int, linears: LinearFactory) -> None:
        self.shape = shape
        self.depth = depth

        def collect(layer: int, kind: str) -> list[Tensor]:
            return [tensors[f"{h}.{layer}.linear.{kind}"] for h in range(depth)]

        self._first_linear = linears.make(torch.cat(collect(0, "weight")), torch.cat(collect(0, "bias")))
        self._later_linears = [
            [linears.make(w, b) for w, b in zip(collect(i, "weight"), collect(i, "bias"), strict=True)]
            for i in range(1, shape.num_layers)
        ]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute the input [R, D, H] of the heads' output matrices from states [R, H]."""
        x = hidden[:, None] + F.silu(self._first_linear(hidden)).view(len(hidden), self.depth, -1)
        for layer in self._later_linears:
            x = x + F.silu(torch.stack([product(x[:, h]) for h, product in enumerate(layer)], 1))
        return x


def make_output_function(
    shape: MedusaShape,
    tensors: dict[str, Tensor],
    depth: int,
    linears: LinearFactory,
    target: HFModel | None,
    size: int,
) -> OutputFunction:
    """Make the function for logits of at most `size` tokens. Heads with one shared matrix share the product."""
    shared: HeadLinear | None = None
    if not shape.has_own_head:
        shared = make_target_head(target, linears)
        vocab_size = size
    else:
        weights = [tensors[f"{h}.{shape.num_layers}.weight"][:size] for h in range(depth)]
        vocab_size = len(weights[0])
        if len({weight.data_ptr() for weight in weights}) > 1 or depth == 1:
            return linears.make_grouped(weights, is_head=True)
        shared = linears.make(weights[0], is_head=True)
    return lambda x, depth: shared(x.flatten(0, 1)).view(len(x), depth, vocab_size)
