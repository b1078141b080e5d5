"""Chimera's network (2402.15758): a trigram encoder, a context encoder of one decoder layer, residual decoding heads.

A token comes with a state: the target's own where the target has read it, elsewhere what the trigram encoder makes of
the token and the two before it. The context encoder fuses both, token by token, and lets a drafted token see all before
it; head k makes the law of token k + 1 of the draft from that and from the newest state of the target.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.checkpoints.base import ChimeraShape
from foredraft.drafters.borrowed import packed_head
from foredraft.drafters.newest import Products, packed_product
from foredraft.models.block import Attend, Layer, RMSNorm, Rotary
from foredraft.models.fused_features import FusedFeatures, Joined, why_not
from foredraft.models.lm import HFModel

READ = 3  # tokens that the trigram encoder reads
TABLE = 64 << 20  # bytes that what every token adds to a trigram may take


class ChimeraNetwork(nn.Module):
    """Tensors as ChimeraShape documents them."""

    def __init__(self, shape: ChimeraShape, target: HFModel) -> None:
        super().__init__()
        block, hidden = shape.block, shape.block.hidden
        self.shape = shape
        self.target = (target,)  # a tuple: its weights are none of ours
        if shape.has_fc:
            self.fc = nn.Linear(len(shape.taps) * hidden, hidden, bias=False)
        self.trigram = nn.Linear(READ * hidden, hidden, bias=False)
        self.join = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([Layer(block)])
        self.heads = nn.ModuleList(nn.Linear(2 * hidden, hidden) for _ in range(shape.num_heads))
        self.norm = RMSNorm(hidden, block.eps)
        self.rotary = Rotary(block)
        self.embedding = target.embedding  # [V, H]

    def taken(self, features: Tensor) -> Tensor:
        """[.., F] the target's states -> [.., H] states."""
        return self.fc(features) if self.shape.has_fc else features

    def embedded(self, tokens: Tensor) -> Tensor:
        """[.., H] in the type of the network."""
        return F.embedding(tokens, self.embedding).to(self.join.weight.dtype)

    def encoded(self, last: Tensor) -> Tensor:
        """[.., 3] a token and the two before it, the oldest first -> [.., H] in place of the target's state."""
        return F.silu(self.trigram(self.embedded(last).flatten(-2)))

    def forward(self, tokens: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """[B, L] tokens with a state [B, L, H] each -> what the context encoder makes of them, [B, L, H], twice."""
        x = self.join(torch.cat([self.embedded(tokens), states], -1))
        x = self.layers[0](x, self.rotary(positions, x.dtype), 0, attend)
        return x, x

    def headed(self, depth: int, encoded: Tensor, newest: Tensor) -> Tensor:
        """[.., H] what the target's own head reads, for the token after `depth` drafted ones."""
        head = self.heads[min(depth, self.shape.num_heads - 1)]
        return self.norm(encoded + F.silu(head(torch.cat([encoded, newest], -1))))  # type: ignore[no-any-return]

    def logits(self, states: Tensor) -> Tensor:
        """[.., V] from what `headed` gives."""
        return self.target[0].head(states.to(self.embedding.dtype))

    def fused(self) -> FusedFeatures | None:
        """The context encoder as native code, where it can be such. It gives up its weights."""
        head, layers = packed_head(self.target[0]), list(self.layers)
        if head is None or why_not(layers, self.embedding) is not None:
            return None
        front, shape = Joined(self.join), self.shape.block
        return FusedFeatures.of(layers, front, None, False, self.embedding, head, shape, self.rotary)


class DraftingHeads:
    """The trigram encoder and the heads laid out for drafting: matrices as products, norms in float32 at least."""

    def __init__(self, network: ChimeraNetwork, products: Products) -> None:
        self.network = network
        self.dtype = torch.float32 if products.is_native else products.dtype  # of states
        self.norms = torch.promote_types(products.dtype, torch.float32)
        size, hidden = network.embedding.shape
        self.is_looked_up = products.is_native and READ * size * hidden * torch.float32.itemsize <= TABLE
        self.trigram = self._looked_up() if self.is_looked_up else self._multiplied(products)
        self.fc = products.make(network.fc.weight.detach()) if network.shape.has_fc else None
        self.heads = [products.make(head.weight.detach(), head.bias.detach()) for head in _linears(network.heads)]
        packed = packed_head(network.target[0]) if products.is_native else None
        self.output: Callable[[Tensor], Tensor] = network.logits if packed is None else packed_product(packed)
        self.scale = network.norm.weight.detach().to(self.norms)

    def taken(self, features: Tensor) -> Tensor:
        """[R, F] the target's states -> [R, H]."""
        return features.to(self.dtype) if self.fc is None else self.fc(features).to(self.dtype)

    def encoded(self, last: Sequence[Sequence[int]]) -> Tensor:
        """[R, H] in place of the target's states."""
        return F.silu(self.trigram(last)).to(self.dtype)

    def _looked_up(self) -> Callable[[Sequence[Sequence[int]]], Tensor]:
        """A trigram's sum of rows made once: what each token adds at each of the three places."""
        embedding, weight = self.network.embedding.float(), self.network.trigram.weight.detach().float()
        table = torch.cat([embedding @ block.T for block in weight.chunk(READ, 1)])  # [3 V, H]
        size = len(embedding)

        def look_up(last: Sequence[Sequence[int]]) -> Tensor:
            ids = torch.tensor([[a, b + size, c + 2 * size] for a, b, c in last])
            return F.embedding_bag(ids, table, mode="sum")

        return look_up

    def _multiplied(self, products: Products) -> Callable[[Sequence[Sequence[int]]], Tensor]:
        embedding, product = self.network.embedding, products.make(self.network.trigram.weight.detach())
        return lambda last: product(F.embedding(torch.tensor(last, device=embedding.device), embedding).flatten(1))

    def __call__(self, depth: int, encoded: Tensor, newest: Tensor) -> Tensor:
        """[R, V] from [R, H] each."""
        head = self.heads[min(depth, len(self.heads) - 1)]
        encoded = encoded.to(self.norms)
        mixed = encoded + F.silu(head(torch.cat([encoded, newest.to(self.norms)], -1)).to(self.norms))
        return self.output(F.rms_norm(mixed, mixed.shape[-1:], self.scale, self.network.norm.eps))


def _linears(modules: nn.ModuleList) -> list[Any]:
    return list(modules)


def trigrams(tokens: Tensor) -> Tensor:
    """[B, L, 3] from [B, L]: every token with the two before it, oldest first; the first stands for what is missing."""
    before = torch.arange(1 - READ, 1, device=tokens.device)
    places = torch.arange(tokens.shape[1], device=tokens.device)[:, None] + before
    return tokens[:, places.clamp_min(0)]
