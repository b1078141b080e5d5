"""Reader of Hydra heads as their authors publish them, and of two shorter forms of this project.

The authors' architectures "mlp" and "prefix-mlp" are supported. Names that differ in "prefix-mlp" are mapped. In the
shorter forms, a folder without `hydra_lm_head.*` whose config.json sets `foredraft_lm_head: "target"` uses the target's
lm_head, and heads with `hydra_reduce.*` read a projection of their input.
"""

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from foredraft.checkpoints.decoder_layers import read_rope
from foredraft.checkpoints.layouts import CheckpointLayout, check_tensors
from foredraft.checkpoints.schema import Checkpoint, TargetInfo
from foredraft.checkpoints.tensor_claims import TensorClaims
from foredraft.checkpoints.tensors import TensorFiles
from foredraft.models.draft_layer import make_default_rope

NAME = "hydra"
ARCHITECTURE_KEY, OUTPUT_HEAD_KEY = "hydra_head_arch", "foredraft_lm_head"
BLOCK_NAME = re.compile(r"^hydra_mlp\.(\d+)\.(\d+)\.")
TENSOR_NAME = r"(hydra_mlp|hydra_lm_head|hydra_reduce|prefix_embeding_layer)\."
PREFIX_LAYER = "prefix_embeding_layer."
# Copies of the target's embedding, and buffers that hold no weights.
IGNORED_TENSORS = re.compile(
    r"^(input_embed_fn\.weight|prefix_embeding_layer\.(embed_tokens\.weight|.*rotary_emb\.inv_freq))$"
)
# Names in "prefix-mlp", where dropout modules are counted as layers.
DROPOUT_NAMES = re.compile(r"^(hydra_mlp\.\d+)\.(\d+)\.(.*)$|^(hydra_lm_head\.\d+)\.1\.(.*)$")
UNSUPPORTED_ARCHITECTURES = {
    "cross-attn": "its heads attend to the target's states",
    "eagle-attn": "it is a decoder layer, not heads",
}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HydraPrefixShape:
    """Shape of Hydra's prefix layer, as far as its weights and config.json determine it.

    The other sizes are those of the target's layers. The rotary base is 10,000 for any target, as in the authors' code,
    unless config.json sets another.
    """

    query: int  # rows of q_proj
    key: int  # rows of k_proj and v_proj
    intermediate: int
    rope: dict[str, Any] = field(default_factory=make_default_rope)


@dataclass(frozen=True)
class HydraShape:
    """Shape of Hydra heads.

    Tensors of head h: `hydra_mlp.{h}.0.linear.weight` and `hydra_mlp.{h}.0.res_connection.weight` [H, (h + 2) H],
    `hydra_mlp.{h}.{l}.linear.weight` [H, H] of later layers, a `.bias` [H] beside each, and `hydra_lm_head.{h}.weight`
    [V, H] and `.bias` [V] if heads have their own output matrix. With a rank, the first layer is [H, rank] and reads
    `hydra_reduce.{h}.weight` [rank, (h + 2) H] times its input. A prefix layer adds `prefix_embeding_layer.norm.weight`
    [H] and `prefix_embeding_layer.layers.0.*`.
    """

    hidden: int
    vocab_size: int
    num_heads: int
    num_layers: int = 1
    has_own_head: bool = True  # False: heads use the target's lm_head
    rank: int | None = None  # width of the input projection; None = no projection
    offset: int = 0  # state that heads read: 0 = the last, after the norm; k = the residual stream k layers before it
    prefix: HydraPrefixShape | None = None  # decoder layer over the states ("prefix-mlp"); heads read its output


def is_declared(names: Collection[str], config: Mapping[str, Any]) -> bool:
    """Check whether config.json declares Hydra heads, and the folder is no whole model."""
    return (ARCHITECTURE_KEY in config or "hydra_num_heads" in config) and "model.embed_tokens.weight" not in names


