"""Network of blockwise parallel decoding (1811.03115, section 4.1): a module for training, a runner for drafting."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.drafters.blockwise.checkpoint import BlockwiseShape
from foredraft.drafters.common.last_hidden_state import LinearFactory, make_target_head
from foredraft.drafters.common.native_steps import NativeBlockRunner, collect_packed
from foredraft.models.hf import HFModel
from foredraft.models.native.step_network import NativeStepNetwork, StepKind, StepWeights


class BlockwiseHeads(nn.Module):
    """Network h + W2 relu(W1 h + b1) + b2 for training; W2 has H rows per head.

    Its tensors have the names that BlockwiseShape documents.
    """

    def __init__(self, shape: BlockwiseShape) -> None:
        super().__init__()
        self.shape = shape
        self.hidden = nn.Linear(shape.hidden, shape.inner)
        self.output = nn.Linear(shape.inner, shape.num_heads * shape.hidden)

    def forward(self, hidden: Tensor, head: int) -> Tensor:
        """Compute the states [.., H] of one head, for the target's output matrix, from target states [.., H]."""
        rows = slice(head * self.shape.hidden, (head + 1) * self.shape.hidden)
        x = F.relu(self.hidden(hidden))
        return hidden + F.linear(x, self.output.weight[rows], self.output.bias[rows])


class BlockwiseStepRunner:
    """Network for drafting. `begin` computes the logits of the whole block, since they do not depend on its tokens.

    Args:
        shape: sizes of the heads.
        tensors: weights, by the names that BlockwiseShape documents.
        depth: D, number of heads to run.
        linears: factory of the matrix products.
        target: its output matrix makes the logits.
    """

    def __init__(
        self,
        shape: BlockwiseShape,
        tensors: dict[str, Tensor],
        depth: int,
        linears: LinearFactory,
        target: HFModel | None,
    ) -> None:
        self.depth = depth
        self.shape = shape
        rows = depth * shape.hidden
        self._hidden = linears.make(tensors["hidden.weight"], tensors["hidden.bias"])
        self._output = linears.make(tensors["output.weight"][:rows], tensors["output.bias"][:rows])
        self._head = make_target_head(target, linears)

    def make_native(self) -> NativeBlockRunner | None:
        """Make the native form; None if a product is no native kernel."""
        packed = collect_packed([self._head, self._hidden, self._output])
        if packed is None or not self.depth:
            return None
        head, hidden, output = packed
        steps = [StepWeights(head, hidden, (output,))]
        network = NativeStepNetwork.from_steps(StepKind.PARALLEL, steps, self.shape.hidden, num_heads=self.depth)
        return NativeBlockRunner(network)

    def begin(self, hidden: Tensor) -> Tensor:
        """Compute the logits [R, D, V] of the block from states [R, H]."""
        x = self._output(F.relu(self._hidden(hidden))).view(len(hidden), self.depth, -1)
        return self._head((hidden[:, None] + x).flatten(0, 1)).view(len(hidden), self.depth, -1)

    def __call__(self, step: int, states: Tensor, tokens: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Return the block unchanged, and its logits [R, V] of one step."""
        return states, states[:, step]
