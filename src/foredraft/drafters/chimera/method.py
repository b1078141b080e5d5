"""Declaration of the method `chimera`."""

from foredraft import zoo
from foredraft.checkpoints.formats import CheckpointFormat, LayoutOrder, StoredLayout, has_tensor
from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.chimera import checkpoint
from foredraft.drafters.chimera.drafter import Chimera
from foredraft.drafters.chimera.training import TrainConfig, create_trainee, load_network
from foredraft.drafters.chimera.variants import VARIANTS
from foredraft.drafters.common.target_access import bind_to_target, require_target
from foredraft.drafters.common.tree_builder import TreeOptions as Config
from foredraft.drafters.method import BuiltIn, DrafterContext, HeadRecipe, Method, Training


def from_checkpoint(config: Config, checkpoint: Checkpoint, context: DrafterContext) -> Chimera:
    """Make the drafter of loaded heads for `context.target`."""
    network = load_network(checkpoint, require_target(context))
    bind_to_target(network, checkpoint.folder, context)
    return Chimera(network, config.to_tree_spec(context.num_speculative_tokens), context)


METHOD = Method(
    name=checkpoint.NAME,
    config=Config,
    from_checkpoint=from_checkpoint,
    check_options=Config.to_tree_spec,
    checkpoint=CheckpointFormat(
        title="Chimera heads",
        shape=checkpoint.ChimeraShape,
        layouts=(StoredLayout("chimera", LayoutOrder.OWN_NAMES, has_tensor(r"trigram\.weight$"), checkpoint.read),),
        make_layout=checkpoint.make_layout,
    ),
    training=Training(TrainConfig, create_trainee),
    built_in=BuiltIn(
        {zoo.DEFAULT_TARGET: "chimera"},
        {zoo.DEFAULT_TARGET: HeadRecipe(300, {"heads": "2", "intermediate": "224", "steps": "4"}, further_steps=400)},
    ),
    variants=VARIANTS,
)
