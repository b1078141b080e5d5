"""Declaration of the method `eagle`."""

from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.common.feature_drafter import FeatureDrafter, make_feature_lm
from foredraft.drafters.common.target_access import (
    bind_to_target,
    load_checkpoint,
    require_target,
)
from foredraft.drafters.common.tree_builder import TreeOptions as Config
from foredraft.drafters.eagle.network import load_network, make_native
from foredraft.drafters.eagle.training import TrainConfig, create_trainee
from foredraft.drafters.registry import DrafterContext
from foredraft.models.forward_batch import AFTER_FINAL_NORM

__all__ = ["METHOD", "Config", "TrainConfig", "create", "create_trainee"]

METHOD = "eagle"
AUTO_RANK = 50  # preference of `auto` among methods with a model, by speed on the built-in target; higher is better


def create(config: Config, context: DrafterContext) -> FeatureDrafter:
    """Load the head and make its drafter.

    Raises:
        ForedraftError: for invalid tree options, or a head of another method, or one that does not fit the target.
    """
    config.to_tree_spec(context.num_speculative_tokens)  # raises for invalid options before the checkpoint is loaded
    return from_checkpoint(config, load_checkpoint(context, METHOD), context)


def from_checkpoint(config: Config, checkpoint: Checkpoint, context: DrafterContext) -> FeatureDrafter:
    """Make a drafter for `context.target` from a loaded head."""
    network = load_network(checkpoint, require_target(context))
    bind_to_target(network, checkpoint.folder, context)
    return FeatureDrafter(
        make_feature_lm(network, make_native, context),
        (AFTER_FINAL_NORM,),
        config.to_tree_spec(context.num_speculative_tokens),
        context,
    )
