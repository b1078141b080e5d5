"""Access of drafters to the target: sizes, embedding, output matrix and layer shape; checks of a head against it."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.checkpoints.schema import Checkpoint, TargetInfo
from foredraft.checkpoints.target_identity import find_bundled_target, is_other_target
from foredraft.drafters.checkpoint_folders import read, read_loaded
from foredraft.drafters.method import DrafterContext, Method
from foredraft.errors import ForedraftError
from foredraft.kernels.linear import PackedWeight
from foredraft.models.draft_layer import DraftLayerShape
from foredraft.models.hf import HFModel

log = logging.getLogger(__name__)
NUM_COMPARED_ROWS = 512  # embedding rows compared, to distinguish fine-tuned embeddings from untrained ones
MIN_COSINE_SIMILARITY = 0.2  # minimum mean cosine of those rows; untrained rows have about 0


def describe_target(target: HFModel) -> TargetInfo:
    """Return the facts that a drafter's checkpoint is checked against."""
    return TargetInfo(target.name, target.hidden_size, target.vocab_size, target.num_layers)


def load_checkpoint(context: DrafterContext, method: Method) -> Checkpoint:
    """Load the head that the user named, the built-in one, or that of the target's own folder.

    Warns if it was trained for another target.

    Raises:
        ForedraftError: without a head or a target, or if the head is of another method or does not fit the target.
    """
    if context.loaded_model is not None and context.target is not None:
        return read_loaded(context.loaded_model, describe_target(context.target), method)
    name = context.model or context.builtin_drafter
    if name is None and method.read_from_target is not None and context.target is not None:
        return method.read_from_target(context)
    if name is None:
        source = f"`foredraft train {method.name}` makes one"
        if method.training is None:
            source = "it is a published folder, as no training makes one here"
        raise ForedraftError(
            f"the method {method.name} needs a head trained for this target: give --spec-model PATH (or {{'model': "
            f"PATH}}); {source}"
        )
    if context.target is None:
        raise ForedraftError(f"the method {method.name} reads the target's states; give Context a target")
    checkpoint = read(name, describe_target(context.target), method)
    bundled = find_bundled_target(checkpoint.config, Path(name))
    if bundled is not None and bundled.resolve() != Path(context.target.name).resolve():
        log.warning("%s was trained together with the target in %s, not for %s", name, bundled, context.target.name)
    elif is_other_target(checkpoint.config, context.target.embedding):
        trained_for = checkpoint.config.get("base_model_name_or_path") or "a target of other weights"
        log.warning(
            "%s was trained for %s, not for %s: expect few of its drafts to be accepted",
            name,
            trained_for,
            context.target.name,
        )
    return checkpoint


def choose_embedding(own: Tensor | None, target: HFModel, name: str) -> Tensor:
    """Choose the token embedding [V, H] of a head: the checkpoint's, or the target's if that one was never trained.

    Some published files contain an untrained embedding of the right width. Drafts with it are useless.

    Args:
        own: embedding in the checkpoint; None = it has none.
        target: target of the head.
        name: name of the checkpoint, for the warning.
    """
    target_rows = target.embedding
    if own is None or own.shape[-1] != target_rows.shape[-1]:
        return target_rows if own is None else own
    last = min(len(own), len(target_rows)) - 1
    rows = torch.linspace(0, last, NUM_COMPARED_ROWS, dtype=torch.float32, device=own.device).long()
    compared = target_rows[rows.to(target_rows.device)].float().to(own.device)
    similarity = F.cosine_similarity(own[rows].float(), compared, dim=-1)
    if float(similarity.mean()) < MIN_COSINE_SIMILARITY:
        log.warning("%s: its embed_tokens have nothing in common with %s; using the target's", name, target.name)
        return target_rows
    return own


def require_target(context: DrafterContext) -> HFModel:
    """Return the target of the context, which `load_checkpoint` has checked."""
    assert context.target is not None, "a drafter on the target's states was made without a target"
    return context.target


def bind_to_target(network: Any, name: str, context: DrafterContext) -> None:
    """Move a network to the device and dtype of the context, and set its `embedding`.

    Args:
        network: module with an attribute `embedding`, and `embed_tokens` if its checkpoint has an embedding.
        name: name of the checkpoint, for warnings.
        context: device, dtype and target.
    """
    network.to(context.device, context.dtype).eval()
    own = getattr(network, "embed_tokens", None)
    network.embedding = choose_embedding(None if own is None else own.weight.detach(), require_target(context), name)


@torch.no_grad()
def init_as_identity(fc: nn.Linear, layers: Iterable[Any]) -> None:
    """Initialise a head for training so that it outputs its last input state unchanged.

    Args:
        fc: input projection; the last input columns are the state.
        layers: decoder layers; their output projections become 0.
    """
    width = fc.out_features
    fc.weight.zero_()
    fc.weight[:, -width:] = torch.eye(width)
    for layer in layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()


def get_packed_lm_head(target: HFModel) -> PackedWeight | None:
    """Return the output matrix that the target's native code has packed, to share its memory.

    None if the target does not run as native code, or if it scales or caps its logits: use `compute_logits` then.
    """
    is_capped = bool(getattr(target.model.config.get_text_config(), "final_logit_softcapping", None))
    is_plain = _read_logit_divisor(target) == 1.0 and not is_capped
    return target.fused.head if target.fused is not None and is_plain else None


def scale_output_matrix(target: HFModel) -> Tensor:
    """Return the matrix [V, H], in float32, that makes the target's logits without its scaling of logits."""
    return target.head_weight.float() / _read_logit_divisor(target)


def _read_logit_divisor(target: HFModel) -> float:
    """Read the number by which the target divides its logits: that of Granite, or the inverse of Cohere's factor."""
    config = target.model.config.get_text_config()
    divisor, factor = (getattr(config, name, None) or 1.0 for name in ("logits_scaling", "logit_scale"))
    return float(divisor / factor)


def derive_block_shape(target: HFModel) -> DraftLayerShape:
    """Return the shape of a decoder layer with the target's sizes and rotary parameters, for a new head."""
    config: Any = target.model.config.get_text_config()
    heads = int(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return DraftLayerShape(
        hidden=int(config.hidden_size),
        intermediate=int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(head_dim),
        eps=float(getattr(config, "rms_norm_eps", None) or 1e-6),
        max_positions=int(getattr(config, "max_position_embeddings", None) or 2048),
        rope=_read_rope_parameters(config),
    )


def _read_rope_parameters(config: Any) -> dict[str, Any]:
    """Return the target's rotary parameters if a Llama layer can use them, else Llama's defaults.

    Sections of image positions (mrope) do not matter to text, whose three positions are equal.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    default = {"rope_type": "default", "rope_theta": 10000.0}
    is_one_set = "rope_type" in rope and not rope.get("partial_rotary_factor")
    return {key: value for key, value in rope.items() if not key.startswith("mrope_")} if is_one_set else default