def read(files: TensorFiles, config: dict[str, Any], target: TargetInfo) -> Checkpoint:
    """Read Hydra heads. Heads and layers are counted from the tensor names."""
    has_prefix = _has_prefix_layer(files, config)
    names = [name for name in files.stored_tensors if not IGNORED_TENSORS.match(name)]
    claims = TensorClaims(files, {_to_internal_name(name) if has_prefix else name: name for name in names})
    shape = _infer_shape(claims, config, target)
    if has_prefix:
        shape = replace(shape, prefix=_infer_prefix_shape(claims, config))
    claims.check(list_tensor_shapes(shape))
    declared = config.get("hydra_num_heads", shape.num_heads)
    if declared != shape.num_heads:
        log.info("%s: config.json sets %s heads, the weights hold %d", files.folder, declared, shape.num_heads)
    format_name = "Hydra" if shape.has_own_head and shape.rank is None else "lean Hydra"
    return Checkpoint(NAME, format_name, files.folder, shape, claims.read(), config)


def _has_prefix_layer(files: TensorFiles, config: dict[str, Any]) -> bool:
    """Check whether the architecture is prefix-mlp; any other than that and mlp is refused."""
    has_tensors = any(name.startswith(PREFIX_LAYER) for name in files.stored_tensors)
    architecture = config.get(ARCHITECTURE_KEY, "prefix-mlp" if has_tensors else "mlp")
    if architecture not in ("mlp", "prefix-mlp"):
        reason = UNSUPPORTED_ARCHITECTURES.get(str(architecture), "this name is unknown")
        raise files.refuse(
            f"its {ARCHITECTURE_KEY} is {architecture!r}, which is not supported ({reason}); mlp and prefix-mlp are"
        )
    if not config.get("grounded_heads", True):
        raise files.refuse("its heads are not grounded (grounded_heads false), which is not supported")
    return bool(architecture == "prefix-mlp")


def _to_internal_name(name: str) -> str:
    """Remove dropout modules from the numbering of a prefix-mlp name: every second module is a block."""
    match = DROPOUT_NAMES.match(name)
    if match is None:
        return name
    if match[1] is None:
        return f"{match[4]}.{match[5]}"
    index = int(match[2])
    return f"{match[1]}.{index // 2}.{match[3]}" if index % 2 else name + " (between layers)"


def to_stored_name(name: str) -> str:
    """Convert an internal name to the name that prefix-mlp stores."""
    head, _, rest = name.rpartition(".")
    if name.startswith("hydra_lm_head."):
        return f"{head}.1.{rest}"
    match = BLOCK_NAME.match(name)
    return name if match is None else f"hydra_mlp.{match[1]}.{2 * int(match[2]) + 1}.{name[match.end() :]}"


def _infer_prefix_shape(claims: TensorClaims, config: dict[str, Any]) -> HydraPrefixShape:
    names = ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj")
    query, key, intermediate = (claims.require_shape(f"{PREFIX_LAYER}layers.0.{name}.weight", 2)[0] for name in names)
    return HydraPrefixShape(query, key, intermediate, read_rope(claims, config))


def _infer_shape(claims: TensorClaims, config: dict[str, Any], target: TargetInfo) -> HydraShape:
    num_heads, num_layers = claims.count_heads(BLOCK_NAME)
    hidden = claims.require_shape("hydra_mlp.0.0.linear.weight", 2)[0]
    claims.check_target("hidden size", hidden, target.name, target.hidden)
    claims.check_target("vocabulary size", config.get("vocab_size", target.vocab_size), target.name, target.vocab_size)
    has_own_head = any(name.startswith("hydra_lm_head.") for name in claims.stored_names)
    if has_own_head:
        rows = claims.require_shape("hydra_lm_head.0.weight", 2)[0]
        claims.check_target("vocabulary size", rows, target.name, target.vocab_size)
    elif config.get(OUTPUT_HEAD_KEY) != "target":
        raise claims.refuse_missing("hydra_lm_head.0.weight")
    offset = config.get("hidden_state_offset", 0)
    if not isinstance(offset, int) or isinstance(offset, bool) or not 0 <= offset <= target.num_layers:
        raise claims.refuse(
            f"hidden_state_offset in config.json is {offset!r} and has to be a whole number from 0 to the "
            f"{target.num_layers} layers of {target.name}"
        )
    return HydraShape(
        hidden=hidden,
        vocab_size=target.vocab_size,
        num_heads=num_heads,
        num_layers=num_layers,
        has_own_head=has_own_head,
        rank=claims.require_shape("hydra_reduce.0.weight", 2)[0] if "hydra_reduce.0.weight" in claims else None,
        offset=offset,
    )


