"""Medusa's network (2401.10774, section 2.1.1), as it is trained and laid out for drafting."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.checkpoints.base import MedusaShape
from foredraft.drafters.newest import Product, Products, targets_head
from foredraft.models.lm import HFModel

RANKS = 10  # guesses of a head that a tree may use, as in the published ones

Outputs = Callable[[Tensor, int], Tensor]  # ([R, D, H], D) -> logits [R, D, W]


class ResBlock(nn.Module):
    """x + SiLU(W x + b)"""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """The network as it is trained; its tensors have the names that MedusaShape documents."""

    def __init__(self, shape: MedusaShape) -> None:
        super().__init__()
        self.shape = shape
        for _ in range(shape.num_heads):
            blocks: list[nn.Module] = [ResBlock(shape.hidden) for _ in range(shape.num_layers)]
            own = [nn.Linear(shape.hidden, shape.vocab_size, bias=False)] if shape.has_own_head else []
            self.append(nn.Sequential(*blocks, *own))

    def forward(self, hidden: Tensor, head: int) -> Tensor:
        """Logits [.., V] of one head from states [.., H]; states [.., H] for the target's head if it has no own."""
        return self[head](hidden)  # type: ignore[no-any-return]


class Heads:
    """The same numbers laid out for drafting: the first matrices of all heads are one product."""

    def __init__(self, shape: MedusaShape, tensors: dict[str, Tensor], depth: int, products: Products) -> None:
        self.shape = shape
        self.depth = depth

        def of_layer(layer: int, kind: str) -> list[Tensor]:
            return [tensors[f"{h}.{layer}.linear.{kind}"] for h in range(depth)]

        self._first = products.make(torch.cat(of_layer(0, "weight")), torch.cat(of_layer(0, "bias")))
        self._later = [
            [products.make(w, b) for w, b in zip(of_layer(i, "weight"), of_layer(i, "bias"), strict=True)]
            for i in range(1, shape.num_layers)
        ]

    def __call__(self, hidden: Tensor) -> Tensor:
        """[R, H] -> [R, D, H] what every head's output matrix reads."""
        x = hidden[:, None] + F.silu(self._first(hidden)).view(len(hidden), self.depth, -1)
        for layer in self._later:
            x = x + F.silu(torch.stack([product(x[:, h]) for h, product in enumerate(layer)], 1))
        return x


def outputs(
    shape: MedusaShape, tensors: dict[str, Tensor], depth: int, products: Products, target: HFModel | None, size: int
) -> Outputs:
    """Logits of at most `size` tokens. Heads that share one matrix share one product."""
    shared: Product | None = None
    if not shape.has_own_head:
        shared = targets_head(target, products)
        vocab_size = size
    else:
        weights = [tensors[f"{h}.{shape.num_layers}.weight"][:size] for h in range(depth)]
        vocab_size = len(weights[0])
        if len({weight.data_ptr() for weight in weights}) > 1 or depth == 1:
            return products.grouped(weights, is_head=True)
        shared = products.make(weights[0], is_head=True)
    return lambda x, depth: shared(x.flatten(0, 1)).view(len(x), depth, vocab_size)
