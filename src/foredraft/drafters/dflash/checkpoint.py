"""Folders of DFlash heads: the layout of the authors (z-lab), of DeepSpec, and of speculators."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foredraft.checkpoints.decoder_layers import (
    SLIDING_ATTENTION,
    check_vocabulary,
    count_layers,
    infer_block_shape,
    list_layer_shapes,
    make_layer_config,
    read_windows,
)
from foredraft.checkpoints.layouts import CheckpointLayout, check_tensors
from foredraft.checkpoints.recognise import read_architectures
from foredraft.checkpoints.schema import Checkpoint, TargetInfo
from foredraft.checkpoints.speculators import is_type, merge_config
from foredraft.checkpoints.tensor_claims import TensorClaims
from foredraft.checkpoints.tensors import TensorFiles
from foredraft.drafters.dflash.markov import MARKOV_HEADS, ConfidenceHead, make_markov_head
from foredraft.drafters.dflash.shape import DEFAULT_MARKOV, DFlashShape

NAME = "dflash"
ARCHITECTURE = "DFlashDraftModel"
NESTED_KEY = "dflash_config"
LAYER_OUTPUTS_KEY = "target_layer_ids"  # k = the output of layer k, which is boundary k + 1
BOUNDARIES_KEY = "aux_hidden_state_layer_ids"  # of speculators
SPECULATORS_KEYS = (
    "block_size", "mask_token_id", BOUNDARIES_KEY, NESTED_KEY, "sample_from_anchor", "sliding_window_non_causal",
    "projector_type", "markov_rank", "markov_head_type",
)  # fmt: skip
VOCABULARY_MAPS = ("d2t", "t2d")
MARKOV_PREFIX, CONFIDENCE_WEIGHT = "markov_head.", "confidence_head.proj.weight"  # of DSpark
DSPARK = "dspark"
DSPARK_ARCHITECTURE = "Qwen3DSparkModel"
COPIES = ("embed_tokens.weight", "lm_head.weight")  # of the target's matrices, in folders of DeepSpec and speculators
log = logging.getLogger(__name__)


def read(files: TensorFiles, config: dict[str, Any], target: TargetInfo, format_name: str = "DFlash") -> Checkpoint:
    """Read a DFlash head. Its settings may be in `dflash_config` or beside it.

    Args:
        files: tensors of the folder.
        config: content of config.json.
        target: target that the head must fit.
        format_name: name of the layout.
    """
    claims = TensorClaims(files, {name: name for name in files.stored_tensors})
    if config.get("projector_type", NAME) != NAME:
        raise files.refuse(f"its projector_type is {config['projector_type']!r}, and only {NAME!r} is supported")
    shape = _infer_shape(claims, config, target, {**config, **(config.get(NESTED_KEY) or {})})
    size = (target.vocab_size, target.hidden)
    copies: dict[str, tuple[int, ...]] = {name: size for name in COPIES if name in claims}
    expected = list_tensor_shapes(shape)
    claims.check(expected | copies)
    if copies:
        log.info("%s: uses the target's matrices instead of %s", files.folder, " and ".join(copies))
    return Checkpoint(NAME, format_name, files.folder, shape, claims.read(expected), config)


def read_speculators(files: TensorFiles, config: dict[str, Any], target: TargetInfo) -> Checkpoint:
    """Read a head in the `speculators` layout. Raises ForedraftError for a vocabulary of its own."""
    merged, size = merge_config(files, config, SPECULATORS_KEYS), config.get("draft_vocab_size")
    if size not in (None, target.vocab_size) or any(name in files.stored_tensors for name in VOCABULARY_MAPS):
        raise files.refuse(
            f"it drafts from a vocabulary of its own ({size} of {target.vocab_size} tokens); train it with "
            f"draft_vocab_size {target.vocab_size}, without d2t and t2d"
        )
    name = "speculators DFlash"
    if is_type(config, DSPARK):
        merged, name = {"sample_from_anchor": True} | merged, "speculators DSpark"
    return replace(read(files, merged, target, name), config=config)


def is_dflash(names: Collection[str], config: Mapping[str, Any]) -> bool:
    """Check for the settings or the class of a DFlash head in config.json, and for a norm that EAGLE heads lack."""
    is_named = any(kind in name.lower() for name in read_architectures(config) for kind in (NAME, DSPARK))
    return is_named or NESTED_KEY in config or "hidden_norm.weight" in names


def is_speculators(names: Collection[str], config: Mapping[str, Any]) -> bool:
    """Check whether config.json declares a DFlash head in the `speculators` layout."""
    return is_type(config, NAME) or is_type(config, DSPARK)


def _infer_shape(
    claims: TensorClaims, config: dict[str, Any], target: TargetInfo, settings: Mapping[str, Any]
) -> DFlashShape:
    hidden, width = claims.require_shape("fc.weight", 2)
    claims.check_target("hidden size", hidden, target.name, target.hidden)
    check_vocabulary(claims, config, target)
    num_states, remainder = divmod(width, hidden)
    if remainder or not num_states:
        raise claims.refuse(f"fc.weight has input width {width}, which is no multiple of the hidden size {hidden}")
    num_layers = count_layers(claims)
    block = infer_block_shape(claims, config, hidden)
    block = replace(block, sliding_windows=_read_windows(claims, config, settings, num_layers))
    rank, kind = _read_markov(claims, settings)
    confidence = claims.require_shape(CONFIDENCE_WEIGHT, 2)[1] if CONFIDENCE_WEIGHT in claims else 0
    is_dspark = "markov_rank" in settings or any(DSPARK in name.lower() for name in read_architectures(config))
    return DFlashShape(
        block,
        target.vocab_size,
        _read_hidden_layers(claims, settings, target.num_layers, num_states),
        num_layers,
        _read_integer(claims, settings, "block_size", 2),
        _read_mask_token(claims, settings, target),
        _read_causal_layers(config, settings, num_layers),
        bool(settings.get("sample_from_anchor", is_dspark)),
        rank,
        kind,
        confidence > 0,
        confidence > hidden,
    )


def _read_markov(claims: TensorClaims, settings: Mapping[str, Any]) -> tuple[int, str]:
    """Return rank and type of the Markov head; the rank is 0 without one."""
    rank, kind = settings.get("markov_rank") or 0, settings.get("markov_head_type") or DEFAULT_MARKOV
    stored = f"{MARKOV_PREFIX}markov_w1.weight"
    found = claims.require_shape(stored, 2)[1] if stored in claims else 0
    if rank not in (0, found):
        raise claims.refuse(f"config.json sets markov_rank {rank}, and the Markov head has rank {found}")
    if found and kind not in MARKOV_HEADS:
        raise claims.refuse(f"markov_head_type {kind!r} in config.json has to be one of {', '.join(MARKOV_HEADS)}")
    return found, kind


def _read_integer(claims: TensorClaims, settings: Mapping[str, Any], key: str, minimum: int) -> int:
    value = settings.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise claims.refuse(f"config.json has to set {key} to an integer of at least {minimum}, not {value!r}")
    return value


def _read_mask_token(claims: TensorClaims, settings: Mapping[str, Any], target: TargetInfo) -> int:
    token = _read_integer(claims, settings, "mask_token_id", 0)
    if token >= target.vocab_size:
        raise claims.refuse(
            f"mask_token_id {token} has no row in the embedding of {target.name}, which has {target.vocab_size} tokens"
        )
    return token


def _read_windows(
    claims: TensorClaims, config: dict[str, Any], settings: Mapping[str, Any], num_layers: int
) -> tuple[int | None, ...]:
    """Return the sliding window of every layer; () if all layers see the whole context."""
    if not settings.get("use_swa"):
        return read_windows(claims, config, num_layers)
    return (_read_integer(claims, settings, "swa_window_size", 1),) * num_layers


def _read_causal_layers(config: dict[str, Any], settings: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Return which layers are causal inside a block: as declared, otherwise those that `layer_types` calls sliding."""
    declared = False if settings.get("sliding_window_non_causal") else settings.get("causal")
    kinds = config.get("layer_types") or [""] * num_layers
    is_sliding = [kind == SLIDING_ATTENTION and not settings.get("use_swa") for kind in kinds]
    causal = tuple(is_sliding) if declared is None else (bool(declared),) * num_layers
    return causal if any(causal) else ()


