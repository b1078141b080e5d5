"""Declaration of the method `eagle3`."""

from dataclasses import dataclass, replace

from foredraft import zoo
from foredraft.checkpoints.export import make_sglang_command, make_speculators_command, make_vllm_command
from foredraft.checkpoints.formats import CheckpointFormat, ExportFormat, LayoutOrder, StoredLayout
from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.common.feature_drafter import FeatureDrafter, make_feature_lm
from foredraft.drafters.common.target_access import bind_to_target, require_target
from foredraft.drafters.common.tree_builder import TreeOptions
from foredraft.drafters.counterpart import SGLANG_TREE_OPTIONS, TRTLLM_TREE_OPTIONS, VLLM_SAMPLED, Counterpart, set_as
from foredraft.drafters.eagle3 import checkpoint, export
from foredraft.drafters.eagle3.checkpoint import NORMED_STATE, RAW_STATE
from foredraft.drafters.eagle3.network import load_network, make_native
from foredraft.drafters.eagle3.parallel import ParallelDrafter
from foredraft.drafters.eagle3.shape import Eagle3Shape
from foredraft.drafters.eagle3.training import TrainConfig, create_trainee
from foredraft.drafters.eagle3.variants import VARIANTS
from foredraft.drafters.method import BuiltIn, DrafterContext, HeadRecipe, Method, Training
from foredraft.errors import ForedraftError


@dataclass(frozen=True)
class Config(TreeOptions):
    """Options: the tree options, and these.

    Args:
        feedback: feature that a draft token reads: the output after ("normed") or before ("raw") the final norm;
            None = as in the checkpoint.
        parallel: whether one pass drafts all tokens (P-EAGLE, `parallel.py`), as the checkpoint decides; None = do not
            check.
    """

    feedback: str | None = None
    parallel: bool | None = None


def from_checkpoint(config: Config, checkpoint: Checkpoint, context: DrafterContext) -> FeatureDrafter:
    """Make the drafter of a loaded head for `context.target`."""
    _check_parallel(checkpoint, config.parallel)
    network = load_network(_apply_feedback(checkpoint, config.feedback), require_target(context))
    bind_to_target(network, checkpoint.folder, context)
    lm, spec = make_feature_lm(network, make_native, context), config.to_tree_spec(context.num_speculative_tokens)
    if network.shape.mask_token_id is not None:
        return ParallelDrafter(lm, network, spec, context)
    return FeatureDrafter(lm, network.shape.hidden_layers, spec, context, network.token_ids)


def _check_parallel(checkpoint: Checkpoint, parallel: bool | None) -> None:
    """Raise ForedraftError if the option asks for what the head was not trained for."""
    has_masks = isinstance(checkpoint.shape, Eagle3Shape) and checkpoint.shape.mask_token_id is not None
    if parallel is None or parallel == has_masks:
        return
    if parallel:
        raise ForedraftError(
            f"{checkpoint.folder} has no mask_hidden, so it drafts token by token; leave parallel out, or train a head "
            "with --set parallel=true"
        )
    raise ForedraftError(f"{checkpoint.folder} was trained to draft all tokens in one pass; leave parallel out")


def _apply_feedback(checkpoint: Checkpoint, feedback: str | None) -> Checkpoint:
    """Return the checkpoint with the user's feedback setting. Raises ForedraftError for an unknown value."""
    if feedback not in (None, NORMED_STATE, RAW_STATE):
        raise ForedraftError(f"feedback must be {NORMED_STATE!r} or {RAW_STATE!r}, got {feedback!r}; or leave it out")
    shape = checkpoint.shape
    if feedback is None or not isinstance(shape, Eagle3Shape):
        return checkpoint
    if shape.mask_token_id is not None:
        raise ForedraftError(f"{checkpoint.folder} drafts all tokens in one pass; none reads a state: omit feedback")
    return replace(checkpoint, shape=replace(shape, feeds_normed=feedback == NORMED_STATE))


METHOD = Method(
    name=checkpoint.NAME,
    config=Config,
    from_checkpoint=from_checkpoint,
    check_options=Config.to_tree_spec,
    option_aliases={"parallel_drafting": lambda value: {"parallel": value}},
    auto_rank=40,  # above the methods with a model that are slower on the built-in target
    checkpoint=CheckpointFormat(
        title="an EAGLE-3 head",
        shape=Eagle3Shape,
        layouts=(
            StoredLayout("speculators", LayoutOrder.DECLARED, checkpoint.is_speculators, checkpoint.read_speculators),
            StoredLayout("eagle3", LayoutOrder.MARKERS, checkpoint.has_marker_tensors, checkpoint.read),
        ),
        make_layout=checkpoint.make_layout,
        exports=(
            ExportFormat("eagle3", export.export_portable, make_vllm_command),
            ExportFormat("speculators", export.export_speculators, make_speculators_command),
            ExportFormat("vllm", export.export_vllm, make_vllm_command),
            ExportFormat("sglang", export.export_sglang, make_sglang_command),
        ),
    ),
    training=Training(TrainConfig, create_trainee),
    # The setting `steps` of this method is the number of unrolled steps.
    built_in=BuiltIn(
        {zoo.DEFAULT_TARGET: "eagle3"}, {zoo.DEFAULT_TARGET: HeadRecipe(1500, {"steps": "4"}, further_steps=800)}
    ),
    counterparts={
        "vllm": Counterpart(
            "eagle3", export="vllm", options={"parallel": set_as("parallel_drafting")}, settings=VLLM_SAMPLED
        ),
        "sglang": Counterpart("EAGLE3", export="sglang", options=SGLANG_TREE_OPTIONS),
        "trtllm": Counterpart("Eagle3", export="sglang", options=TRTLLM_TREE_OPTIONS),
        "llama.cpp": Counterpart("draft-eagle3", export="sglang"),
    },
    variants=VARIANTS,
)
