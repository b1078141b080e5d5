"""Network of the MLP speculator (2404.19124, section 3): a module for training and a runner for drafting."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.drafters.common.last_hidden_state import HeadLinear, LinearFactory
from foredraft.drafters.common.native_steps import NativeStepRunner, collect_packed
from foredraft.drafters.mlp_speculator.shape import MlpSpeculatorShape
from foredraft.models.native.step_network import NativeStepNetwork, StepKind, StepWeights

T = TypeVar("T")
EPS = 1e-6  # of the RMS norms


def compute_token_share(shape: MlpSpeculatorShape) -> float:
    """Return the weight of a token's embedding relative to the state it is added to.

    After `n_predict` steps the first state still has half of the variance.
    """
    state_weight = math.pow(0.5, 0.5 / shape.n_predict)
    return math.sqrt((1 - state_weight**2) * shape.inner / 2) / state_weight


def select_weight_index(shape: MlpSpeculatorShape, kind: str, step: int) -> int:
    """Return the index of the tensor of this kind ("emb", "proj", "ln" or "head") that a step uses."""
    return min(step, 1 if kind == "proj" else 0) if shape.is_tied else step


def make_input_weight(shape: MlpSpeculatorShape) -> Tensor | None:
    """Make the weight [H] with which `normalize_rms` computes the first state; None if that is not normed."""
    return torch.full((shape.hidden,), 1 / math.sqrt(2)) if shape.scales_input else None


def promote_precision(x: Tensor) -> Tensor:
    """Convert half precision to float32; norms need it."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def normalize_rms(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """Divide by the root mean square over the last dimension; multiply by `weight`."""
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def make_first_state(shape: MlpSpeculatorShape, hidden: Tensor) -> Tensor:
    """Convert target states [.., H] to the states before the first step."""
    return normalize_rms(promote_precision(hidden)) / math.sqrt(2) if shape.scales_input else promote_precision(hidden)


class MLPSpeculatorNorm(nn.Module):
    """RMS norm with scale and shift."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        x = promote_precision(x)
        return normalize_rms(x, self.weight.to(x.dtype)) + self.bias


class MLPSpeculator(nn.Module):
    """Network for training. Its tensors have the names that MlpSpeculatorShape documents."""

    def __init__(self, shape: MlpSpeculatorShape) -> None:
        super().__init__()
        self.shape = shape
        inner, size = shape.inner, shape.vocab_size

        def make_list(kind: str, make: Callable[[int], nn.Module]) -> nn.ModuleList:
            return nn.ModuleList(make(i) for i in range(1 + select_weight_index(shape, kind, shape.n_predict - 1)))

        self.emb = make_list("emb", lambda _: nn.Embedding(size, inner))
        self.proj = make_list("proj", lambda i: nn.Linear(inner if i else shape.hidden, inner, bias=False))
        self.ln = make_list("ln", lambda _: MLPSpeculatorNorm(inner))
        self.head = make_list("head", lambda _: nn.Linear(inner, size, bias=False))
        for module in (*self.emb, *self.proj, *self.head):
            nn.init.normal_(module.weight, std=inner**-0.5)

    def begin(self, hidden: Tensor) -> Tensor:
        """Convert target states [.., H] to the states before the first step."""
        return make_first_state(self.shape, hidden)

    def forward(self, step: int, state: Tensor, tokens: Tensor) -> Tensor:
        """Compute the next states [.., inner] from states [.., H or inner] and the tokens [..] after them."""
        emb, proj, ln = (self._get_module(kind, step) for kind in ("emb", "proj", "ln"))
        mixed = promote_precision(proj(state.to(proj.weight.dtype))) + compute_token_share(
            self.shape
        ) * promote_precision(emb(tokens))
        return F.gelu(ln(mixed))

    def compute_logits(self, step: int, state: Tensor) -> Tensor:
        """Compute logits [.., V] of the next token."""
        head = self._get_module("head", step)
        return head(state.to(head.weight.dtype))  # type: ignore[no-any-return]

    def _get_module(self, kind: str, step: int) -> Any:
        return getattr(self, kind)[select_weight_index(self.shape, kind, step)]


@dataclass(frozen=True)
class MLPStepWeights:
    """Weights of one step."""

    emb: Tensor  # [V, inner]
    proj: HeadLinear
    scale: Tensor  # [inner]
    shift: Tensor  # [inner]
    head: HeadLinear


class MLPStepRunner:
    """Network for drafting: packed matrix products, norms in float32 or wider.

    Args:
        shape: sizes of the speculator.
        tensors: weights, by the names that MlpSpeculatorShape documents.
        depth: number of steps to run.
        linears: factory of the matrix products.
        vocab_size: V of the target; further rows are left out.
    """

    def __init__(
        self, shape: MlpSpeculatorShape, tensors: dict[str, Tensor], depth: int, linears: LinearFactory, vocab_size: int
    ) -> None:
        self.shape = shape
        self._token_share = compute_token_share(shape)
        self._vocab_size = vocab_size
        norm_dtype = torch.promote_types(linears.dtype, torch.float32)

        def make_steps(kind: str, tail: str, make: Callable[[Tensor], T]) -> list[T]:
            """Make one weight of every step; tied steps share it."""
            indices = [select_weight_index(shape, kind, step) for step in range(depth)]
            by_index = {i: make(tensors[f"{kind}.{i}.{tail}"]) for i in dict.fromkeys(indices)}
            return [by_index[i] for i in indices]

        columns = (
            make_steps("emb", "weight", lambda t: t[:vocab_size].to(linears.device, linears.dtype)),
            make_steps("proj", "weight", linears.make),
            make_steps("ln", "weight", lambda t: t.to(linears.device, norm_dtype)),
            make_steps("ln", "bias", lambda t: t.to(linears.device, norm_dtype)),
            make_steps("head", "weight", lambda t: linears.make(t[:vocab_size], is_head=True)),
        )
        self._step_weights = [MLPStepWeights(*row) for row in zip(*columns, strict=True)]

    def make_native(self) -> NativeStepRunner | None:
        """Make the native form; None if a product is no native kernel."""
        proj = collect_packed([weights.proj for weights in self._step_weights])
        head = collect_packed([weights.head for weights in self._step_weights])
        if proj is None or head is None:
            return None
        steps = [
            StepWeights(head[i], proj[i], norm=(weights.scale, weights.shift), embedding=weights.emb.contiguous())
            for i, weights in enumerate(self._step_weights)
        ]
        return NativeStepRunner(
            NativeStepNetwork.from_steps(
                StepKind.MLP,
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
        """Read one more token per row. Returns states [R, inner], and logits [R, W] of the next tokens."""
        weights = self._step_weights[step]
        embedded = F.embedding(torch.as_tensor(tokens, device=weights.emb.device), weights.emb)
        mixed = torch.add(promote_precision(weights.proj(states)), promote_precision(embedded), alpha=self._token_share)
        states = F.gelu(normalize_rms(mixed, weights.scale) + weights.shift)
        return states, weights.head(states)
