"""Folders of Gemma-4 assistants, as Google publishes them."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from foredraft.checkpoints.layouts import CheckpointLayout, check_tensors
from foredraft.checkpoints.recognise import read_architectures
from foredraft.checkpoints.schema import Checkpoint, TargetInfo
from foredraft.checkpoints.tensor_claims import INTEGER_DTYPES, ExpectedTensor, TensorClaims
from foredraft.checkpoints.tensors import TensorFiles
from foredraft.drafters.gemma4_assistant.shape import FULL_ATTENTION, SLIDING_ATTENTION, AssistantRope, AssistantShape

NAME = "gemma4_assistant"
MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
ARCHITECTURES = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
HEAD, EMBEDDING, ORDERING = "lm_head.weight", "embed_tokens.weight", "masked_embedding.token_ordering"
NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)  # fmt: skip
UNUSED = ("k_proj", "v_proj", "k_norm", "v_norm")  # of layers that read keys and values of others
ACTIVATION = "gelu_pytorch_tanh"
# Settings that would change the network: the only values that are supported.
FIXED_SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "hidden_size_per_layer_input": (0, None),
    "enable_moe_block": (False, None),
    "use_double_wide_mlp": (False, None),
    "attention_bias": (False, None),
    "hidden_activation": (ACTIVATION, None),
}
# Rotary parameters and cluster sizes of Gemma 4 for a config.json without them.
DEFAULT_ROPES: Mapping[str, Mapping[str, Any]] = {
    SLIDING_ATTENTION: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL_ATTENTION: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
DEFAULT_CENTROIDS, DEFAULT_SELECTED = 2048, 32
DEFAULT_WINDOW = 512


def is_assistant(names: Collection[str], config: Mapping[str, Any]) -> bool:
    """Check whether config.json declares a Gemma-4 assistant."""
    return config.get("model_type") in MODEL_TYPES or any(name in ARCHITECTURES for name in read_architectures(config))


def read(files: TensorFiles, config: dict[str, Any], target: TargetInfo) -> Checkpoint:
    """Read an assistant and check it against its target.

    Raises:
        ForedraftError: a tensor is missing, left over or misshaped, a setting is not supported, or the assistant is
            made for a target of other sizes.
    """
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise files.refuse("config.json has no text_config, which describes the layers of an assistant")
    for key, allowed in FIXED_SETTINGS.items():
        if text.get(key) not in allowed:
            raise files.refuse(f"config.json sets {key} to {text[key]!r}, and only {allowed[0]!r} is supported")
    claims = TensorClaims(files, _map_names(files, config))
    shape = _infer_shape(claims, config, text, target)
    expected = list_tensor_shapes(shape)
    claims.check(expected)
    tensors = claims.read()
    if ORDERING in tensors:
        tensors[ORDERING] = _check_ordering(claims, tensors[ORDERING].to(torch.int64))
    return Checkpoint(NAME, "Gemma-4 assistant", files.folder, shape, tensors, config)


def _map_names(files: TensorFiles, config: Mapping[str, Any]) -> dict[str, str]:
    """Map internal names to stored names.

    The embedding is used as output matrix alone. A folder with tied matrices may hold a copy, which is left out, and so
    are the projections that such layers do not have.
    """
    names = {stored.removeprefix("model."): stored for stored in files.stored_tensors}
    names = {
        name: stored for name, stored in names.items() if not any(f".self_attn.{part}." in name for part in UNUSED)
    }
    embedding = names.pop(EMBEDDING, None)
    if embedding is not None and (HEAD not in names or config.get("tie_word_embeddings", True)):
        names[HEAD] = embedding
    return names


def _infer_shape(
    claims: TensorClaims, config: Mapping[str, Any], text: Mapping[str, Any], target: TargetInfo
) -> AssistantShape:
    hidden, width = claims.require_shape("pre_projection.weight", 2)
    target_hidden, remainder = divmod(width, 2)
    if remainder:
        raise claims.refuse(f"pre_projection.weight has input width {width}, which is no pair of target states")
    claims.check_target("hidden size", target_hidden, target.name, target.hidden)
    vocab_size = claims.require_shape(HEAD, 2)[0]
    claims.check_target("vocabulary size", vocab_size, target.name, target.vocab_size)
    kinds = _read_kinds(claims, text)
    window = _read_number(claims, text, "sliding_window", DEFAULT_WINDOW) if SLIDING_ATTENTION in kinds else 0
    centroids, selected = _read_clusters(claims, config, vocab_size)
    return AssistantShape(
        hidden=hidden,
        target_hidden=target_hidden,
        vocab_size=vocab_size,
        intermediate=claims.require_shape("layers.0.mlp.gate_proj.weight", 2)[0],
        heads=_read_number(claims, text, "num_attention_heads", None),
        layer_kinds=kinds,
        head_dims=tuple(claims.require_shape(f"layers.{i}.self_attn.q_norm.weight", 1)[0] for i in range(len(kinds))),
        ropes={kind: _read_rope(claims, text, kind) for kind in dict.fromkeys(kinds)},
        sliding_window=window,
        eps=_read_epsilon(claims, text),
        num_centroids=centroids,
        num_selected=selected,
    )


def _read_kinds(claims: TensorClaims, text: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the kind of every layer."""
    count, kinds = _read_number(claims, text, "num_hidden_layers", None), text.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != count or not {*map(str, kinds)} <= DEFAULT_ROPES.keys():
        raise claims.refuse(
            f"layer_types in config.json has to be {count} of {FULL_ATTENTION} and {SLIDING_ATTENTION}, not {kinds!r}"
        )
    return tuple(kinds)


