"""Decoder layers of EAGLE drafters: their shape from tensors and config.json, and the tensors that a shape requires.

The reverse direction is here too: `make_layer_config` returns the fields of config.json for a shape.
"""

import re
from typing import Any

from foredraft.checkpoints.schema import TargetInfo
from foredraft.checkpoints.tensor_claims import TensorClaims
from foredraft.models.draft_layer import DraftLayerShape

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj")
LAYER_NAME = re.compile(r"^layers\.(\d+)\.")
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
DEFAULT_ROPE_THETA = 10000.0  # default of LlamaConfig
DEFAULT_MAX_POSITIONS = 2048  # default of LlamaConfig


def infer_block_shape(claims: TensorClaims, config: dict[str, Any], hidden: int) -> DraftLayerShape:
    """Infer the shape of the decoder layers from layer 0.

    Widths, biases and norms follow from the tensors. Only what the tensors do not determine is taken from config.json.

    Args:
        claims: Tensors of the folder.
        config: Content of config.json.
        hidden: Width of the drafter's hidden states.

    Raises:
        ForedraftError: if config.json is incomplete, contradicts the tensors, or needs an unsupported feature.
    """
    heads = _read_count(claims, config, "num_attention_heads")
    kv_heads = _read_count(claims, config, "num_key_value_heads", heads)
    attn = "layers.0.self_attn"
    query = claims.require_shape(f"{attn}.q_proj.weight", 2)[0]
    key = claims.require_shape(f"{attn}.k_proj.weight", 2)[0]
    head_dim = _read_count(claims, config, "head_dim", max(1, query // heads))
    if query != heads * head_dim or key != kv_heads * head_dim or head_dim % 2:
        raise claims.refuse(
            f"q_proj has {query} rows and k_proj {key}, and config.json makes them {heads} and {kv_heads} heads of "
            f"{head_dim}; the weights and config.json belong to different drafters"
        )
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise claims.refuse(f"hidden_act {config['hidden_act']!r} is not supported, only silu")
    if config.get("hidden_size", hidden) != hidden:
        raise claims.refuse(
            f"config.json sets hidden_size {config['hidden_size']} and the weights have width {hidden}; "
            "they belong to different drafters"
        )
    return DraftLayerShape(
        hidden=hidden,
        intermediate=claims.require_shape("layers.0.mlp.gate_proj.weight", 2)[0],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=_read_epsilon(claims, config),
        max_positions=_read_count(claims, config, "max_position_embeddings", DEFAULT_MAX_POSITIONS),
        rope=read_rope(claims, config),
        has_qkv_bias=f"{attn}.q_proj.bias" in claims,
        has_out_bias=f"{attn}.o_proj.bias" in claims,
        has_qk_norm=f"{attn}.q_norm.weight" in claims,
    )


def _read_count(claims: TensorClaims, config: dict[str, Any], key: str, default: int | None = None) -> int:
    """Return a positive number from config.json, or the default if config.json does not set it."""
    count = default if config.get(key) is None else config[key]
    if not isinstance(count, int) or count < 1:
        raise claims.refuse(f"config.json must set {key}, and has {count!r}; the weights alone do not determine it")
    return count


def _read_epsilon(claims: TensorClaims, config: dict[str, Any]) -> float:
    epsilon = config.get("rms_norm_eps", 1e-6)
    if not isinstance(epsilon, int | float) or not 0 < epsilon < 1:
        raise claims.refuse(f"rms_norm_eps in config.json is {epsilon!r} and has to be a small positive number")
    return float(epsilon)


def read_rope(claims: TensorClaims, config: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters: `rope_parameters`, or `rope_theta` and `rope_scaling` of older configs."""
    source = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(source, dict) or any(isinstance(value, dict) for value in source.values()):
        raise claims.refuse("its rope_parameters differ by layer, which is not supported")
    rope = dict(source)
    kind = rope.pop("type", None)
    rope.setdefault("rope_type", kind or "default")
    if rope["rope_type"] == "mrope":  # equal to default if the input is text only
        rope["rope_type"] = "default"
    rope.setdefault("rope_theta", config.get("rope_theta") or DEFAULT_ROPE_THETA)
    if rope["rope_type"] not in ROPE_TYPES:
        raise claims.refuse(f"rope_type {rope['rope_type']!r} is not supported, only {', '.join(ROPE_TYPES)}")
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise claims.refuse("it rotates only a part of every head (partial_rotary_factor), which is not supported")
    return rope


def read_windows(claims: TensorClaims, config: dict[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of every layer; () if all layers have full attention.

    An entry is a number of positions, or None for full attention. `sliding_window` applies to the layers that
    `layer_types` calls sliding, and to no other.
    """
    kinds = config.get("layer_types") or [FULL_ATTENTION] * num_layers
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or not {*map(str, kinds)} <= {FULL_ATTENTION, SLIDING_ATTENTION}
    ):
        raise claims.refuse(
            f"layer_types in config.json has to be {num_layers} of {FULL_ATTENTION} and {SLIDING_ATTENTION}, not "
            f"{kinds!r}"
        )
    if SLIDING_ATTENTION not in kinds:
        return ()
    size = config.get("sliding_window")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise claims.refuse(f"sliding_window in config.json has to be a positive number of positions, not {size!r}")
    return tuple(size if kind == SLIDING_ATTENTION else None for kind in kinds)


def count_layers(claims: TensorClaims) -> int:
    """Count the layers in the tensor names. TensorClaims.check reports a gap as a missing tensor."""
    indices = {int(match[1]) for name in claims.stored_names if (match := LAYER_NAME.match(name))}
    count = max(indices, default=-1) + 1
    if count > len(claims.stored_names):
        raise claims.refuse_missing("layers.0")
    return count


def list_layer_shapes(
    shape: DraftLayerShape, layer: int, width: int, norms: tuple[str, ...]
) -> dict[str, tuple[int, ...]]:
    """List the expected tensors of one layer by internal name.

    Args:
        shape: Shape of all layers.
        layer: Index of the layer.
        width: Input width of the attention projections.
        norms: Names of the layer's norms.
    """
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    rows = {"q_proj": query, "k_proj": key, "v_proj": key, "o_proj": shape.hidden}
    columns = {"o_proj": query}
    has_bias = {name: shape.has_out_bias if name == "o_proj" else shape.has_qkv_bias for name in MATRICES}
    shapes: dict[str, tuple[int, ...]] = {}
    for name in MATRICES:
        shapes[f"self_attn.{name}.weight"] = (rows[name], columns.get(name, width))
        if has_bias[name]:
            shapes[f"self_attn.{name}.bias"] = (rows[name],)
    if shape.has_qk_norm:
        shapes |= {f"self_attn.{name}.weight": (shape.head_dim,) for name in ("q_norm", "k_norm")}
    shapes |= {f"mlp.{name}.weight": (shape.intermediate, shape.hidden) for name in ("gate_proj", "up_proj")}
    shapes["mlp.down_proj.weight"] = (shape.hidden, shape.intermediate)
    shapes |= {f"{name}.weight": (shape.hidden,) for name in norms}
    return {f"layers.{layer}.{name}": value for name, value in shapes.items()}


def make_layer_config(shape: DraftLayerShape, num_layers: int) -> dict[str, Any]:
    """Return the fields of a LlamaConfig for a shape, with rope in the current and the older spelling."""
    scaling = {name: value for name, value in shape.rope.items() if name != "rope_theta"}
    layer_types = [FULL_ATTENTION if size is None else SLIDING_ATTENTION for size in shape.sliding_windows]
    windows = (
        {"layer_types": layer_types, "sliding_window": max(size or 0 for size in shape.sliding_windows)}
        if layer_types
        else {}
    )
    return windows | {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": num_layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "max_position_embeddings": shape.max_positions,
        "rope_parameters": dict(shape.rope),
        "rope_theta": shape.rope.get("rope_theta", DEFAULT_ROPE_THETA),
        "rope_scaling": scaling if scaling.get("rope_type", "default") != "default" else None,
        "attention_bias": shape.has_qkv_bias,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def check_vocabulary(claims: TensorClaims, config: dict[str, Any], target: TargetInfo) -> None:
    """Check that a head has the vocabulary of the target, by its own embedding or else by config.json."""
    if "embed_tokens.weight" in claims:
        rows = claims.require_shape("embed_tokens.weight", 2)[0]
    else:
        rows = config.get("vocab_size", target.vocab_size)
    claims.check_target("vocabulary size", rows, target.name, target.vocab_size)
