"""Hydra's heads (2402.05109, section 3), as they are trained and laid out for drafting.

What goes from step to step is what the heads have read: the state, and one embedding more with every token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.checkpoints.base import Checkpoint, HydraShape
from foredraft.checkpoints.hydra import PREFIX
from foredraft.drafters.hydra_prefix import PrefixLayer, check, prefix_block
from foredraft.drafters.newest import Product, Products, targets_head
from foredraft.models.lm import HFModel
from foredraft.models.window import NORMED


def tap(shape: HydraShape, target: HFModel) -> int:
    """Which state of the target the heads read."""
    return target.num_layers - shape.offset if shape.offset else NORMED


def joined(states: Tensor, read: Tensor) -> Tensor:
    """[R, n H] and [R, H] -> [R, (n + 1) H], in the wider of their types."""
    return torch.cat([states, read.to(torch.promote_types(states.dtype, read.dtype))], -1)


def prefix_of(checkpoint: Checkpoint, target: HFModel) -> PrefixLayer:
    """The layer of a checkpoint that has one, like a layer of the target. Raises ForedraftError where it is not."""
    assert isinstance(checkpoint.shape, HydraShape)
    block = prefix_block(checkpoint.shape, target)
    check(checkpoint.shape, block, checkpoint.folder)
    layer = PrefixLayer(block)
    held = {name: value for name, value in checkpoint.tensors.items() if name.startswith(PREFIX)}
    layer.load_state_dict({name.removeprefix(PREFIX): value for name, value in held.items()})
    return layer


class ResBlock(nn.Module):
    """W_r x + b_r + SiLU(W x + b), and x itself in place of W_r x + b_r where it is as wide as what comes out."""

    def __init__(self, width: int, hidden: int, is_first: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, hidden)
        if is_first:
            self.res_connection = nn.Linear(width, hidden)
        self.is_first = is_first

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = self.res_connection(x) if self.is_first else x
        return kept + F.silu(self.linear(x))


class HydraHeads(nn.Module):
    """The network as it is trained; its tensors have the names that HydraShape documents."""

    def __init__(self, shape: HydraShape, target: HFModel) -> None:
        super().__init__()
        self.shape = shape
        self.target = (target,)  # a tuple: its weights are none of ours
        seen = [(head + 2) * shape.hidden for head in range(shape.num_heads)]

        def blocks(width: int) -> nn.Sequential:
            later = (ResBlock(shape.hidden, shape.hidden, is_first=False) for _ in range(1, shape.num_layers))
            return nn.Sequential(ResBlock(shape.rank or width, shape.hidden, is_first=True), *later)

        self.hydra_mlp = nn.ModuleList(map(blocks, seen))
        if shape.rank is not None:
            rank = shape.rank
            self.hydra_reduce = nn.ModuleList(nn.Linear(width, rank, bias=False) for width in seen)
        if shape.has_own_head:
            self.hydra_lm_head = nn.ModuleList(nn.Linear(shape.hidden, shape.vocab_size) for _ in seen)
        if shape.prefix is not None:
            self.prefix_embeding_layer = PrefixLayer(prefix_block(shape, target))

    def read(self, features: Tensor) -> Tensor:
        """[B, L, H] states of the target over whole texts -> what the heads begin from."""
        x = self.begin(features)
        return x if self.shape.prefix is None else self.prefix_embeding_layer.over(x)

    def begin(self, hidden: Tensor) -> Tensor:
        return hidden.to(next(self.parameters()).dtype)

    def forward(self, step: int, states: Tensor, tokens: Tensor) -> Tensor:
        """[R, (step + 1) H] and the tokens [R] after it -> what head `step` reads, [R, (step + 2) H]."""
        return joined(states, F.embedding(tokens, self.target[0].embedding).to(states.dtype))

    def logits(self, step: int, states: Tensor) -> Tensor:
        """[R, V] of head `step` from what it reads."""
        x = states if self.shape.rank is None else self.hydra_reduce[step](states)
        x = self.hydra_mlp[step](x)
        if self.shape.has_own_head:
            return self.hydra_lm_head[step](x)  # type: ignore[no-any-return]
        return self.target[0].head(x.to(self.target[0].model.dtype))


@dataclass(frozen=True)
class Head:
    reduce: Product | None
    first: Product  # both matrices of the first layer, SiLU's above
    later: tuple[Product, ...]
    output: Product


class HydraSteps:
    """The same numbers laid out for drafting."""

    def __init__(
        self,
        shape: HydraShape,
        tensors: dict[str, Tensor],
        depth: int,
        products: Products,
        target: HFModel,
        vocab_size: int,
    ) -> None:
        self.hidden = shape.hidden
        self._rows = target.embedding[:vocab_size].to(products.device, products.dtype)
        lent = None if shape.has_own_head else targets_head(target, products)

        def own(name: str) -> Product:
            weight, bias = (tensors[f"{name}.{kind}"][:vocab_size] for kind in ("weight", "bias"))
            return products.make(weight, bias, is_head=True)

        def made(head: int) -> Head:
            first = [f"hydra_mlp.{head}.0.{kind}" for kind in ("linear", "res_connection")]
            later = [f"hydra_mlp.{head}.{layer}.linear" for layer in range(1, shape.num_layers)]
            weight, bias = (torch.cat([tensors[f"{name}.{kind}"] for name in first]) for kind in ("weight", "bias"))
            return Head(
                reduce=None if shape.rank is None else products.make(tensors[f"hydra_reduce.{head}.weight"]),
                first=products.make(weight, bias),
                later=tuple(products.make(tensors[f"{name}.weight"], tensors[f"{name}.bias"]) for name in later),
                output=own(f"hydra_lm_head.{head}") if lent is None else lent,
            )

        self._heads = [made(head) for head in range(depth)]

    def begin(self, hidden: Tensor) -> Tensor:
        return hidden

    def __call__(self, step: int, states: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """[R, (step + 1) H] and R tokens -> what head `step` read [R, (step + 2) H], and its logits [R, W]."""
        head = self._heads[step]
        states = joined(states, F.embedding(torch.tensor(tokens, device=self._rows.device), self._rows))
        x = head.first(states if head.reduce is None else head.reduce(states))
        x = x[:, self.hidden :] + F.silu(x[:, : self.hidden])
        for product in head.later:
            x = x + F.silu(product(x))
        return states, head.output(x)
