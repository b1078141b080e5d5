"""Export of Hydra heads for other engines."""

from foredraft.checkpoints.layouts import CheckpointLayout
from foredraft.checkpoints.schema import Checkpoint
from foredraft.checkpoints.target import ExportTarget
from foredraft.drafters.hydra.checkpoint import HydraShape, make_layout
from foredraft.errors import ForedraftError
from foredraft.models.draft_layer import make_default_rope


def export_hydra(checkpoint: Checkpoint, target: ExportTarget) -> tuple[CheckpointLayout, list[str]]:
    """Export in the layout of the authors, if their code supports the heads."""
    if checkpoint.format != "Hydra":
        raise ForedraftError(
            f"{checkpoint.folder} has heads in a form of this project, and the authors' code would leave the missing "
            "tensors at random; train with --set own_head=true --set rank=None for it"
        )
    assert isinstance(checkpoint.shape, HydraShape)
    prefix = checkpoint.shape.prefix
    if prefix is not None and prefix.rope != make_default_rope():
        raise ForedraftError(
            f"{checkpoint.folder} has a prefix layer with the rotary parameters {prefix.rope}, and the authors' code "
            "supports only base 10000; train new heads for it"
        )
    return make_layout(checkpoint.shape, checkpoint.tensors), ["neither vLLM nor SGLang loads Hydra heads"]
