"""The network of blockwise parallel decoding (1811.03115, section 4.1), as it is trained and laid out for drafting."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.checkpoints.base import BlockwiseShape
from foredraft.drafters.newest import Products, targets_head
from foredraft.models.lm import HFModel


class BlockwiseHeads(nn.Module):
    """h + W2 relu(W1 h + b1) + b2, where W2 has H rows for every head. Its tensors have the names that BlockwiseShape
    documents."""

    def __init__(self, shape: BlockwiseShape) -> None:
        super().__init__()
        self.shape = shape
        self.hidden = nn.Linear(shape.hidden, shape.inner)
        self.output = nn.Linear(shape.inner, shape.num_heads * shape.hidden)

    def forward(self, hidden: Tensor, head: int) -> Tensor:
        """States [.., H] of the target -> those of one head, for the target's output matrix."""
        rows = slice(head * self.shape.hidden, (head + 1) * self.shape.hidden)
        x = F.relu(self.hidden(hidden))
        return hidden + F.linear(x, self.output.weight[rows], self.output.bias[rows])


class BlockSteps:
    """The same numbers laid out for drafting: a block's logits are made when it begins, and no token changes them."""

    def __init__(
        self, shape: BlockwiseShape, tensors: dict[str, Tensor], depth: int, products: Products, target: HFModel | None
    ) -> None:
        self.depth = depth
        rows = depth * shape.hidden
        self._hidden = products.make(tensors["hidden.weight"], tensors["hidden.bias"])
        self._output = products.make(tensors["output.weight"][:rows], tensors["output.bias"][:rows])
        self._head = targets_head(target, products)

    def begin(self, hidden: Tensor) -> Tensor:
        """[R, H] -> logits [R, D, V]."""
        x = self._output(F.relu(self._hidden(hidden))).view(len(hidden), self.depth, -1)
        return self._head((hidden[:, None] + x).flatten(0, 1)).view(len(hidden), self.depth, -1)

    def __call__(self, step: int, states: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        return states, states[:, step]
