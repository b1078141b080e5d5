"""Declaration of the method `eagle3`."""

from dataclasses import dataclass, replace

from foredraft.checkpoints.eagle3 import NORMED_STATE, RAW_STATE
from foredraft.checkpoints.schema import Checkpoint, Eagle3Shape
from foredraft.drafters.common.feature_drafter import FeatureDrafter, make_feature_lm
from foredraft.drafters.common.target_access import (
    bind_to_target,
    load_checkpoint,
    require_target,
)
from foredraft.drafters.common.tree_builder import TreeOptions
from foredraft.drafters.eagle3.network import load_network, make_native
from foredraft.drafters.eagle3.training import TrainConfig, create_trainee
from foredraft.drafters.registry import DrafterContext
from foredraft.errors import ForedraftError

__all__ = ["METHOD", "Config", "TrainConfig", "create", "create_trainee"]

METHOD = "eagle3"
AUTO_RANK = 40  # among the methods with a model, measured on the built-in target; higher is better


@dataclass(frozen=True)
class Config(TreeOptions):
    """Options: the tree options, and `feedback`.

    Args:
        feedback: feature that a draft token reads: the output after ("normed") or before ("raw") the final norm;
            None = as in the checkpoint.
    """

    feedback: str | None = None


def create(config: Config, context: DrafterContext) -> FeatureDrafter:
    """Load the head and make its drafter.

    Raises:
        ForedraftError: for invalid options, or a head of another method or another target.
    """
    config.to_tree_spec(context.num_speculative_tokens)  # report invalid options before the checkpoint is loaded
    return from_checkpoint(config, load_checkpoint(context, METHOD), context)


def from_checkpoint(config: Config, checkpoint: Checkpoint, context: DrafterContext) -> FeatureDrafter:
    """Make the drafter of a loaded head for `context.target`."""
    network = load_network(_apply_feedback(checkpoint, config.feedback), require_target(context))
    bind_to_target(network, checkpoint.folder, context)
    lm, spec = make_feature_lm(network, make_native, context), config.to_tree_spec(context.num_speculative_tokens)
    return FeatureDrafter(lm, network.shape.hidden_layers, spec, context, network.token_ids)


def _apply_feedback(checkpoint: Checkpoint, feedback: str | None) -> Checkpoint:
    """Return the checkpoint with the user's feedback setting. Raises ForedraftError for an unknown value."""
    if feedback not in (None, NORMED_STATE, RAW_STATE):
        raise ForedraftError(f"feedback must be {NORMED_STATE!r} or {RAW_STATE!r}, got {feedback!r}; or leave it out")
    shape = checkpoint.shape
    if feedback is None or not isinstance(shape, Eagle3Shape):
        return checkpoint
    return replace(checkpoint, shape=replace(shape, feeds_normed=feedback == NORMED_STATE))
