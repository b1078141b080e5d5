"""Export of EAGLE-3 heads: one layout that vLLM and SGLang read alike, and one for each if they do not."""

from typing import Any

from torch import Tensor

from foredraft.checkpoints.decoder_layers import make_layer_config
from foredraft.checkpoints.layouts import CheckpointLayout
from foredraft.checkpoints.schema import Checkpoint
from foredraft.checkpoints.target import ExportTarget
from foredraft.drafters.eagle3.aux_layers import LAYER_IDS_KEY
from foredraft.drafters.eagle3.checkpoint import make_config, make_layout
from foredraft.drafters.eagle3.shape import Eagle3Shape
from foredraft.errors import ForedraftError
from foredraft.models.forward_batch import AFTER_FINAL_NORM

SPECULATIVE_TOKENS = 3  # draft length that a speculators config proposes
DEFAULT_NUM_STATES = 3  # states of the target that engines expect fc to read, if config.json sets no number


def export_portable(checkpoint: Checkpoint, target: ExportTarget) -> tuple[CheckpointLayout, list[str]]:
    """Export a layout that vLLM and SGLang read alike."""
    _check_exportable(checkpoint, target, "SGLang", "--format vllm or speculators", is_original_only=True)
    return _make_export_layout(checkpoint, target), _list_notes(checkpoint, is_portable=True)


def export_sglang(checkpoint: Checkpoint, target: ExportTarget) -> tuple[CheckpointLayout, list[str]]:
    """Export a layout for SGLang."""
    _check_exportable(checkpoint, target, "SGLang", "--format vllm", is_original_only=True)
    return _make_export_layout(checkpoint, target), _list_notes(checkpoint, is_portable=True)


def export_vllm(checkpoint: Checkpoint, target: ExportTarget) -> tuple[CheckpointLayout, list[str]]:
    """Export a layout for vLLM."""
    _check_exportable(checkpoint, target, "vLLM", None)
    layout = _make_export_layout(checkpoint, target)
    if _require_shape(checkpoint).block.has_qk_norm:
        layout.config.update(architectures=["Eagle3Qwen3ForCausalLM"], model_type="qwen3")
    return layout, _list_notes(checkpoint)


def export_speculators(checkpoint: Checkpoint, target: ExportTarget) -> tuple[CheckpointLayout, list[str]]:
    """Export a speculators folder. It names the target, so vLLM serves both from this folder alone."""
    _check_exportable(checkpoint, target, "the speculators format", None, requires_fc=True)
    shape, layout = _require_shape(checkpoint), _make_export_layout(checkpoint, target)
    model_type = "qwen3" if shape.block.has_qk_norm else "llama"
    layer = make_layer_config(shape.block, shape.num_layers) | {
        "model_type": model_type,
        "vocab_size": shape.vocab_size,
    }
    # In this format vLLM takes the input width of fc from this key alone.
    if len(shape.hidden_layers) != DEFAULT_NUM_STATES:
        layer["num_aux_hidden_states"] = len(shape.hidden_layers)
    proposal = {"proposal_type": "greedy", "speculative_tokens": SPECULATIVE_TOKENS}
    config: dict[str, Any] = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": layout.method,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": layout.method,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": target.info.name, "architectures": list(target.architectures)},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": shape.draft_vocab_size,
        "target_hidden_size": shape.target_hidden,
        "norm_before_residual": shape.norm_before_residual,
        "norm_before_fc": shape.norm_before_fc,
        "fc_norm": shape.has_fc_norm,
        "norm_output": shape.feeds_normed,
        "tie_word_embeddings": False,
        LAYER_IDS_KEY: list(shape.hidden_layers),
    }
    return CheckpointLayout(layout.method, _number_first_layer(layout.tensors), config), _list_notes(checkpoint)


def _number_first_layer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    def rename_tensor(name: str) -> str:
        return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name

    return {rename_tensor(name): value for name, value in tensors.items()}


def _make_export_layout(checkpoint: Checkpoint, target: ExportTarget) -> CheckpointLayout:
    """Make the published layout; hidden layers are listed only if they differ from the default of every engine."""
    layout = make_layout(checkpoint.shape, checkpoint.tensors)
    return CheckpointLayout(
        layout.method, layout.tensors, make_config(_require_shape(checkpoint), target.info.num_layers)
    )


def _require_shape(checkpoint: Checkpoint) -> Eagle3Shape:
    assert isinstance(checkpoint.shape, Eagle3Shape), "routed by method"
    return checkpoint.shape


def _check_exportable(
    checkpoint: Checkpoint,
    target: ExportTarget,
    engine: str,
    alternative: str | None,
    is_original_only: bool = False,
    requires_fc: bool = False,
) -> None:
    """Raise ForedraftError if the drafter uses a feature that the engine does not support.

    Args:
        checkpoint: Drafter to export.
        target: Target of the drafter.
        engine: Name for messages.
        alternative: Format that supports more, for messages; None = there is none.
        is_original_only: Whether the engine supports only the forward pass of the authors' code.
        requires_fc: Whether the engine always passes states through fc.
    """
    shape, block, num_layers = _require_shape(checkpoint), _require_shape(checkpoint).block, target.info.num_layers
    outer = [boundary for boundary in shape.hidden_layers if boundary in (0, num_layers)]
    always_unsupported = {
        f"the target's state at boundary {outer[0] if outer else ''}, which engines capture differently": bool(outer),
        "a bias in fc": shape.has_fc_bias,
        "masks of parallel drafts (P-EAGLE)": shape.mask_token_id is not None,
        "biases in some matrices of its attention and not in others": block.has_qkv_bias != block.has_out_bias,
    }
    original_unsupported = {
        "norm_before_residual": shape.norm_before_residual,
        "norm_before_fc": shape.norm_before_fc,
        "norm_output": shape.feeds_normed,
        "biases in its attention": block.has_qkv_bias,
        "norms of queries and keys": block.has_qk_norm,
        "the target's lm_head": not shape.has_own_head,
    }
    always_unsupported |= {} if requires_fc else {"sliding attention": bool(block.sliding_windows)}
    without_fc = {"the target's last state without fc": shape.hidden_layers == (AFTER_FINAL_NORM,)}
    unsupported = (
        always_unsupported
        | (original_unsupported if is_original_only else {})
        | (without_fc if is_original_only or requires_fc else {})
    )
    for feature, is_present in unsupported.items():
        if is_present:
            hint = (
                f"use {alternative}"
                if alternative and feature not in always_unsupported
                else "train a drafter without it for that engine"
            )
            raise ForedraftError(f"{checkpoint.folder} uses {feature}: {engine} would compute something else; {hint}")


def _list_notes(checkpoint: Checkpoint, is_portable: bool = False) -> list[str]:
    shape = _require_shape(checkpoint)
    source = (
        "last state, after its final norm"
        if shape.hidden_layers == (AFTER_FINAL_NORM,)
        else f"states at boundaries {list(shape.hidden_layers)}"
    )
    notes = [f"it reads the target's {source}"]
    if is_portable and shape.has_embedding and shape.block.hidden == shape.target_hidden:
        notes.append("SGLang reads the target's embeddings instead of its embed_tokens")
    return notes
