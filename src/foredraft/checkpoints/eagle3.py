"""EAGLE-3 heads as their authors, SpecForge and ModelOpt write them; `speculators` brings its own config here."""

import logging
from dataclasses import replace
from typing import Any

import torch

from foredraft.checkpoints import aux_layers, vocabulary
from foredraft.checkpoints.decoder_layers import (
    count_layers,
    infer_block_shape,
    list_layer_shapes,
    read_windows,
)
from foredraft.checkpoints.eagle import check_vocabulary
from foredraft.checkpoints.schema import Checkpoint, Eagle3Shape, TargetInfo
from foredraft.checkpoints.tensor_claims import ExpectedTensor, TensorClaims
from foredraft.checkpoints.tensors import TensorFiles

METHOD, TITLE = "eagle3", "an EAGLE-3 head"
SPECFORGE_FORMAT = "SpecForge EAGLE-3"
FEEDBACK_KEY, NORMED_STATE, RAW_STATE = "foredraft_feedback", "normed", "raw"  # a key of ours, and what it may say
TENSOR_ALIASES = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
FIRST_NORM, SECOND_NORM = ".input_layernorm.weight", ".hidden_norm.weight"
log = logging.getLogger(__name__)


def read(
    files: TensorFiles,
    config: dict[str, Any],
    target: TargetInfo,
    format_name: str | None = None,
    has_sliding_windows: bool = False,
) -> Checkpoint:
    """`kind` names the layout where the caller knows it; `slides`: its trainer heeds layer_types and sliding_window."""
    names, twins = _map_names(files)
    claims = TensorClaims(files, names)
    format_name = format_name or _detect_format(files, config)
    shape = _infer_shape(claims, config, target, format_name)
    if has_sliding_windows:
        shape = replace(
            shape, block=replace(shape.block, sliding_windows=read_windows(claims, config, shape.num_layers))
        )
    claims.check(
        list_tensor_shapes(shape)
        | dict.fromkeys(twins, (shape.block.hidden,))
        | vocabulary.list_optional_maps(claims, shape)
    )
    vocabulary.check_maps(claims, shape)
    tensors = claims.read()
    for name in twins:
        other = name.replace(SECOND_NORM, FIRST_NORM)
        if not torch.equal(tensors[name], tensors[other]):
            raise claims.refuse(f"{name} and {other} differ, and engines disagree which of them a later layer reads")
    needed = list_tensor_shapes(shape).keys()
    return Checkpoint(
        METHOD,
        format_name,
        files.folder,
        shape,
        {name: tensor for name, tensor in tensors.items() if name in needed},
        config,
    )


def _detect_format(files: TensorFiles, config: dict[str, Any]) -> str:
    """Return the name of the program whose layout the folder has."""
    if not any(name.startswith("midlayer.") for name in files.stored_tensors):
        return "ModelOpt EAGLE-3"
    is_named = any("Eagle3" in str(name) for name in config.get("architectures") or ())
    return SPECFORGE_FORMAT if is_named else "EAGLE-3"


def _map_names(files: TensorFiles) -> tuple[dict[str, str], list[str]]:
    """Ours -> as stored, and those of ours that only repeat another.

    Layers after the first have one norm before attention, which SGLang calls hidden_norm: either may be there, or both.
    """
    found: dict[str, str] = {}
    for stored in files.stored_tensors:
        if stored.endswith(".rotary_emb.inv_freq"):
            continue
        head, _, rest = stored.partition(".")
        name = (
            f"layers.0.{rest}" if head == "midlayer" else f"{TENSOR_ALIASES.get(head, head)}.{rest}" if rest else stored
        )
        if name in found:
            raise files.refuse(f"{found[name]} and {stored} are the same tensor in two naming schemes; keep one")
        found[name] = stored
    twins = []
    for name in [name for name in found if name.endswith(SECOND_NORM) and not name.startswith("layers.0.")]:
        first = name.replace(SECOND_NORM, FIRST_NORM)
        if first in found:
            twins.append(name)
        else:
            found[first] = found.pop(name)
    return found, twins


def _infer_shape(claims: TensorClaims, config: dict[str, Any], target: TargetInfo, format_name: str) -> Eagle3Shape:
    hidden = claims.require_shape("norm.weight", 1)[0]
    said = config.get("target_hidden_size") or target.hidden
    claims.check_target("hidden size", said, target.name, target.hidden)
    check_vocabulary(claims, config, target)
    nested = config.get("eagle_config") or {}
    has_fc, count = _has_fc(claims, nested), 1
    if has_fc:
        width = claims.require_shape("fc.weight", 2)[1]
        count, rest = divmod(width, target.hidden)
        if rest or not count:
            raise claims.refuse(
                f"fc.weight reads {width} numbers, which is no multiple of the hidden size {target.hidden} of "
                f"{target.name}; use a drafter for this target"
            )
    elif hidden != target.hidden:
        claims.check_target("hidden size", hidden, target.name, target.hidden)
    if hidden != target.hidden and "embed_tokens.weight" not in claims:
        raise claims.refuse_missing(
            "embed_tokens.weight", f"rows of {target.name} have width {target.hidden}, not {hidden}"
        )
    return Eagle3Shape(
        block=infer_block_shape(claims, config, hidden),
        vocab_size=target.vocab_size,
        draft_vocab_size=_infer_draft_vocab_size(claims, config, target, hidden),
        target_hidden=target.hidden,
        hidden_layers=aux_layers.resolve_hidden_layers(claims, config, target.num_layers, count)
        if has_fc
        else aux_layers.select_last_state(claims),
        num_layers=count_layers(claims),
        has_fc=has_fc,
        has_fc_bias="fc.bias" in claims,
        has_embedding="embed_tokens.weight" in claims,
        has_own_head="lm_head.weight" in claims,
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        norm_before_fc=_has_norm(claims, config, nested, "norm_before_fc", "input_norm.weight"),
        has_fc_norm=_has_norm(claims, config, nested, "fc_norm", "fc_norm.0.weight"),
        feeds_normed=_read_feedback(claims, config, format_name),
    )


