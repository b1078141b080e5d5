"""Export of Medusa heads for other engines."""

from foredraft.checkpoints.layouts import CheckpointLayout
from foredraft.checkpoints.schema import Checkpoint
from foredraft.checkpoints.target import ExportTarget
from foredraft.drafters.medusa.checkpoint import MedusaShape, make_layout
from foredraft.errors import ForedraftError


def export_medusa(checkpoint: Checkpoint, target: ExportTarget) -> tuple[CheckpointLayout, list[str]]:
    """Export in the layout of FasterDecoding."""
    notes = ["SGLang loads no Medusa heads; vLLM and TGI do"]
    if not has_own_matrices(checkpoint):  # vLLM would load them without an error, and accept no draft token
        notes = ["vLLM and SGLang load no Medusa heads that use the target's lm_head; TGI does"]
    return make_layout(checkpoint.shape, checkpoint.tensors), notes


def has_own_matrices(checkpoint: Checkpoint) -> bool:
    """Return whether every head has an output matrix, as vLLM expects."""
    assert isinstance(checkpoint.shape, MedusaShape), "routed by method"
    return checkpoint.shape.has_own_head


def export_vllm(checkpoint: Checkpoint, target: ExportTarget) -> tuple[CheckpointLayout, list[str]]:
    """Export with vLLM's names, and declare counts and biases under vLLM's keys: it drops undeclared biases."""
    layout = make_layout(checkpoint.shape, checkpoint.tensors)
    size = layout.config["vocab_size"]
    heads, layers = layout.config.pop("medusa_num_heads"), layout.config.pop("medusa_num_layers")
    if layout.config.pop("version", None) is not None:
        raise ForedraftError(
            f"{checkpoint.folder} uses the target's lm_head, and vLLM loads a matrix for every Medusa head; "
            "train heads with matrices of their own for it"
        )
    tensors = {}
    for name, value in layout.tensors.items():
        head, layer, suffix = name.split(".", 2)
        is_output = suffix == "weight"
        vllm_name = (
            f"lm_heads.{head}.weight" if is_output else f"blocks.{head}.layers.{layer}.{suffix.removeprefix('linear.')}"
        )
        tensors[vllm_name] = value
    config = layout.config | {"num_heads": heads, "num_hidden_layers": layers, "truncated_vocab_size": size}
    return CheckpointLayout(layout.method, tensors, config), [
        "vLLM drafts a chain of the likeliest token of every head, no tree"
    ]
