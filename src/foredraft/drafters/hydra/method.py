"""Hydra (2402.05109): sequentially dependent Medusa heads.

Head i reads the target's state h_{n-2} and the embeddings of all tokens after it: x_{n-1} and the i draft tokens above.
The heads run one after another without a KV cache. A tree costs one row per expanded node. Hydra++ ("prefix-mlp" in
checkpoints) has a decoder layer between target and heads: see `prefix.py`.
"""

from dataclasses import dataclass

from foredraft import zoo
from foredraft.checkpoints.formats import CheckpointFormat, ExportFormat, LayoutOrder, StoredLayout, has_tensor
from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.common.feature_drafter import make_feature_lm
from foredraft.drafters.common.last_hidden_state import LinearFactory
from foredraft.drafters.common.published_trees import resolve_tree
from foredraft.drafters.common.static_tree import StaticTree, assume_accuracies
from foredraft.drafters.common.step_drafter import StepDrafter
from foredraft.drafters.common.target_access import require_target
from foredraft.drafters.common.tree_builder import TreeSpec
from foredraft.drafters.hydra import checkpoint, export
from foredraft.drafters.hydra.checkpoint import HydraShape
from foredraft.drafters.hydra.network import HydraStepRunner, choose_hidden_layer, load_prefix_layer
from foredraft.drafters.hydra.prefix import HydraPrefixDrafter
from foredraft.drafters.hydra.training import TrainConfig, create_trainee
from foredraft.drafters.hydra.variants import VARIANTS
from foredraft.drafters.method import BuiltIn, DrafterContext, HeadRecipe, Method, Training
from foredraft.errors import ForedraftError


@dataclass(frozen=True)
class Config:
    """Options. Without `tree_nodes`, `top_k`, `branching` and `tree` the draft is a chain.

    Args:
        tree_nodes: verified nodes of a dynamic tree.
        top_k: children per node and expanded nodes per level of the dynamic tree.
        branching: children of every node by depth.
        tree: paths of ranks, in the format of the authors, or the name of a published tree of Medusa.
        min_confidence: path probability in [0, 1) below which a draft stops.
        quantization: "int8" or "int4" weights of the heads; None = as stored.
    """

    tree_nodes: int | None = None
    top_k: int | None = None
    branching: tuple[int, ...] | None = None
    tree: tuple[tuple[int, ...], ...] | str | None = None
    min_confidence: float = 0.0
    quantization: str | None = None

    def to_tree_spec(self, num_speculative_tokens: int, shape: HydraShape) -> TreeSpec:
        """Return the tree spec, at most as deep as there are heads. Raises ForedraftError for invalid options."""
        if self.branching is not None and len(self.branching) > shape.num_heads:
            raise ForedraftError(f"branching is {len(self.branching)} deep, and there are {shape.num_heads} heads")
        depth = min(num_speculative_tokens, shape.num_heads)
        spec = TreeSpec.from_options(depth, self.tree_nodes, self.top_k, self.branching, self.min_confidence)
        if self.tree is None:
            return spec
        if (self.tree_nodes, self.top_k, self.branching) != (None, None, None):
            raise ForedraftError("tree fixes every node; give it without tree_nodes, top_k and branching")
        return TreeSpec.from_static_tree(
            StaticTree.from_paths(resolve_tree(self.tree), assume_accuracies(shape.num_heads)), self.min_confidence
        )


def from_checkpoint(
    config: Config, checkpoint: Checkpoint, context: DrafterContext
) -> StepDrafter | HydraPrefixDrafter:
    """Make the drafter of loaded heads for `context.target`."""
    shape = checkpoint.require_shape(HydraShape, "Hydra heads")
    spec, target = config.to_tree_spec(context.num_speculative_tokens, shape), require_target(context)
    linears = LinearFactory(context, config.quantization)
    heads = HydraStepRunner(shape, checkpoint.tensors, spec.max_depth, linears, target, context.vocab_size)
    runner = heads.make_native() or heads
    if shape.prefix is None:
        return StepDrafter(runner, spec, context, choose_hidden_layer(shape, target))
    network = load_prefix_layer(checkpoint, target).to(context.device, context.dtype).eval()
    return HydraPrefixDrafter(
        make_feature_lm(network, lambda network: None, context),
        choose_hidden_layer(shape, target),
        runner,
        spec,
        context,
    )


METHOD = Method(
    name=checkpoint.NAME,
    config=Config,
    from_checkpoint=from_checkpoint,
    option_aliases={name: lambda value: {"tree": value} for name in ("medusa_choices", "hydra_choices")},
    checkpoint=CheckpointFormat(
        title="Hydra heads",
        shape=HydraShape,
        layouts=(
            StoredLayout("hydra", LayoutOrder.UNIQUE_NAMES, has_tensor(checkpoint.TENSOR_NAME), checkpoint.read),
            StoredLayout("hydra", LayoutOrder.CONFIG_KEYS, checkpoint.is_declared, checkpoint.read),
        ),
        make_layout=checkpoint.make_layout,
        exports=(ExportFormat("hydra", export.export_hydra),),
        refused_exports={"vllm": "vLLM loads no Hydra heads", "sglang": "SGLang loads no Hydra heads"},
    ),
    training=Training(TrainConfig, create_trainee),
    built_in=BuiltIn(
        {zoo.DEFAULT_TARGET: "hydra"},
        {zoo.DEFAULT_TARGET: HeadRecipe(500, {"heads": "3", "own_head": "false", "rank": "320"}, further_steps=450)},
    ),
    variants=VARIANTS,
)
