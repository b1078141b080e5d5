"""What a drafter on the target's states takes from the target: its size, its embeddings, its layers' shape."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.checkpoints.base import Checkpoint, TargetFacts
from foredraft.checkpoints.identity import beside, is_other
from foredraft.checkpoints.read import read
from foredraft.drafters.base import Context
from foredraft.errors import ForedraftError
from foredraft.kernels.linear import PackedWeight
from foredraft.models.block import BlockShape
from foredraft.models.lm import HFModel

log = logging.getLogger(__name__)
LOOKED_AT = 512  # rows compared to tell fine-tuned embeddings from random ones
ALIKE = 0.2  # mean cosine; random rows come to about zero


def facts(target: HFModel) -> TargetFacts:
    return TargetFacts(target.name, target.hidden_size, target.vocab_size, target.num_layers)


def loaded(context: Context, method: str) -> Checkpoint:
    """The head that was asked for. Raises ForedraftError where none is given, or one of another kind or target."""
    name = context.model or context.builtin
    if name is None:
        raise ForedraftError(
            f"the method {method} needs a head trained for this target: give --spec-model PATH (or {{'model': PATH}}); "
            f"`foredraft train {method}` makes one"
        )
    if context.target is None:
        raise ForedraftError(f"the method {method} reads the target's states; give Context a target")
    checkpoint = read(name, facts(context.target), method)
    own = beside(checkpoint.config, Path(name))
    if own is not None and own.resolve() != Path(context.target.name).resolve():
        log.warning("%s was trained together with the target in %s, not for %s", name, own, context.target.name)
    elif is_other(checkpoint.config, context.target.embedding):
        said = checkpoint.config.get("base_model_name_or_path") or "a target of other weights"
        log.warning(
            "%s was trained for %s, not for %s: expect few of its drafts to be kept", name, said, context.target.name
        )
    return checkpoint


def embedding_of(own: Tensor | None, target: HFModel, name: str) -> Tensor:
    """[V, H] the rows to read tokens with: a checkpoint's own, unless they have nothing of the target's.

    Some published files carry rows that were never trained nor copied; the widths agree and drafts are nonsense.
    """
    theirs = target.embedding
    if own is None or own.shape[-1] != theirs.shape[-1]:
        return theirs if own is None else own
    rows = torch.linspace(0, min(len(own), len(theirs)) - 1, LOOKED_AT, device=own.device).long()
    likeness = F.cosine_similarity(own[rows].float(), theirs[rows.to(theirs.device)].float().to(own.device), dim=-1)
    if float(likeness.mean()) < ALIKE:
        log.warning("%s: its embed_tokens have nothing in common with %s; using the target's", name, target.name)
        return theirs
    return own


def lender(context: Context) -> HFModel:
    assert context.target is not None, "a drafter on the target's states was made without a target"
    return context.target


def settle(network: Any, name: str, context: Context) -> None:
    """Where and in what type it will draft, with the rows it will read tokens by."""
    network.to(context.device, context.dtype).eval()
    own = getattr(network, "embed_tokens", None)
    network.embedding = embedding_of(None if own is None else own.weight.detach(), lender(context), name)


@torch.no_grad()
def pass_through(fc: nn.Linear, layers: Iterable[Any]) -> None:
    """Where training begins: the last state put in comes out, and a token later it is not far from itself."""
    width = fc.out_features
    fc.weight.zero_()
    fc.weight[:, -width:] = torch.eye(width)
    for layer in layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()


def packed_head(target: HFModel) -> PackedWeight | None:
    """The target's head as its native pass holds it, where it does: nothing is packed twice. Scaled logits are left to
    the target's own function."""
    config = target.model.config.get_text_config()
    is_plain = getattr(config, "logits_scaling", 1.0) == 1.0 and not getattr(config, "final_logit_softcapping", None)
    return target.fused.head if target.fused is not None and is_plain else None


def block_like(target: HFModel) -> BlockShape:
    """A decoder layer of the target's own proportions, for a head that is yet to be trained."""
    config: Any = target.model.config.get_text_config()
    heads = int(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return BlockShape(
        hidden=int(config.hidden_size),
        intermediate=int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(head_dim),
        eps=float(getattr(config, "rms_norm_eps", None) or 1e-6),
        max_positions=int(getattr(config, "max_position_embeddings", None) or 2048),
        rope=_rope(config),
    )


def _rope(config: Any) -> dict[str, Any]:
    """The target's rotary parameters if they are one set that a Llama layer understands."""
    rope = getattr(config, "rope_parameters", None) or {}
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    is_one_set = "rope_type" in rope and not rope.get("partial_rotary_factor")
    return dict(rope) if is_one_set else plain