def _read_number(claims: TensorClaims, settings: Mapping[str, Any], key: str, default: int | None) -> int:
    value = default if settings.get(key) is None else settings[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise claims.refuse(f"config.json has to set {key} to a positive number, not {value!r}")
    return value


def _read_epsilon(claims: TensorClaims, text: Mapping[str, Any]) -> float:
    value = text.get("rms_norm_eps", 1e-6)
    if not isinstance(value, int | float) or not 0 < value < 1:
        raise claims.refuse(f"rms_norm_eps in config.json is {value!r} and has to be a small positive number")
    return float(value)


def _read_rope(claims: TensorClaims, text: Mapping[str, Any], kind: str) -> AssistantRope:
    """Return the rotary parameters of a kind of layers."""
    every = text.get("rope_parameters") or DEFAULT_ROPES
    rope = every.get(kind) if isinstance(every, dict | type(DEFAULT_ROPES)) else None
    if not isinstance(rope, Mapping) or not isinstance(rope.get("rope_theta"), int | float):
        raise claims.refuse(f"rope_parameters in config.json has no rope_theta for {kind}")
    if rope.get("rope_type") not in ("default", "proportional"):
        raise claims.refuse(f"rope_type {rope.get('rope_type')!r} is not supported, only default and proportional")
    if rope["rope_type"] == "default":
        return AssistantRope(float(rope["rope_theta"]))
    share, factor = rope.get("partial_rotary_factor", 1.0), rope.get("factor", 1.0)
    return AssistantRope(float(rope["rope_theta"]), float(share), float(factor))


def _read_clusters(claims: TensorClaims, config: Mapping[str, Any], vocab_size: int) -> tuple[int, int]:
    """Return the number of clusters of ordered embeddings, and how many have logits; zeros without them."""
    if not config.get("use_ordered_embeddings"):
        return 0, 0
    count = _read_number(claims, config, "num_centroids", DEFAULT_CENTROIDS)
    selected = _read_number(claims, config, "centroid_intermediate_top_k", DEFAULT_SELECTED)
    if vocab_size % count or selected > count:
        raise claims.refuse(
            f"config.json selects {selected} of {count} clusters of {vocab_size} tokens; num_centroids has to divide "
            "the vocabulary, and centroid_intermediate_top_k is at most num_centroids"
        )
    return count, selected


def _check_ordering(claims: TensorClaims, ordering: Tensor) -> Tensor:
    """Return the order of tokens if every token is in one cluster."""
    if not torch.equal(ordering.sort().values, torch.arange(len(ordering))):
        raise claims.refuse(f"{ORDERING} is no order of all {len(ordering)} tokens; the upload is damaged")
    return ordering


def list_tensor_shapes(shape: AssistantShape) -> dict[str, ExpectedTensor | tuple[int, ...]]:
    """List the expected tensors of a shape by internal name."""
    shapes: dict[str, ExpectedTensor | tuple[int, ...]] = {
        "pre_projection.weight": (shape.hidden, 2 * shape.target_hidden),
        "post_projection.weight": (shape.target_hidden, shape.hidden),
        "norm.weight": (shape.hidden,),
        HEAD: (shape.vocab_size, shape.hidden),
    }
    for layer, head_dim in enumerate(shape.head_dims):
        width = shape.heads * head_dim
        own: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (width, shape.hidden),
            "self_attn.q_norm.weight": (head_dim,),
            "self_attn.o_proj.weight": (shape.hidden, width),
            "mlp.gate_proj.weight": (shape.intermediate, shape.hidden),
            "mlp.up_proj.weight": (shape.intermediate, shape.hidden),
            "mlp.down_proj.weight": (shape.hidden, shape.intermediate),
            "layer_scalar": (1,),
            **{f"{norm}.weight": (shape.hidden,) for norm in NORMS},
        }
        shapes |= {f"layers.{layer}.{name}": size for name, size in own.items()}
    if shape.num_centroids:
        shapes["masked_embedding.centroids.weight"] = (shape.num_centroids, shape.hidden)
        shapes[ORDERING] = ExpectedTensor((shape.vocab_size,), INTEGER_DTYPES)
    return shapes


def make_layout(shape: AssistantShape, tensors: Mapping[str, Tensor]) -> CheckpointLayout:
    """Use the published layout."""
    checked = check_tensors(tensors, list_tensor_shapes(shape))
    own = ("layers.", "norm.")
    stored = {f"model.{name}" if name.startswith(own) else name: tensor for name, tensor in checked.items()}
    stored[f"model.{EMBEDDING}"] = stored.pop(HEAD)
    ropes = {
        kind: {
            "rope_type": "default" if (rope.rotated_share, rope.factor) == (1.0, 1.0) else "proportional",
            "rope_theta": rope.theta,
            "partial_rotary_factor": rope.rotated_share,
            "factor": rope.factor,
        }
        for kind, rope in shape.ropes.items()
    }
    text = {
        "model_type": "gemma4_text",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.heads,
        "vocab_size": shape.vocab_size,
        "layer_types": list(shape.layer_kinds),
        "sliding_window": shape.sliding_window or DEFAULT_WINDOW,
        "rope_parameters": ropes,
        "rms_norm_eps": shape.eps,
        "hidden_activation": ACTIVATION,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": shape.num_layers,
    }
    config = {
        "architectures": [ARCHITECTURES[0]],
        "model_type": MODEL_TYPES[0],
        "backbone_hidden_size": shape.target_hidden,
        "use_ordered_embeddings": bool(shape.num_centroids),
        "num_centroids": shape.num_centroids or DEFAULT_CENTROIDS,
        "centroid_intermediate_top_k": shape.num_selected or DEFAULT_SELECTED,
        "tie_word_embeddings": True,
        "text_config": text,
    }
    return CheckpointLayout(NAME, stored, config)
