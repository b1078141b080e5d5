"""Step networks as native code: a `StepRunner` with one native call per step, and one for the chains of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from foredraft.drafters.common.last_hidden_state import HeadLinear
from foredraft.kernels.linear import PackedWeight
from foredraft.models.native.step_network import NativeStepNetwork


@dataclass(frozen=True)
class NativeStepRunner:
    """Recurrent step network in native code."""

    native: NativeStepNetwork

    def begin(self, hidden: Tensor) -> Tensor:
        """Convert target states [R, H] to the states before the first step, which norms them."""
        return hidden.float()

    def __call__(self, step: int, states: Tensor, tokens: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Read one more token per row. Returns the next states, and logits [R, W] of the next tokens."""
        return self.native.forward(step, states, tokens.tolist() if isinstance(tokens, Tensor) else tokens)


@dataclass(frozen=True)
class NativeBlockRunner:
    """Heads that read no tokens, in native code. `begin` computes the logits of the whole block."""

    native: NativeStepNetwork

    def begin(self, hidden: Tensor) -> Tensor:
        """Compute the logits [R, D, W] of the block from target states [R, H]."""
        return self.native.forward(0, hidden.float(), ())[1]

    def __call__(self, step: int, states: Tensor, tokens: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Return the block unchanged, and its logits [R, W] of one step."""
        return states, states[:, step]


def collect_packed(linears: Sequence[HeadLinear]) -> list[PackedWeight] | None:
    """Return the matrices of products; None if there are none, or one that is no native kernel."""
    packed = [linear.packed for linear in linears if linear.packed is not None]
    return packed if packed and len(packed) == len(linears) else None
