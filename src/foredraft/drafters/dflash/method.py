"""Declaration of the method `dflash`."""

from foredraft import zoo
from foredraft.checkpoints.export import make_vllm_command
from foredraft.checkpoints.formats import CheckpointFormat, ExportFormat, LayoutOrder, StoredLayout
from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.common.target_access import bind_to_target, require_target
from foredraft.drafters.common.tree_builder import TreeOptions as Config
from foredraft.drafters.dflash import checkpoint, export
from foredraft.drafters.dflash.drafter import DFlash
from foredraft.drafters.dflash.network import load_network
from foredraft.drafters.dflash.shape import DFlashShape
from foredraft.drafters.dflash.training import TrainConfig, create_trainee
from foredraft.drafters.dflash.variants import VARIANTS
from foredraft.drafters.method import BuiltIn, DrafterContext, HeadRecipe, Method, Training
from foredraft.errors import ForedraftError


def from_checkpoint(config: Config, checkpoint: Checkpoint, context: DrafterContext) -> DFlash:
    """Make the drafter of a loaded head for `context.target`. A draft is at most as deep as a block."""
    network = load_network(checkpoint, require_target(context))
    bind_to_target(network, checkpoint.folder, context)
    depth = network.shape.max_depth
    spec = config.to_tree_spec(min(context.num_speculative_tokens, depth))
    if spec.max_depth > depth:
        raise ForedraftError(f"branching has {spec.max_depth} levels, and a block of this head drafts {depth} tokens")
    return DFlash(network, spec, context)


METHOD = Method(
    name=checkpoint.NAME,
    config=Config,
    from_checkpoint=from_checkpoint,
    check_options=Config.to_tree_spec,
    checkpoint=CheckpointFormat(
        title="a DFlash head",
        shape=DFlashShape,
        layouts=(
            StoredLayout("speculators", LayoutOrder.DECLARED, checkpoint.is_speculators, checkpoint.read_speculators),
            StoredLayout("dflash", LayoutOrder.OWN_NAMES, checkpoint.is_dflash, checkpoint.read),
        ),
        make_layout=checkpoint.make_layout,
        exports=(ExportFormat("vllm", export.export_dflash, make_vllm_command),),
    ),
    training=Training(TrainConfig, create_trainee),
    built_in=BuiltIn(
        {zoo.DEFAULT_TARGET: "dflash"},
        {
            zoo.DEFAULT_TARGET: HeadRecipe(  # 2.4 M parameters, with DSpark's Markov head
                800, {"loss": "kl", "taps": "2,6,9", "intermediate": "384", "markov_rank": "32"}, further_steps=600
            )
        },
    ),
    variants=VARIANTS,
)
