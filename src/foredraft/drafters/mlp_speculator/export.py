"""Export of MLP speculators for other engines."""

from foredraft.checkpoints.layouts import CheckpointLayout
from foredraft.checkpoints.schema import Checkpoint
from foredraft.checkpoints.target import ExportTarget
from foredraft.drafters.mlp_speculator.layout import make_export_layout


def export_mlp_speculator(checkpoint: Checkpoint, target: ExportTarget) -> tuple[CheckpointLayout, list[str]]:
    """Export in the layout of IBM, or of Arctic for an LSTM cell."""
    readers = "Arctic Inference does" if checkpoint.shape.is_lstm else "TGI and Arctic Inference do"
    notes = [f"neither vLLM nor SGLang loads MLP speculators now; {readers}"]
    return make_export_layout(checkpoint.shape, checkpoint.tensors), notes
