"""Reader of EAGLE-3 heads as their authors, SpecForge and ModelOpt write them.

`read_speculators` reads the layout of `speculators`, which has a config.json of its own.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foredraft.checkpoints.decoder_layers import (
    check_vocabulary,
    count_layers,
    infer_block_shape,
    list_layer_shapes,
    make_layer_config,
    read_windows,
)
from foredraft.checkpoints.layouts import CheckpointLayout, check_tensors
from foredraft.checkpoints.schema import Checkpoint, TargetInfo
from foredraft.checkpoints.speculators import is_type, merge_config
from foredraft.checkpoints.tensor_claims import ExpectedTensor, TensorClaims
from foredraft.checkpoints.tensors import TensorFiles
from foredraft.drafters.eagle3 import aux_layers, vocabulary
from foredraft.drafters.eagle3.shape import Eagle3Shape
from foredraft.models.forward_batch import AFTER_FINAL_NORM

NAME = "eagle3"
SPECFORGE_FORMAT = "SpecForge EAGLE-3"
FEEDBACK_KEY, NORMED_STATE, RAW_STATE = "foredraft_feedback", "normed", "raw"  # this project's key, and its values
# First part of a stored name -> first part of the internal name.
TENSOR_ALIASES = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
MARKER_TENSORS = frozenset(
    {"d2t", "t2d", "layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight", "input_norm.weight"}
)
MARKER_PREFIXES = ("midlayer.", "fc_norm.", "aux_norm_")
# Keys of a speculators config.json beside its decoder layer that describe the head.
SPECULATORS_KEYS = (
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    FEEDBACK_KEY,
    aux_layers.LAYER_IDS_KEY,
    "mask_token_id",
    "ptd_token_id",
)
MASK_TENSOR, MASK_KEYS = "mask_hidden", ("mask_token_id", "ptd_token_id")  # of P-EAGLE: speculators, its authors
PEAGLE = "peagle"
FIRST_NORM, SECOND_NORM = ".input_layernorm.weight", ".hidden_norm.weight"
log = logging.getLogger(__name__)


def read(
    files: TensorFiles,
    config: dict[str, Any],
    target: TargetInfo,
    format_name: str | None = None,
    has_sliding_windows: bool = False,
) -> Checkpoint:
    """Read an EAGLE-3 head.

    Args:
        files: Tensors of the folder.
        config: Content of config.json.
        target: Target that the head must fit.
        format_name: Name of the layout; None = detected.
        has_sliding_windows: Whether the trainer applies `layer_types` and `sliding_window`.
    """
    names, repeats = _map_names(files)
    claims = TensorClaims(files, names)
    format_name = format_name or _detect_format(files, config)
    shape = _infer_shape(claims, config, target, format_name)
    if has_sliding_windows:
        shape = replace(
            shape, block=replace(shape.block, sliding_windows=read_windows(claims, config, shape.num_layers))
        )
    claims.check(
        list_tensor_shapes(shape)
        | dict.fromkeys(repeats, (shape.block.hidden,))
        | vocabulary.list_optional_maps(claims, shape)
    )
    vocabulary.check_maps(claims, shape)
    tensors = claims.read()
    for name in repeats:
        original = name.replace(SECOND_NORM, FIRST_NORM)
        if not torch.equal(tensors[name], tensors[original]):
            raise claims.refuse(f"{name} and {original} differ, and engines disagree which of them a later layer reads")
    needed = list_tensor_shapes(shape).keys()
    return Checkpoint(
        NAME,
        format_name,
        files.folder,
        shape,
        {name: tensor for name, tensor in tensors.items() if name in needed},
        config,
    )


def read_speculators(files: TensorFiles, config: dict[str, Any], target: TargetInfo) -> Checkpoint:
    """Read a head in the `speculators` layout, where `norm_before_residual` is true unless config.json denies it."""
    merged = merge_config(files, config, SPECULATORS_KEYS)
    merged["norm_before_residual"] = config.get("norm_before_residual", True)
    checkpoint = read(files, merged, target, format_name="speculators EAGLE-3", has_sliding_windows=True)
    return replace(checkpoint, config=config)


def is_speculators(names: Collection[str], config: Mapping[str, Any]) -> bool:
    """Check whether config.json declares an EAGLE-3 or P-EAGLE head in the `speculators` layout."""
    return is_type(config, NAME) or is_type(config, PEAGLE)


def has_marker_tensors(names: Collection[str], config: Mapping[str, Any]) -> bool:
    """Check whether a folder has a tensor of which EAGLE-3 heads, and no EAGLE heads, have at least one."""
    return not MARKER_TENSORS.isdisjoint(names) or any(name.startswith(MARKER_PREFIXES) for name in names)


def _detect_format(files: TensorFiles, config: dict[str, Any]) -> str:
    """Return the name of the program whose layout the folder has."""
    if not any(name.startswith("midlayer.") for name in files.stored_tensors):
        return "ModelOpt EAGLE-3"
    is_named = any("Eagle3" in str(name) for name in config.get("architectures") or ())
    return SPECFORGE_FORMAT if is_named else "EAGLE-3"


def _map_names(files: TensorFiles) -> tuple[dict[str, str], list[str]]:
    """Map internal names to stored names, and list the internal names that only repeat another tensor.

    Layers after the first have one norm before attention. SGLang calls it hidden_norm; either name may be present, or
    both.
    """
    names: dict[str, str] = {}
    for stored in files.stored_tensors:
        if stored.endswith(".rotary_emb.inv_freq"):
            continue
        head, _, rest = stored.partition(".")
        name = (
            f"layers.0.{rest}" if head == "midlayer" else f"{TENSOR_ALIASES.get(head, head)}.{rest}" if rest else stored
        )
        if name in names:
            raise files.refuse(f"{names[name]} and {stored} are the same tensor in two naming schemes; keep one")
        names[name] = stored
    repeats = []
    for name in [name for name in names if name.endswith(SECOND_NORM) and not name.startswith("layers.0.")]:
        first = name.replace(SECOND_NORM, FIRST_NORM)
        if first in names:
            repeats.append(name)
        else:
            names[first] = names.pop(name)
    return names, repeats


def _infer_shape(claims: TensorClaims, config: dict[str, Any], target: TargetInfo, format_name: str) -> Eagle3Shape:
    hidden = claims.require_shape("norm.weight", 1)[0]
    target_hidden = config.get("target_hidden_size") or target.hidden
    claims.check_target("hidden size", target_hidden, target.name, target.hidden)
    check_vocabulary(claims, config, target)
    nested = config.get("eagle_config") or {}
    has_fc, num_states = _has_fc(claims, nested), 1
    if has_fc:
        width = claims.require_shape("fc.weight", 2)[1]
        num_states, remainder = divmod(width, target.hidden)
        if remainder or not num_states:
            raise claims.refuse(
                f"fc.weight has input width {width}, which is no multiple of the hidden size {target.hidden} of "
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
        hidden_layers=aux_layers.resolve_hidden_layers(claims, config, target.num_layers, num_states)
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
        mask_token_id=_read_mask_token(claims, config, target) if MASK_TENSOR in claims else None,
    )


def _read_mask_token(claims: TensorClaims, config: dict[str, Any], target: TargetInfo) -> int:
    """Return the token of the masks of a P-EAGLE head."""
    found = [config[key] for key in MASK_KEYS if config.get(key) is not None]
    if not found or not isinstance(found[0], int) or not 0 <= found[0] < target.vocab_size:
        raise claims.refuse(
            f"it has {MASK_TENSOR}, so config.json has to set {' or '.join(MASK_KEYS)} to a token of {target.name} "
            f"(0..{target.vocab_size - 1}), not {found[0] if found else None!r}"
        )
    return found[0]


def _read_feedback(claims: TensorClaims, config: dict[str, Any], format_name: str) -> bool:
    """Check whether a draft token reads the previous state after the final norm (True) or before it (False).

    `norm_output` decides, except in heads that SpecForge trained: there only the logits read the normalised state, and
    the raw state is fed back. The key `foredraft_feedback` of this project overrides both.
    """
    declared = config.get(FEEDBACK_KEY)
    if declared is not None:
        if declared not in (NORMED_STATE, RAW_STATE):
            raise claims.refuse(
                f"{FEEDBACK_KEY} in config.json is {declared!r} and has to be {NORMED_STATE} or {RAW_STATE}"
            )
        return bool(declared == NORMED_STATE)
    if config.get("norm_output") and format_name == SPECFORGE_FORMAT:
        log.info(
            "%s: norm_output as SpecForge trains it: raw states are fed back; --spec-option feedback=normed changes it",
            claims.files.folder,
        )
        return False
    return bool(config.get("norm_output", False))


def _has_fc(claims: TensorClaims, nested: dict[str, Any]) -> bool:
    """Check whether the head has fc; config.json and the tensors must agree."""
    if nested.get("use_aux_hidden_state", True):
        if "fc.weight" not in claims:
            raise claims.refuse_missing(
                "fc.weight", "without it config.json must set eagle_config.use_aux_hidden_state to false"
            )
        return True
    if "fc.weight" in claims:
        raise claims.refuse("config.json sets use_aux_hidden_state false, and fc.weight is there; one of them is wrong")
    return False


def _has_norm(claims: TensorClaims, config: dict[str, Any], nested: dict[str, Any], flag: str, tensor: str) -> bool:
    """Check whether a norm is among the tensors; it must be if config.json declares it."""
    if tensor not in claims and nested.get(flag, config.get(flag)):
        raise claims.refuse_missing(tensor, f"config.json sets {flag}")
    return tensor in claims


def _infer_draft_vocab_size(claims: TensorClaims, config: dict[str, Any], target: TargetInfo, hidden: int) -> int:
    """Return Vd, the number of tokens that can be drafted.

    A head without its own lm_head drafts the whole vocabulary of the target, so a shorter d2t contradicts it.
    """
    if "lm_head.weight" in claims:
        size = claims.require_shape("lm_head.weight", 2)[0]
    elif hidden != target.hidden:
        raise claims.refuse_missing(
            "lm_head.weight", f"the head of {target.name} reads width {target.hidden}, not {hidden}"
        )
    else:
        size = target.vocab_size
        num_drafted = claims.require_shape("d2t", 1)[0] if "d2t" in claims else size
        if num_drafted != size:
            raise claims.refuse_missing(
                "lm_head.weight", f"d2t names {num_drafted} of the {size} tokens, for a head of that size"
            )
    if size > target.vocab_size:
        raise claims.refuse(
            f"lm_head.weight has {size} rows, and {target.name} has {target.vocab_size} tokens; use a drafter for it"
        )
    if size != target.vocab_size and "d2t" not in claims:
        raise claims.refuse_missing(
            "d2t", f"{size} of {target.vocab_size} tokens can be drafted, and no map names them"
        )
    declared = config.get("draft_vocab_size")
    if declared not in (None, size):
        log.info("%s: config.json sets draft_vocab_size %s, the weights hold %d", claims.files.folder, declared, size)
    return size


def list_tensor_shapes(shape: Eagle3Shape) -> dict[str, ExpectedTensor | tuple[int, ...]]:
    """List the expected tensors of a shape by internal name. `d2t` is required if Vd < V."""
    hidden, num_states = shape.block.hidden, len(shape.hidden_layers)
    shapes: dict[str, ExpectedTensor | tuple[int, ...]] = {"norm.weight": (hidden,)}
    if shape.has_fc:
        shapes["fc.weight"] = (hidden, num_states * shape.target_hidden)
    if shape.has_fc_bias:
        shapes["fc.bias"] = (hidden,)
    if shape.has_embedding:
        shapes["embed_tokens.weight"] = (shape.vocab_size, hidden)
    if shape.has_own_head:
        shapes["lm_head.weight"] = (shape.draft_vocab_size, hidden)
    if shape.draft_vocab_size != shape.vocab_size:
        shapes["d2t"] = vocabulary.make_expected_offsets(shape)
    if shape.mask_token_id is not None:
        shapes[MASK_TENSOR] = (1, 1, num_states * shape.target_hidden)
    if shape.norm_before_fc:
        shapes["input_norm.weight"] = (num_states * shape.target_hidden,)
    if shape.has_fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (shape.target_hidden,) for i in range(num_states)}
    for layer in range(shape.num_layers):
        norms = ("input_layernorm", "post_attention_layernorm", "hidden_norm")[: 3 if layer == 0 else 2]
        shapes |= list_layer_shapes(shape.block, layer, hidden if layer else 2 * hidden, norms)
    return shapes


def make_layout(shape: Eagle3Shape, tensors: Mapping[str, Tensor]) -> CheckpointLayout:
    """Use the authors' names, and list hidden layers in both conventions: each engine reads its own."""
    weights = check_tensors(tensors, list_tensor_shapes(shape))
    return CheckpointLayout(NAME, make_stored_tensors(shape, weights), make_config(shape))


