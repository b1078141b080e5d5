"""Declaration of the method `medusa`."""

from dataclasses import dataclass

from foredraft import zoo
from foredraft.checkpoints.export import make_vllm_command
from foredraft.checkpoints.formats import CheckpointFormat, ExportFormat, LayoutOrder, StoredLayout
from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.common.published_trees import resolve_tree
from foredraft.drafters.common.static_tree import RankAccuracies, StaticTree, assume_accuracies
from foredraft.drafters.common.tree_builder import MAX_TREE_NODES
from foredraft.drafters.counterpart import Counterpart
from foredraft.drafters.medusa import checkpoint, export
from foredraft.drafters.medusa.checkpoint import MedusaShape
from foredraft.drafters.medusa.drafter import Medusa, make_chain
from foredraft.drafters.medusa.training import TrainConfig, create_trainee
from foredraft.drafters.medusa.variants import VARIANTS
from foredraft.drafters.method import BuiltIn, DrafterContext, HeadRecipe, Method, Training
from foredraft.errors import ForedraftError


@dataclass(frozen=True)
class Config:
    """Options. Without `tree` and `tree_nodes` the draft is a chain.

    Args:
        tree: paths of ranks, in the format of `medusa_choices`, or the name of a published tree.
        tree_nodes: size of the likeliest tree by the accuracies in the checkpoint.
        min_confidence: a draft ends at the depth where the product of the heads' largest probabilities falls below
            this value in [0, 1).
        quantization: "int8" or "int4" weights of the heads; None = as stored.
    """

    tree: tuple[tuple[int, ...], ...] | str | None = None
    tree_nodes: int | None = None
    min_confidence: float = 0.0
    quantization: str | None = None

    def to_static_tree(self, num_speculative_tokens: int, num_heads: int, accuracies: RankAccuracies) -> StaticTree:
        """Return the tree to draft, at most `num_heads` deep. Raises ForedraftError for invalid options."""
        if not 0 <= self.min_confidence < 1:
            raise ForedraftError(f"min_confidence must lie in 0..1, got {self.min_confidence}")
        if self.tree is not None:
            if self.tree_nodes is not None:
                raise ForedraftError("tree fixes every node; give it without tree_nodes")
            return StaticTree.from_paths(resolve_tree(self.tree), accuracies[:num_heads])
        if self.tree_nodes is None:
            return make_chain(min(num_speculative_tokens, num_heads))
        if not 1 <= self.tree_nodes <= MAX_TREE_NODES:
            raise ForedraftError(f"tree_nodes must be positive and at most {MAX_TREE_NODES}, got {self.tree_nodes}")
        return StaticTree.from_accuracies(accuracies[: min(num_speculative_tokens, num_heads)], self.tree_nodes)


def from_checkpoint(config: Config, checkpoint: Checkpoint, context: DrafterContext) -> Medusa:
    """Make the drafter of loaded heads."""
    shape = checkpoint.require_shape(MedusaShape, "Medusa heads")
    tree = config.to_static_tree(context.num_speculative_tokens, shape.num_heads, get_accuracies(shape))
    return Medusa(shape, checkpoint.tensors, tree, context, config.min_confidence, config.quantization)


def get_accuracies(shape: MedusaShape) -> RankAccuracies:
    """Return accuracies by head and rank: the checkpoint's, or defaults."""
    return shape.accuracies or assume_accuracies(shape.num_heads)


METHOD = Method(
    name=checkpoint.NAME,
    config=Config,
    from_checkpoint=from_checkpoint,
    checkpoint=CheckpointFormat(
        title="Medusa heads",
        shape=MedusaShape,
        layouts=(StoredLayout("medusa", LayoutOrder.UNIQUE_NAMES, checkpoint.has_own_tensors, checkpoint.read),),
        make_layout=checkpoint.make_layout,
        exports=(
            ExportFormat("medusa", export.export_medusa, make_vllm_command, export.has_own_matrices),
            ExportFormat("vllm", export.export_vllm, make_vllm_command),
        ),
        refused_exports={"sglang": "SGLang loads no Medusa heads"},
    ),
    training=Training(TrainConfig, create_trainee),
    built_in=BuiltIn(
        {zoo.DEFAULT_TARGET: "medusa", zoo.SEQ2SEQ_TARGET: "seq2seq_medusa"},
        {
            zoo.DEFAULT_TARGET: HeadRecipe(450, {"own_head": "false", "layers": "2"}, further_steps=450),
            zoo.SEQ2SEQ_TARGET: HeadRecipe(900, {"own_head": "false"}),
        },
    ),
    option_aliases={"medusa_choices": lambda value: {"tree": value}},
    counterparts={"vllm": Counterpart("medusa", export="vllm")},
    variants=VARIANTS,
)
