"""Export of MLP speculators for other engines."""

from foredraft.checkpoints.layouts import CheckpointLayout
from foredraft.checkpoints.schema import Checkpoint
from foredraft.checkpoints.target import ExportTarget
from foredraft.drafters.mlp_speculator.checkpoint import make_layout


def export_mlp_speculator(checkpoint: Checkpoint, target: ExportTarget) -> tuple[CheckpointLayout, list[str]]:
    """Export in the layout of IBM."""
    notes = ["neither vLLM nor SGLang loads MLP speculators now; TGI and Arctic Inference do"]
    return make_layout(checkpoint.shape, checkpoint.tensors), notes
