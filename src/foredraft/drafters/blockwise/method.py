"""Blockwise parallel decoding (1811.03115): heads that predict a block of tokens at once from one state.

A feed-forward layer over h_{n-2}, the target's state before the last committed token x_{n-1}, computes one state per
head. The target's output matrix turns it into logits; head h predicts the token at depth h + 1 below x_{n-1}. The
paper's first head is the target itself, which has chosen x_{n-1} in the step before. Unlike Medusa's heads, these share
a hidden layer, have no output matrices, and draft a chain.

Two parts of the paper are left out. Approximate acceptance (top k, or a distance) is not lossless. The target is not
trained along, since that would change the output matrix that the heads use.
"""

from dataclasses import dataclass

from foredraft import zoo
from foredraft.checkpoints.formats import CheckpointFormat, LayoutOrder, StoredLayout, has_tensor
from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.blockwise import checkpoint
from foredraft.drafters.blockwise.checkpoint import BlockwiseShape
from foredraft.drafters.blockwise.network import BlockwiseStepRunner
from foredraft.drafters.blockwise.training import TrainConfig, create_trainee
from foredraft.drafters.blockwise.variants import VARIANTS
from foredraft.drafters.common.last_hidden_state import LinearFactory
from foredraft.drafters.common.step_drafter import StepDrafter
from foredraft.drafters.common.tree_builder import TreeSpec
from foredraft.drafters.method import BuiltIn, DrafterContext, HeadRecipe, Method, Training


@dataclass(frozen=True)
class Config:
    """Options.

    Args:
        min_confidence: a block ends where the product of its largest probabilities falls below this value in [0, 1).
        quantization: "int8" or "int4" weights of the heads; None = as stored.
    """

    min_confidence: float = 0.0
    quantization: str | None = None

    def to_tree_spec(self, num_speculative_tokens: int, shape: BlockwiseShape) -> TreeSpec:
        """Return the spec of a chain, at most as long as there are heads. Raises ForedraftError for invalid options."""
        return TreeSpec.from_options(min(num_speculative_tokens, shape.num_heads), min_confidence=self.min_confidence)


def from_checkpoint(config: Config, checkpoint: Checkpoint, context: DrafterContext) -> StepDrafter:
    """Make the drafter of loaded heads."""
    shape = checkpoint.require_shape(BlockwiseShape, "blockwise heads")
    spec = config.to_tree_spec(context.num_speculative_tokens, shape)
    linears = LinearFactory(context, config.quantization)
    runner = BlockwiseStepRunner(shape, checkpoint.tensors, spec.max_depth, linears, context.target)
    return StepDrafter(runner.make_native() or runner, spec, context)


METHOD = Method(
    name=checkpoint.NAME,
    config=Config,
    from_checkpoint=from_checkpoint,
    checkpoint=CheckpointFormat(
        title="blockwise heads",
        shape=BlockwiseShape,
        layouts=(
            StoredLayout("blockwise", LayoutOrder.OWN_NAMES, has_tensor(checkpoint.TENSOR_NAME), checkpoint.read),
        ),
        make_layout=checkpoint.make_layout,
    ),
    training=Training(TrainConfig, create_trainee),
    built_in=BuiltIn(
        {zoo.DEFAULT_TARGET: "blockwise", zoo.SEQ2SEQ_TARGET: "seq2seq_blockwise"},
        {
            zoo.DEFAULT_TARGET: HeadRecipe(500, {"heads": "3", "inner": "192", "decay": "0.8"}, further_steps=450),
            zoo.SEQ2SEQ_TARGET: HeadRecipe(900, {"heads": "7", "inner": "192"}),
        },
    ),
    variants=VARIANTS,
)