def make_stored_tensors(shape: Eagle3Shape, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under their stored names.

    t2d is added beside d2t. A single layer is stored as `midlayer`. The one norm of a later layer is stored under both
    names that engines use.
    """
    stored = dict(tensors)
    if "d2t" in stored:
        stored["d2t"] = stored["d2t"].long()
        stored["t2d"] = torch.zeros(shape.vocab_size, dtype=torch.bool)
        stored["t2d"][vocabulary.compute_target_ids(stored["d2t"])] = True
    if shape.num_layers == 1:
        return {
            f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name: value
            for name, value in stored.items()
        }
    for layer in range(1, shape.num_layers):
        norm = stored[f"layers.{layer}.input_layernorm.weight"]
        stored[f"layers.{layer}.hidden_norm.weight"] = norm.clone()
    return stored


def make_config(shape: Eagle3Shape, num_layers: int | None = None) -> dict[str, Any]:
    """Return the config.json of an EAGLE-3 head.

    Args:
        shape: Shape of the head.
        num_layers: Layers of the target, to omit hidden layers that are every engine's default; None = list them.
    """
    config = make_layer_config(shape.block, shape.num_layers) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "target_hidden_size": shape.target_hidden,
        "bias": shape.has_fc_bias,
        "norm_before_residual": shape.norm_before_residual,
        "norm_before_fc": shape.norm_before_fc,
        "fc_norm": shape.has_fc_norm,
        "norm_output": shape.feeds_normed,
        FEEDBACK_KEY: NORMED_STATE if shape.feeds_normed else RAW_STATE,
    }
    if shape.mask_token_id is not None:
        config["ptd_token_id"] = shape.mask_token_id
    if shape.hidden_layers == (AFTER_FINAL_NORM,):
        config["eagle_config"] = {"use_aux_hidden_state": False}
    elif num_layers is None or shape.hidden_layers != aux_layers.choose_default_layers(num_layers):
        config[aux_layers.LAYER_IDS_KEY] = list(shape.hidden_layers)
        config["num_aux_hidden_states"] = len(shape.hidden_layers)
        config["eagle_config"] = {
            aux_layers.LAYER_IDS_KEY: [boundary - 1 for boundary in shape.hidden_layers],
            "use_aux_hidden_state": True,
        }
    return config
