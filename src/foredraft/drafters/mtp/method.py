"""Declaration of the method `mtp`."""

from foredraft.checkpoints.formats import CheckpointFormat, ExportFormat, LayoutOrder, StoredLayout, has_tensor
from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.common.feature_drafter import FeatureDrafter, make_feature_lm
from foredraft.drafters.common.target_access import bind_to_target, describe_target, require_target
from foredraft.drafters.common.tree_builder import TreeOptions as Config
from foredraft.drafters.method import DrafterContext, Method, Training
from foredraft.drafters.mtp import checkpoint
from foredraft.drafters.mtp.export import export_into_target
from foredraft.drafters.mtp.network import load_network, make_native
from foredraft.drafters.mtp.shape import MtpShape
from foredraft.drafters.mtp.training import TrainConfig, create_trainee
from foredraft.drafters.mtp.variants import VARIANTS
from foredraft.models.forward_batch import AFTER_FINAL_NORM


def from_checkpoint(config: Config, stored: Checkpoint, context: DrafterContext) -> FeatureDrafter:
    """Make a drafter for `context.target` from a loaded layer."""
    network = load_network(stored, require_target(context))
    bind_to_target(network, stored.folder, context)
    return FeatureDrafter(
        make_feature_lm(network, make_native, context),
        (AFTER_FINAL_NORM,),
        config.to_tree_spec(context.num_speculative_tokens),
        context,
    )


METHOD = Method(
    name=checkpoint.NAME,
    config=Config,
    from_checkpoint=from_checkpoint,
    read_from_target=lambda context: checkpoint.read_from_target(describe_target(require_target(context))),
    check_options=Config.to_tree_spec,
    checkpoint=CheckpointFormat(
        title="an MTP layer",
        shape=MtpShape,
        # A target's folder may hold such a layer beside the model, and is a whole model first.
        layouts=(StoredLayout("mtp", LayoutOrder.OWN_NAMES, has_tensor(r"mtp\.fc\."), checkpoint.read),),
        make_layout=checkpoint.make_layout,
        exports=(ExportFormat("target", export_into_target, copies_target=True),),
    ),
    training=Training(TrainConfig, create_trainee),
    variants=VARIANTS,
)