def list_tensor_shapes(shape: HydraShape) -> dict[str, tuple[int, ...]]:
    """List the expected tensors of a shape by internal name."""
    shapes: dict[str, tuple[int, ...]] = {} if shape.prefix is None else _list_prefix_shapes(shape.hidden, shape.prefix)
    for head in range(shape.num_heads):
        input_width = (head + 2) * shape.hidden
        for layer in range(shape.num_layers):
            width = shape.hidden if layer else shape.rank or input_width
            shapes[f"hydra_mlp.{head}.{layer}.linear.weight"] = (shape.hidden, width)
            shapes[f"hydra_mlp.{head}.{layer}.linear.bias"] = (shape.hidden,)
            if layer == 0:
                shapes[f"hydra_mlp.{head}.0.res_connection.weight"] = (shape.hidden, width)
                shapes[f"hydra_mlp.{head}.0.res_connection.bias"] = (shape.hidden,)
        if shape.rank is not None:
            shapes[f"hydra_reduce.{head}.weight"] = (shape.rank, input_width)
        if shape.has_own_head:
            shapes[f"hydra_lm_head.{head}.weight"] = (shape.vocab_size, shape.hidden)
            shapes[f"hydra_lm_head.{head}.bias"] = (shape.vocab_size,)
    return shapes


def _list_prefix_shapes(hidden: int, prefix: HydraPrefixShape) -> dict[str, tuple[int, ...]]:
    sizes: dict[str, tuple[int, ...]] = {f"layers.0.self_attn.{name}_proj": (prefix.key, hidden) for name in "kv"}
    sizes |= {f"layers.0.mlp.{name}_proj": (prefix.intermediate, hidden) for name in ("gate", "up")}
    sizes["layers.0.self_attn.q_proj"] = (prefix.query, hidden)
    sizes["layers.0.self_attn.o_proj"] = (hidden, prefix.query)
    sizes["layers.0.mlp.down_proj"] = (hidden, prefix.intermediate)
    sizes |= {f"layers.0.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
    sizes["norm"] = (hidden,)
    return {f"{PREFIX_LAYER}{name}.weight": size for name, size in sizes.items()}


def make_layout(shape: HydraShape, tensors: Mapping[str, Tensor]) -> CheckpointLayout:
    """Use the authors' names. Missing tensors are declared under keys that the authors' code ignores."""
    config = {
        "model_type": "hydra",
        "hydra_num_heads": shape.num_heads,
        "hydra_num_layers": shape.num_layers,
        "hydra_head_arch": "mlp" if shape.prefix is None else "prefix-mlp",
        "grounded_heads": True,
        "hidden_state_offset": shape.offset,
        "hidden_size": shape.hidden,
        "vocab_size": shape.vocab_size,
    }
    if not shape.has_own_head:
        config[OUTPUT_HEAD_KEY] = "target"
    if shape.prefix is not None:
        config["rope_parameters"] = dict(shape.prefix.rope)
    weights = check_tensors(tensors, list_tensor_shapes(shape))
    if shape.prefix is not None:
        weights = {to_stored_name(name): value for name, value in weights.items()}
    return CheckpointLayout(NAME, weights, config, "hydra_lm_head.pt")
