"""Export of DFlash heads for vLLM and SGLang, which read the authors' layout."""

from foredraft.checkpoints.layouts import CheckpointLayout
from foredraft.checkpoints.schema import Checkpoint
from foredraft.checkpoints.target import ExportTarget
from foredraft.drafters.dflash.checkpoint import make_layout
from foredraft.drafters.dflash.shape import DFlashShape
from foredraft.errors import ForedraftError


def export_dflash(checkpoint: Checkpoint, target: ExportTarget) -> tuple[CheckpointLayout, list[str]]:
    """Export the authors' layout. Raises ForedraftError for layers that are not those of Qwen3."""
    shape = checkpoint.require_shape(DFlashShape, "DFlash head")
    if not shape.block.has_qk_norm or shape.block.has_out_bias:
        raise ForedraftError(f"{checkpoint.folder} has no layers of Qwen3, and engines load no other DFlash head")
    if shape.markov_rank or shape.has_confidence:
        raise ForedraftError(f"{checkpoint.folder} has the heads of DSpark, and only plain DFlash heads are exported")
    layout = make_layout(shape, checkpoint.tensors)
    config = layout.config | {"num_target_layers": target.info.num_layers}
    return CheckpointLayout(layout.method, layout.tensors, config), []
