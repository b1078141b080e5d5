"""What drafters that keep nothing but one state of the target share: that state, and products with their own matrices.

The state after the last token but one, h_{n-2}, has seen every committed token except the last, x_{n-1}, which is the
root of the next draft. No other state will do: one position off, and every guess answers another question.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from foredraft.drafters.base import Context
from foredraft.drafters.borrowed import packed_head
from foredraft.errors import ForedraftError
from foredraft.kernels.arena import Arena
from foredraft.kernels.cpu.library import library
from foredraft.kernels.linear import KINDS, PackedWeight, linear
from foredraft.kernels.quantize import multiply, packers
from foredraft.models.lm import HFModel
from foredraft.request import Batch, Request
from foredraft.tree import Commit

VIEWED = 64  # positions of a step whose states may stay in memory for the sake of one

Product = Callable[[Tensor], Tensor]  # [R, k] -> [R, n]


class NewestStates:
    """The target's state at the newest position of every slot, with that position."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, Tensor]] = {}

    def observe(self, batch: Batch, commit: Commit) -> None:
        features = commit.features
        if features is None:
            return
        for b, (request, path) in enumerate(zip(batch.requests, commit.path_lists, strict=True)):
            if path:
                state = features[b, len(path) - 1]
                state = state if features.shape[1] <= VIEWED else state.clone()
                self._held[request.slot] = (request.computed + len(path) - 1, state)
            else:
                self._held.pop(request.slot, None)

    def of(self, request: Request) -> Tensor | None:
        """[H] the state whose successor is the last committed token; None at a prompt, or after a step was missed."""
        held = self._held.get(request.slot)
        return held[1] if held is not None and held[0] == request.num_tokens - 2 else None

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._held.pop(slot, None)


def stacked(states: Sequence[Tensor]) -> Tensor:
    """[R, H]"""
    return states[0][None] if len(states) == 1 else torch.stack(list(states))


class Products:
    """Makes the products of a drafter: by the native kernels where the target runs on them, else in plain torch."""

    def __init__(self, context: Context, quantization: str | None = None) -> None:
        self.pack, self.pack_head = packers(quantization)
        self.arena = Arena()
        self.dtype, self.device = context.dtype, context.device
        self.is_quantised = quantization is not None
        can = context.fused and context.device.type == "cpu" and context.dtype in KINDS
        if self.is_quantised and (context.device.type != "cpu" or context.dtype not in KINDS):
            raise ForedraftError(f"quantization {quantization} runs on the CPU, from bfloat16 or float32 weights")
        self.is_native = self.is_quantised or (can and library() is not None)

    def make(self, weight: Tensor, bias: Tensor | None = None, is_head: bool = False) -> Product:
        """x -> x W^T + b from [n, k]; native products are float32, the others in the drafter's type."""
        weight = weight.to(self.device, self.dtype)
        if self.is_native:
            return packed_product((self.pack_head if is_head else self.pack)(weight, bias, self.arena))
        plain_bias = None if bias is None else bias.to(self.device, self.dtype)
        return lambda x: F.linear(x.to(weight.dtype), weight, plain_bias)

    def grouped(self, weights: Sequence[Tensor], is_head: bool = False) -> Callable[[Tensor, int], Tensor]:
        """([R, D, k], how many) -> [R, D, n]: a matrix of its own for each of the first D entries."""
        if self.is_native:
            products = [self.make(weight, is_head=is_head) for weight in weights]
            return lambda x, depth: torch.stack([product(x[:, i]) for i, product in enumerate(products[:depth])], 1)
        every = torch.stack([weight.to(self.device, self.dtype) for weight in weights])  # [D, n, k]
        return lambda x, depth: torch.bmm(x.to(every.dtype).transpose(0, 1), every[:depth].mT).transpose(0, 1)


def packed_product(packed: PackedWeight) -> Product:
    """The kernel without the detour through a torch operator, which costs as much as a small product."""
    if library() is None:
        return lambda x: multiply(x, packed)
    return lambda x: linear(x, packed)


def targets_head(target: HFModel | None, products: Products) -> Product:
    """[R, H] -> [R, V] by the target's own output matrix, as its native pass holds it where it does."""
    if target is None:
        raise ForedraftError("these heads draft with the target's lm_head; give Context a target")
    packed = packed_head(target) if products.is_native else None
    if packed is not None:
        return packed_product(packed)
    dtype = target.embedding.dtype
    return lambda x: target.head(x.to(dtype))
