"""MLP speculator (2404.19124): a small recurrent network; each step is a layer or an LSTM cell, each node has a state.

The first state is h_{n-2}, the target's state before the last committed token x_{n-1}. Each step adds the embedding of
the last token and predicts the next. A tree costs one row per expanded node.
"""

from dataclasses import dataclass

from foredraft import zoo
from foredraft.checkpoints.formats import CheckpointFormat, ExportFormat, LayoutOrder, StoredLayout, has_tensor
from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.common.last_hidden_state import LinearFactory
from foredraft.drafters.common.step_drafter import StepDrafter
from foredraft.drafters.common.tree_builder import TreeSpec
from foredraft.drafters.method import BuiltIn, DrafterContext, HeadRecipe, Method, Training
from foredraft.drafters.mlp_speculator import checkpoint, export, layout, lstm_checkpoint
from foredraft.drafters.mlp_speculator.lstm_network import LSTMStepRunner
from foredraft.drafters.mlp_speculator.network import MLPStepRunner
from foredraft.drafters.mlp_speculator.shape import MlpSpeculatorShape
from foredraft.drafters.mlp_speculator.training import TrainConfig, create_trainee
from foredraft.drafters.mlp_speculator.variants import VARIANTS
from foredraft.errors import ForedraftError


@dataclass(frozen=True)
class Config:
    """Options. Without `tree_nodes`, `top_k` and `branching` the draft is a chain.

    Args:
        tree_nodes: verified nodes of a dynamic tree.
        top_k: children per node and expanded nodes per level of the dynamic tree.
        branching: children of every node by depth, or "published" for the tree in the checkpoint's config. Of that tree
            the `n_candidates` likeliest whole paths are verified; under `reject`, as many sampled nodes.
        min_confidence: path probability in [0, 1) below which a draft stops.
        quantization: "int8" or "int4" weights; None = as stored.
    """

    tree_nodes: int | None = None
    top_k: int | None = None
    branching: tuple[int, ...] | str | None = None
    min_confidence: float = 0.0
    quantization: str | None = None

    def to_tree_spec(self, num_speculative_tokens: int, shape: MlpSpeculatorShape) -> TreeSpec:
        """Return the tree spec, at most `shape.n_predict` deep. Raises ForedraftError for invalid options."""
        branching, candidates = self.branching, None
        if isinstance(branching, str):
            if branching != "published":
                raise ForedraftError(f'branching takes numbers of children by depth, or "published", got {branching!r}')
            if shape.branching is None:
                raise ForedraftError("the checkpoint's config has no top_k_tokens_per_head; give branching as numbers")
            branching, candidates = shape.branching, shape.candidates
        if branching is not None and len(branching) > shape.n_predict:
            raise ForedraftError(
                f"branching is {len(branching)} deep, and the speculator was trained for {shape.n_predict} steps"
            )
        depth = min(num_speculative_tokens, shape.n_predict)
        spec = TreeSpec.from_options(depth, self.tree_nodes, self.top_k, branching, self.min_confidence)
        return spec if candidates is None else spec.with_whole_paths(candidates)


def from_checkpoint(config: Config, checkpoint: Checkpoint, context: DrafterContext) -> StepDrafter:
    """Make the drafter of a loaded speculator."""
    shape = checkpoint.require_shape(MlpSpeculatorShape, "MLP speculator")
    spec = config.to_tree_spec(context.num_speculative_tokens, shape)
    linears = LinearFactory(context, config.quantization)
    if shape.is_lstm:
        lstm = LSTMStepRunner(shape, checkpoint.tensors, linears, context.vocab_size)
        return StepDrafter(lstm.make_native(spec.max_depth) or lstm, spec, context)
    runner = MLPStepRunner(shape, checkpoint.tensors, spec.max_depth, linears, context.vocab_size)
    return StepDrafter(runner.make_native() or runner, spec, context)


METHOD = Method(
    name=checkpoint.NAME,
    config=Config,
    from_checkpoint=from_checkpoint,
    checkpoint=CheckpointFormat(
        title="an MLP speculator",
        shape=MlpSpeculatorShape,
        layouts=(
            StoredLayout(
                "arctic_lstm_speculator",
                LayoutOrder.UNIQUE_NAMES,
                has_tensor(lstm_checkpoint.OWN_TENSOR_NAME),
                lstm_checkpoint.read,
            ),
            StoredLayout("mlp_speculator", LayoutOrder.OWN_NAMES, has_tensor(checkpoint.TENSOR_NAME), checkpoint.read),
        ),
        make_layout=layout.make_layout,
        exports=(ExportFormat("mlp_speculator", export.export_mlp_speculator),),
        refused_exports={
            "vllm": "vLLM has its MLP speculator switched off",
            "sglang": "SGLang loads no MLP speculators",
        },
    ),
    training=Training(TrainConfig, create_trainee),
    built_in=BuiltIn(
        {zoo.DEFAULT_TARGET: "mlp_speculator"},
        {zoo.DEFAULT_TARGET: HeadRecipe(700, {"inner": "192"}, further_steps=450)},
    ),
    variants=VARIANTS,
)
