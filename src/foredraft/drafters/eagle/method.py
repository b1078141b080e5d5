"""Declaration of the method `eagle`."""

from foredraft import zoo
from foredraft.checkpoints.export import make_sglang_command, make_vllm_command
from foredraft.checkpoints.formats import CheckpointFormat, ExportFormat, LayoutOrder, StoredLayout, has_tensor
from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.common.feature_drafter import FeatureDrafter, make_feature_lm
from foredraft.drafters.common.target_access import bind_to_target, require_target
from foredraft.drafters.common.tree_builder import TreeOptions as Config
from foredraft.drafters.counterpart import SGLANG_TREE_OPTIONS, VLLM_SAMPLED, Counterpart
from foredraft.drafters.eagle import checkpoint, export
from foredraft.drafters.eagle.network import load_network, make_native
from foredraft.drafters.eagle.training import TrainConfig, create_trainee
from foredraft.drafters.eagle.variants import VARIANTS
from foredraft.drafters.method import BuiltIn, DrafterContext, HeadRecipe, Method, Training
from foredraft.models.forward_batch import AFTER_FINAL_NORM


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


METHOD = Method(
    name=checkpoint.NAME,
    config=Config,
    from_checkpoint=from_checkpoint,
    check_options=Config.to_tree_spec,
    auto_rank=50,  # `auto` prefers the highest rank; ranks follow the speed on the built-in target at temperature 1
    checkpoint=CheckpointFormat(
        title="an EAGLE head",
        shape=checkpoint.EagleShape,
        # Other methods have tensors of the same names, so this layout is checked late.
        layouts=(StoredLayout("eagle", LayoutOrder.SHARED_NAMES, has_tensor(r"fc\.weight$"), checkpoint.read),),
        make_layout=checkpoint.make_layout,
        exports=(
            ExportFormat("vllm", export.export_eagle_vllm, make_vllm_command),
            ExportFormat("sglang", export.export_eagle_sglang, make_sglang_command),
        ),
    ),
    training=Training(TrainConfig, create_trainee),
    # 850 updates; the setting `steps` of this method is the number of unrolled steps
    built_in=BuiltIn(
        {zoo.DEFAULT_TARGET: "eagle", zoo.SEQ2SEQ_TARGET: "seq2seq_eagle"},
        {
            zoo.DEFAULT_TARGET: HeadRecipe(700, {"steps": "2"}, further_steps=450),
            zoo.SEQ2SEQ_TARGET: HeadRecipe(900, {"steps": "2"}),
        },
    ),
    counterparts={
        "vllm": Counterpart("eagle", export="vllm", settings=VLLM_SAMPLED),
        "sglang": Counterpart("EAGLE", export="sglang", options=SGLANG_TREE_OPTIONS),
    },
    variants=VARIANTS,
)
