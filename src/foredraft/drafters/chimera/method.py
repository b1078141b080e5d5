"""Declaration of the method `chimera`."""

from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.chimera.drafter import Chimera
from foredraft.drafters.chimera.training import TrainConfig, create_trainee, load_network
from foredraft.drafters.common.target_access import bind_to_target, load_checkpoint, require_target
from foredraft.drafters.common.tree_builder import TreeOptions as Config
from foredraft.drafters.registry import DrafterContext

__all__ = ["METHOD", "Config", "TrainConfig", "create", "create_trainee"]

METHOD = "chimera"


def create(config: Config, context: DrafterContext) -> Chimera:
    """Load the heads and make their drafter.

    Raises:
        ForedraftError: for invalid tree options, or heads of another method or another target.
    """
    config.to_tree_spec(context.num_speculative_tokens)  # report invalid options before the checkpoint is loaded
    return from_checkpoint(config, load_checkpoint(context, METHOD), context)


def from_checkpoint(config: Config, checkpoint: Checkpoint, context: DrafterContext) -> Chimera:
    """Make the drafter of loaded heads for `context.target`."""
    network = load_network(checkpoint, require_target(context))
    bind_to_target(network, checkpoint.folder, context)
    return Chimera(network, config.to_tree_spec(context.num_speculative_tokens), context)