def choose_default_layers(num_layers: int, num_states: int) -> tuple[int, ...]:
    """Return the boundaries that the authors' code reads by default, from a target of `num_layers` layers."""
    if num_states == 1:
        return (num_layers // 2 + 1,)
    return tuple(2 + round(i * (num_layers - 4) / (num_states - 1)) for i in range(num_states))


def _read_hidden_layers(
    claims: TensorClaims, settings: Mapping[str, Any], num_layers: int, num_states: int
) -> tuple[int, ...]:
    """Return the boundaries of the target that fc reads, in its order."""
    outputs, stored = settings.get(LAYER_OUTPUTS_KEY), settings.get(BOUNDARIES_KEY)
    for name, value in ((LAYER_OUTPUTS_KEY, outputs), (BOUNDARIES_KEY, stored)):
        if value is not None and not (isinstance(value, list) and all(type(i) is int for i in value)):
            raise claims.refuse(f"{name} in config.json has to be a list of layer numbers, not {value!r}")
    if outputs is not None:
        found = tuple(i + 1 for i in outputs)
        if stored is not None and tuple(stored) != found:
            raise claims.refuse(
                f"{LAYER_OUTPUTS_KEY} names boundaries {list(found)} and {BOUNDARIES_KEY} {stored}; remove one"
            )
    elif stored is not None:
        found = tuple(stored)
    else:
        found = choose_default_layers(num_layers, num_states)
    if len(found) != num_states or len({*found}) != num_states or not all(0 <= i <= num_layers for i in found):
        raise claims.refuse(
            f"fc.weight reads {num_states} states of a target of {num_layers} layers, and config.json gives the "
            f"boundaries {list(found)}; correct {LAYER_OUTPUTS_KEY} (boundary - 1)"
        )
    return found


def list_tensor_shapes(shape: DFlashShape) -> dict[str, tuple[int, ...]]:
    """List the expected tensors of a shape by internal name."""
    hidden = shape.block.hidden
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(shape.hidden_layers) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(shape.num_layers):
        shapes |= list_layer_shapes(shape.block, layer, hidden, ("input_layernorm", "post_attention_layernorm"))
    return shapes | _list_head_shapes(shape)


def _list_head_shapes(shape: DFlashShape) -> dict[str, tuple[int, ...]]:
    """List the tensors of the heads of DSpark."""
    shapes: dict[str, tuple[int, ...]] = {}
    with torch.device("meta"):
        markov, confidence = make_markov_head(shape), ConfidenceHead(shape) if shape.has_confidence else None
    for prefix, head in ((MARKOV_PREFIX, markov), ("confidence_head.", confidence)):
        if head is not None:
            shapes |= {prefix + name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    return shapes


def make_layout(shape: DFlashShape, tensors: Mapping[str, Tensor]) -> CheckpointLayout:
    """Use the authors' layout; that of DeepSpec for a head with the parts of DSpark."""
    nested: dict[str, Any] = {
        "mask_token_id": shape.mask_token_id,
        LAYER_OUTPUTS_KEY: [boundary - 1 for boundary in shape.hidden_layers],
    }
    windows, num_causal = shape.block.sliding_windows, sum(shape.causal_layers)
    if num_causal in (0, shape.num_layers):  # otherwise the sliding layers are the causal ones, as engines assume
        nested["causal"] = num_causal > 0
    if shape.has_anchor_output:
        nested["sample_from_anchor"] = True
    config = make_layer_config(shape.block, shape.num_layers) | {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "vocab_size": shape.vocab_size,
        "block_size": shape.block_size,
        NESTED_KEY: nested,
    }
    if shape.markov_rank or shape.has_confidence:
        nested["sample_from_anchor"] = shape.has_anchor_output
        config |= {
            "architectures": [DSPARK_ARCHITECTURE],
            "markov_rank": shape.markov_rank,
            "markov_head_type": shape.markov_type,
            "enable_confidence_head": shape.has_confidence,
            "confidence_head_with_markov": shape.confidence_reads_token,
        }
    if windows and None not in windows:
        nested |= {"use_swa": True, "swa_window_size": windows[0]}
    return CheckpointLayout(NAME, check_tensors(tensors, list_tensor_shapes(shape)), config)
