"""Shared code of drafters whose only state per request is the target's last hidden state (Medusa, Hydra, MLP).

After n committed tokens the target has computed h_{n-2}, which depends on all of them except the last, x_{n-1}. That
token is the root of the next draft. A state of another position would predict tokens at the wrong depth.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from foredraft.drafters.common.target_access import get_packed_lm_head
from foredraft.drafters.method import DrafterContext
from foredraft.errors import ForedraftError
from foredraft.kernels.arena import Arena
from foredraft.kernels.cpu.library import load_library
from foredraft.kernels.linear import DTYPE_KINDS, PackedWeight, linear
from foredraft.kernels.quantize import multiply, select_packers
from foredraft.models.hf import HFModel
from foredraft.path_features import FeatureRows
from foredraft.request import Batch, Request
from foredraft.tree import Commit


@dataclass(frozen=True)
class HeadLinear:
    """Matrix product of a drafter's head."""

    function: Callable[[Tensor], Tensor]  # [R, k] -> [R, n]
    packed: PackedWeight | None = None  # the matrix, if the product is a native kernel

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x)


class LastHiddenStates:
    """Target states at the newest computed position of every slot."""

    def __init__(self) -> None:
        self._states: dict[int, tuple[int, FeatureRows]] = {}  # slot -> (position, one row)

    def observe(self, batch: Batch, commit: Commit) -> None:
        """Note the state at the end of every committed path."""
        features = commit.path_features
        if features is None:
            return
        for b, (request, path) in enumerate(zip(batch.requests, commit.paths, strict=True)):
            if path:
                self._states[request.slot] = (request.num_computed + len(path) - 1, features.keep(b, 1))
            else:
                self._states.pop(request.slot, None)

    def get(self, request: Request) -> Tensor | None:
        """Return the state [H] before the last committed token; None during the prompt or after a missed step."""
        entry = self._states.get(request.slot)
        return entry[1].read_row(0) if entry is not None and entry[0] == request.num_tokens - 2 else None

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._states.pop(slot, None)


def stack_states(states: Sequence[Tensor]) -> Tensor:
    """Stack R states [H] to [R, H]."""
    return states[0][None] if len(states) == 1 else torch.stack(list(states))


def can_run_native(context: DrafterContext) -> bool:
    """Return whether the matrix products of heads run as native CPU kernels."""
    has_kind = context.fused and context.device.type == "cpu" and context.dtype in DTYPE_KINDS
    return has_kind and load_library() is not None


class LinearFactory:
    """Factory of a drafter's matrix products: native CPU kernels if the target uses them, else torch.

    Args:
        context: device, dtype and the `fused` setting.
        quantization: "int8" or "int4" weights (CPU only); None = as stored.

    Raises:
        ForedraftError: for quantization on another device or dtype.
    """

    def __init__(self, context: DrafterContext, quantization: str | None = None) -> None:
        self.pack, self.pack_head = select_packers(quantization)
        self.arena = Arena()
        self.dtype, self.device = context.dtype, context.device
        self.is_quantised = quantization is not None
        if self.is_quantised and (context.device.type != "cpu" or context.dtype not in DTYPE_KINDS):
            raise ForedraftError(f"quantization {quantization} runs on the CPU, from bfloat16 or float32 weights")
        self.is_native = self.is_quantised or can_run_native(context)

    def make(self, weight: Tensor, bias: Tensor | None = None, is_head: bool = False) -> HeadLinear:
        """Make the function x [R, k] -> x W^T + b [R, n].

        Args:
            weight: W [n, k].
            bias: b [n].
            is_head: whether W is an output matrix over the vocabulary, which is packed differently.

        Returns:
            A product with float32 output if native, else output in the drafter's dtype.
        """
        weight = weight.to(self.device, self.dtype)
        if self.is_native:
            return make_packed_linear((self.pack_head if is_head else self.pack)(weight, bias, self.arena))
        plain_bias = None if bias is None else bias.to(self.device, self.dtype)
        return HeadLinear(lambda x: F.linear(x.to(weight.dtype), weight, plain_bias))

    def make_grouped(self, weights: Sequence[Tensor], is_head: bool = False) -> Callable[[Tensor, int], Tensor]:
        """Make the function (x [R, D, k], D) -> [R, D, n] that applies weights[d] to x[:, d]."""
        if self.is_native:
            products = [self.make(weight, is_head=is_head) for weight in weights]
            return lambda x, depth: torch.stack([product(x[:, i]) for i, product in enumerate(products[:depth])], 1)
        stacked = torch.stack([weight.to(self.device, self.dtype) for weight in weights])  # [D, n, k]
        return lambda x, depth: torch.bmm(x.to(stacked.dtype).transpose(0, 1), stacked[:depth].mT).transpose(0, 1)


def make_packed_linear(packed: PackedWeight) -> HeadLinear:
    """Return the product with a packed matrix as a direct kernel call, without the overhead of a torch operator."""
    if load_library() is None:
        return HeadLinear(lambda x: multiply(x, packed))
    return HeadLinear(lambda x: linear(x, packed), packed)


def make_target_head(target: HFModel | None, linears: LinearFactory) -> HeadLinear:
    """Make the function [R, H] -> [R, V] with the target's output matrix, in its packed form if there is one."""
    if target is None:
        raise ForedraftError("these heads draft with the target's lm_head; give Context a target")
    packed = get_packed_lm_head(target) if linears.is_native else None
    if packed is not None:
        return make_packed_linear(packed)
    dtype = target.embedding.dtype
    return HeadLinear(lambda x: target.compute_logits(x.to(dtype)))
