"""Declaration of the method `gemma4_assistant`."""

from foredraft.checkpoints.formats import CheckpointFormat, LayoutOrder, StoredLayout
from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.common.last_hidden_state import can_run_native
from foredraft.drafters.common.target_access import require_target
from foredraft.drafters.common.tree_builder import TreeOptions as Config
from foredraft.drafters.counterpart import VLLM_SAMPLED, Counterpart
from foredraft.drafters.gemma4_assistant import checkpoint
from foredraft.drafters.gemma4_assistant.drafter import Gemma4Assistant
from foredraft.drafters.gemma4_assistant.network import AssistantNetwork, load_network
from foredraft.drafters.gemma4_assistant.shape import AssistantShape
from foredraft.drafters.gemma4_assistant.target_kv import find_target_layers
from foredraft.drafters.gemma4_assistant.variants import VARIANTS
from foredraft.drafters.method import DrafterContext, Method
from foredraft.errors import ForedraftError
from foredraft.models.hf import HFModel
from foredraft.models.packed_linear import pack_linears


def from_checkpoint(config: Config, stored: Checkpoint, context: DrafterContext) -> Gemma4Assistant:
    """Make the drafter of a loaded assistant.

    Raises:
        ForedraftError: for a target whose keys and values this process does not hold, or do not fit the assistant.
    """
    target = _require_pages(context)
    network = load_network(stored).to(context.device, context.dtype).eval()
    if can_run_native(context):
        network = pack_linears(network, None, is_owned=True, run_probe=AssistantNetwork.probe)
    layers = find_target_layers(network.shape, target, stored.folder)
    return Gemma4Assistant(network, target, layers, config.to_tree_spec(context.num_speculative_tokens), context)


def _require_pages(context: DrafterContext) -> HFModel:
    """Return the target if it is decoder-only and all of its keys and values are in this process."""
    target = require_target(context)
    if target.has_encoder:
        raise ForedraftError(
            f"the method {checkpoint.NAME} reads the keys of a decoder-only target, and {context.target_name} has an "
            "encoder; use a drafter for this target"
        )
    if not target.has_whole_kv:
        raise ForedraftError(
            f"the method {checkpoint.NAME} reads keys and values of all heads, and several processes share those of "
            f"{context.target_name}; leave tensor_parallel_size (--tensor-parallel-size) out"
        )
    return target


METHOD = Method(
    name=checkpoint.NAME,
    config=Config,
    accepts_loaded_model=True,
    from_checkpoint=from_checkpoint,
    check_options=Config.to_tree_spec,
    checkpoint=CheckpointFormat(
        title="a Gemma-4 assistant",
        shape=AssistantShape,
        layouts=(StoredLayout("gemma4_assistant", LayoutOrder.DECLARED, checkpoint.is_assistant, checkpoint.read),),
        make_layout=checkpoint.make_layout,
        no_exports="; engines load the published folder as it is",
    ),
    counterparts={
        "vllm": Counterpart("mtp", settings=VLLM_SAMPLED),
        "sglang": Counterpart("NEXTN"),
        "trtllm": Counterpart("MTP", note="it takes no assistants of Gemma 4 12B (gemma4_unified_assistant)"),
        "llama.cpp": Counterpart("draft-mtp"),
    },
    variants=VARIANTS,
)
