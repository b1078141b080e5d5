"""Declaration of the method `early_exit`."""

from foredraft import zoo
from foredraft.checkpoints.formats import CheckpointFormat, LayoutOrder, StoredLayout, has_tensor
from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.common.target_access import load_checkpoint
from foredraft.drafters.early_exit import checkpoint
from foredraft.drafters.early_exit.adapter import ExitAdapter
from foredraft.drafters.early_exit.checkpoint import EarlyExitShape
from foredraft.drafters.early_exit.drafter import Config, EarlyExit
from foredraft.drafters.early_exit.layer_selection import FixedExitLayer, create_layer_selector
from foredraft.drafters.early_exit.training import TrainConfig, create_trainee
from foredraft.drafters.early_exit.variants import VARIANTS
from foredraft.drafters.method import BuiltIn, DrafterContext, HeadRecipe, Method, Training
from foredraft.errors import ForedraftError
from foredraft.models.hf import HFModel
from foredraft.models.truncated import check_exit_layer


def create(config: Config, context: DrafterContext) -> EarlyExit:
    """Make the drafter, with the user's adapter or the built-in one if it fits `exit_layer`.

    Raises:
        ForedraftError: for a layer that the target does not have, or an adapter of another target.
    """
    spec, target = config.to_tree_spec(context.num_speculative_tokens), _require_decoder(context)
    if config.exit_layer is not None:
        check_exit_layer(target, config.exit_layer)
    if context.model is not None or context.builtin_drafter is not None:
        checkpoint = load_checkpoint(context, METHOD)
        if context.model is not None or config.exit_layer in (None, checkpoint.shape.exit_layer):
            return from_checkpoint(config, checkpoint, context)
    if config.exit_layer is None:
        return EarlyExit(target, create_layer_selector(target, (spec.max_depth, spec.max_nodes)), spec, context)
    return EarlyExit(target, FixedExitLayer(config.exit_layer), spec, context)


def from_checkpoint(config: Config, checkpoint: Checkpoint, context: DrafterContext) -> EarlyExit:
    """Make the drafter of a loaded adapter."""
    shape = checkpoint.require_shape(EarlyExitShape, "early-exit adapter")
    target = _require_decoder(context)
    if config.exit_layer not in (None, shape.exit_layer):
        raise ForedraftError(
            f"{checkpoint.folder} is an adapter for layer {shape.exit_layer}, not {config.exit_layer}; leave "
            "exit_layer out, or draft without the adapter"
        )
    adapter = ExitAdapter.from_tensors(shape, checkpoint.tensors, target).to(target.device, context.dtype).eval()
    return EarlyExit(
        target, FixedExitLayer(shape.exit_layer), config.to_tree_spec(context.num_speculative_tokens), context, adapter
    )


def _require_decoder(context: DrafterContext) -> HFModel:
    """Return the target if it is decoder-only; an encoder's input has no entries in the shared KV pages."""
    target = context.target
    if target is None:
        raise ForedraftError("the method early_exit drafts with the target itself; give Context a target")
    if not isinstance(target, HFModel) or getattr(target.model.config, "is_encoder_decoder", False):
        raise ForedraftError(f"the method early_exit needs a decoder-only target, and {context.target_name} is not one")
    return target


METHOD = Method(
    name=checkpoint.NAME,
    config=Config,
    create=create,
    from_checkpoint=from_checkpoint,
    checkpoint=CheckpointFormat(
        title="an early-exit adapter",
        shape=EarlyExitShape,
        layouts=(StoredLayout("early_exit", LayoutOrder.OWN_NAMES, has_tensor(r"exit_adapter\."), checkpoint.read),),
        make_layout=checkpoint.make_layout,
    ),
    training=Training(TrainConfig, create_trainee),
    built_in=BuiltIn(
        {zoo.DEFAULT_TARGET: "early_exit"},
        {zoo.DEFAULT_TARGET: HeadRecipe(600, {"exit_layer": "6"}, learning_rate=0.04)},
    ),
    variants=VARIANTS,
)
