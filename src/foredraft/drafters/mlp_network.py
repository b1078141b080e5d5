"""The MLP speculator's network (2404.19124, section 3), as it is trained and laid out for drafting."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.checkpoints.base import SpeculatorShape
from foredraft.drafters.newest import Product, Products

T = TypeVar("T")
EPS = 1e-6


def token_share(shape: SpeculatorShape) -> float:
    """How much of a token's embedding goes into a state, relative to the state before it: after all of the steps that
    were trained the first state still counts one half, whatever share of them is used."""
    state = math.pow(0.5, 0.5 / shape.n_predict)
    return math.sqrt((1 - state**2) * shape.inner / 2) / state


def serving(shape: SpeculatorShape, kind: str, step: int) -> int:
    """Which of the tensors of a kind serves a step."""
    return min(step, 1 if kind == "proj" else 0) if shape.is_tied else step


def wide(x: Tensor) -> Tensor:
    """In float32 at least: norms are not taken in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def normed(x: Tensor, weight: Tensor | None = None) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def begun(shape: SpeculatorShape, hidden: Tensor) -> Tensor:
    """[.., H] the state before the first step."""
    return normed(wide(hidden)) / math.sqrt(2) if shape.scales_input else wide(hidden)


class Norm(nn.Module):
    """RMS, with a scale and a shift."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        x = wide(x)
        return normed(x, self.weight.to(x.dtype)) + self.bias


class MLPSpeculator(nn.Module):
    """The network as it is trained; its tensors have the names that SpeculatorShape documents."""

    def __init__(self, shape: SpeculatorShape) -> None:
        super().__init__()
        self.shape = shape
        inner, size = shape.inner, shape.vocab_size

        def each(kind: str, make: Callable[[int], nn.Module]) -> nn.ModuleList:
            return nn.ModuleList(make(i) for i in range(1 + serving(shape, kind, shape.n_predict - 1)))

        self.emb = each("emb", lambda _: nn.Embedding(size, inner))
        self.proj = each("proj", lambda i: nn.Linear(inner if i else shape.hidden, inner, bias=False))
        self.ln = each("ln", lambda _: Norm(inner))
        self.head = each("head", lambda _: nn.Linear(inner, size, bias=False))
        for module in (*self.emb, *self.proj, *self.head):
            nn.init.normal_(module.weight, std=inner**-0.5)

    def begin(self, hidden: Tensor) -> Tensor:
        return begun(self.shape, hidden)

    def forward(self, step: int, state: Tensor, tokens: Tensor) -> Tensor:
        """[.., H or inner] and the tokens [..] after it -> the next state [.., inner]."""
        emb, proj, ln = (self._of(kind, step) for kind in ("emb", "proj", "ln"))
        mixed = wide(proj(state.to(proj.weight.dtype))) + token_share(self.shape) * wide(emb(tokens))
        return F.gelu(ln(mixed))

    def logits(self, step: int, state: Tensor) -> Tensor:
        """[.., V] of the token after those that made a state."""
        head = self._of("head", step)
        return head(state.to(head.weight.dtype))  # type: ignore[no-any-return]

    def _of(self, kind: str, step: int) -> Any:
        return getattr(self, kind)[serving(self.shape, kind, step)]


@dataclass(frozen=True)
class Step:
    emb: Tensor  # [V, inner]
    proj: Product
    scale: Tensor  # [inner]
    shift: Tensor  # [inner]
    head: Product


class Steps:
    """The same numbers laid out for drafting: matrices as products, norms in float32 at least."""

    def __init__(
        self, shape: SpeculatorShape, tensors: dict[str, Tensor], depth: int, products: Products, vocab_size: int
    ) -> None:
        self.shape = shape
        self._share = token_share(shape)
        self._size = vocab_size
        norms = torch.promote_types(products.dtype, torch.float32)

        def made(kind: str, tail: str, make: Callable[[Tensor], T]) -> list[T]:
            """Of every step; tied steps share."""
            numbers = [serving(shape, kind, step) for step in range(depth)]
            each = {i: make(tensors[f"{kind}.{i}.{tail}"]) for i in dict.fromkeys(numbers)}
            return [each[i] for i in numbers]

        columns = (
            made("emb", "weight", lambda t: t[:vocab_size].to(products.device, products.dtype)),
            made("proj", "weight", products.make),
            made("ln", "weight", lambda t: t.to(products.device, norms)),
            made("ln", "bias", lambda t: t.to(products.device, norms)),
            made("head", "weight", lambda t: products.make(t[:vocab_size], is_head=True)),
        )
        self._steps = [Step(*row) for row in zip(*columns, strict=True)]

    def begin(self, hidden: Tensor) -> Tensor:
        """[R, H] -> the states before the first step."""
        return begun(self.shape, hidden)

    def __call__(self, step: int, states: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """States [R, inner] after one more token each, and logits [R, W] of what follows."""
        s = self._steps[step]
        read = F.embedding(torch.tensor(tokens, device=s.emb.device), s.emb)
        mixed = torch.add(wide(s.proj(states)), wide(read), alpha=self._share)
        states = F.gelu(normed(mixed, s.scale) + s.shift)
        return states, s.head(states)