def _read_feedback(claims: TensorClaims, config: dict[str, Any], format_name: str) -> bool:
    """Whether a drafted token reads the state before it after the final norm, or as the layer gave it.

    `norm_output` says so, except in what SpecForge trained: there the logits alone are of the normed state, and the
    raw one is fed back. A config of ours says it in a word of its own.
    """
    said = config.get(FEEDBACK_KEY)
    if said is not None:
        if said not in (NORMED_STATE, RAW_STATE):
            raise claims.refuse(
                f"{FEEDBACK_KEY} in config.json is {said!r} and has to be {NORMED_STATE} or {RAW_STATE}"
            )
        return bool(said == NORMED_STATE)
    if config.get("norm_output") and format_name == SPECFORGE_FORMAT:
        log.info(
            "%s: norm_output as SpecForge trains it, raw states are fed back; --spec-option feedback=normed changes it",
            claims.files.folder,
        )
        return False
    return bool(config.get("norm_output", False))


def _has_fc(claims: TensorClaims, nested: dict[str, Any]) -> bool:
    if nested.get("use_aux_hidden_state", True):
        if "fc.weight" not in claims:
            raise claims.refuse_missing(
                "fc.weight", "without it config.json has to say eagle_config.use_aux_hidden_state false"
            )
        return True
    if "fc.weight" in claims:
        raise claims.refuse("config.json says use_aux_hidden_state false, and fc.weight is there; one of them is wrong")
    return False


def _has_norm(claims: TensorClaims, config: dict[str, Any], nested: dict[str, Any], flag: str, tensor: str) -> bool:
    """A norm that tensors show; one that config.json promises has to be among them."""
    if tensor not in claims and nested.get(flag, config.get(flag)):
        raise claims.refuse_missing(tensor, f"config.json says {flag}")
    return tensor in claims


def _infer_draft_vocab_size(claims: TensorClaims, config: dict[str, Any], target: TargetInfo, hidden: int) -> int:
    """Vd. Without a head of its own all that the target's knows, so that a map of some is a contradiction."""
    if "lm_head.weight" in claims:
        size = claims.require_shape("lm_head.weight", 2)[0]
    elif hidden != target.hidden:
        raise claims.refuse_missing(
            "lm_head.weight", f"the head of {target.name} reads width {target.hidden}, not {hidden}"
        )
    else:
        size = target.vocab_size
        drafted = claims.require_shape("d2t", 1)[0] if "d2t" in claims else size
        if drafted != size:
            raise claims.refuse_missing(
                "lm_head.weight", f"d2t names {drafted} of the {size} tokens, for a head of that size"
            )
    if size > target.vocab_size:
        raise claims.refuse(
            f"lm_head.weight has {size} rows, and {target.name} has {target.vocab_size} tokens; use a drafter for it"
        )
    if size != target.vocab_size and "d2t" not in claims:
        raise claims.refuse_missing("d2t", f"{size} of {target.vocab_size} tokens are drafted, and nothing says which")
    said = config.get("draft_vocab_size")
    if said not in (None, size):
        log.info("%s: config.json says draft_vocab_size %s, the weights hold %d", claims.files.folder, said, size)
    return size


def list_tensor_shapes(shape: Eagle3Shape) -> dict[str, ExpectedTensor | tuple[int, ...]]:
    """The tensors of a shape; `d2t` is there where fewer tokens are drafted than there are."""
    hidden, states = shape.block.hidden, len(shape.hidden_layers)
    found: dict[str, ExpectedTensor | tuple[int, ...]] = {"norm.weight": (hidden,)}
    if shape.has_fc:
        found["fc.weight"] = (hidden, states * shape.target_hidden)
    if shape.has_fc_bias:
        found["fc.bias"] = (hidden,)
    if shape.has_embedding:
        found["embed_tokens.weight"] = (shape.vocab_size, hidden)
    if shape.has_own_head:
        found["lm_head.weight"] = (shape.draft_vocab_size, hidden)
    if shape.draft_vocab_size != shape.vocab_size:
        found["d2t"] = vocabulary.make_expected_offsets(shape)
    if shape.norm_before_fc:
        found["input_norm.weight"] = (states * shape.target_hidden,)
    if shape.has_fc_norm:
        found |= {f"fc_norm.{i}.weight": (shape.target_hidden,) for i in range(states)}
    for layer in range(shape.num_layers):
        norms = ("input_layernorm", "post_attention_layernorm", "hidden_norm")[: 3 if layer == 0 else 2]
        found |= list_layer_shapes(shape.block, layer, hidden if layer else 2 * hidden, norms)
    return found
