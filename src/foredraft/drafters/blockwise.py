"""Blockwise parallel decoding (1811.03115): a block of tokens proposed at once from one state, and verified at once.

One feed-forward layer over h_{n-2}, the target's state below the last committed token x_{n-1}, gives a state for every
further head, and the target's own output matrix makes logits of each: head h guesses the token at depth h + 1 below
x_{n-1}. The target's own guess of x_{n-1}, the paper's first head, is part of the pass before. Unlike Medusa's heads
these share their hidden layer and have no matrix of vocabulary size, and draft a chain.

The paper also accepts tokens that are only near the target's choice (its top k, or within a distance). That changes
the text, so it is left out: a block is verified as every other draft is. Its base model may be trained along; here it
is frozen, for a target that learns would change its output matrix under the heads.
"""

from dataclasses import dataclass

from foredraft.checkpoints.base import BlockwiseShape, Checkpoint
from foredraft.drafters.base import Context
from foredraft.drafters.blockwise_network import BlockSteps
from foredraft.drafters.blockwise_training import TrainConfig, trainee
from foredraft.drafters.borrowed import loaded
from foredraft.drafters.growth import Plan
from foredraft.drafters.newest import Products
from foredraft.drafters.stepped import SteppedDrafter
from foredraft.errors import ForedraftError

__all__ = ["METHOD", "Config", "TrainConfig", "create", "trainee"]

METHOD = "blockwise"


@dataclass(frozen=True)
class Config:
    """`min_confidence`: a block ends where the product of its largest probabilities falls below it."""

    min_confidence: float = 0.0
    quantization: str | None = None

    def plan(self, num_tokens: int, shape: BlockwiseShape) -> Plan:
        """A chain, no longer than there are heads. Raises ForedraftError where the options make none."""
        return Plan.of(min(num_tokens, shape.num_heads), min_confidence=self.min_confidence)


def create(config: Config, context: Context) -> SteppedDrafter:
    """Load the heads. Raises ForedraftError if they are not the target's."""
    return from_checkpoint(config, loaded(context, METHOD), context)


def from_checkpoint(config: Config, checkpoint: Checkpoint, context: Context) -> SteppedDrafter:
    """From heads that are loaded."""
    shape = checkpoint.shape
    if not isinstance(shape, BlockwiseShape):
        raise ForedraftError(f"{checkpoint.folder} holds no blockwise heads but {checkpoint.format}")
    plan = config.plan(context.num_tokens, shape)
    products = Products(context, config.quantization)
    steps = BlockSteps(shape, checkpoint.tensors, plan.depth, products, context.target)
    return SteppedDrafter(steps, plan, context)
