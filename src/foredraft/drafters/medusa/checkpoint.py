"""Reader of Medusa heads as FasterDecoding, TGI and vLLM name them.

The heads may be alone in the folder or part of a whole model (Medusa-2).
"""

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foredraft.checkpoints.layouts import CheckpointLayout, check_tensors
from foredraft.checkpoints.schema import Checkpoint, TargetInfo
from foredraft.checkpoints.tensor_claims import TensorClaims
from foredraft.checkpoints.tensors import TensorFiles

NAME = "medusa"
ACCURACIES_KEY = "foredraft_head_accuracies"  # this project's key: measured accuracy by head and rank
BIAS_SUFFIX = ".linear.bias"
HEADS_PREFIX = re.compile(r"^medusa_heads?\.")
RESIDUAL_NAME = re.compile(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$")
OUTPUT_NAME = re.compile(r"^(\d+)\.(\d+)\.weight$")
VLLM_NAME = re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$")
VLLM_OUTPUT_NAME = re.compile(r"^lm_heads\.(\d+)\.weight$")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MedusaShape:
    """Shape of Medusa heads.

    Tensors: `{h}.{l}.linear.weight` [H, H], `{h}.{l}.linear.bias` [H], and `{h}.{num_layers}.weight` [V, H] of every
    head if heads have their own output matrix.
    """

    hidden: int
    vocab_size: int
    num_heads: int
    num_layers: int = 1
    has_own_head: bool = True  # False: heads use the target's lm_head ("version 2")
    accuracies: tuple[tuple[float, ...], ...] | None = None  # by head and rank, measured in training


def has_own_tensors(names: Collection[str], config: Mapping[str, Any]) -> bool:
    """Check whether a folder has tensors of Medusa heads."""
    return any(map(_is_tensor_name, names))


def _is_tensor_name(name: str) -> bool:
    """Check whether a stored name belongs to Medusa heads."""
    bare = HEADS_PREFIX.sub("", name)
    return any(pattern.match(bare) for pattern in (RESIDUAL_NAME, VLLM_NAME))


def read(files: TensorFiles, config: dict[str, Any], target: TargetInfo) -> Checkpoint:
    """Read Medusa heads. Heads and layers are counted from the tensor names: counts in published configs are wrong."""
    is_whole_model = "model.embed_tokens.weight" in files.stored_tensors
    names = [name for name in files.stored_tensors if not is_whole_model or HEADS_PREFIX.match(name)]
    if "token_map" in {HEADS_PREFIX.sub("", name) for name in names}:
        raise files.refuse("its heads draft from a truncated vocabulary (token_map), which is not supported")
    claims = TensorClaims(files, _map_names(files, config, names))
    shape = _infer_shape(claims, config, target)
    # vLLM writes heads without biases. If any bias is present, all are required.
    has_bias = any(name.endswith(BIAS_SUFFIX) for name in claims.stored_names)
    claims.check(
        {name: size for name, size in list_tensor_shapes(shape).items() if has_bias or not name.endswith(BIAS_SUFFIX)}
    )
    if is_whole_model:
        log.warning(
            "%s is a whole model with Medusa heads: they belong to that model, and the target is %s",
            files.folder, target.name,
        )  # fmt: skip
    declared = config.get("medusa_num_heads", shape.num_heads)
    if declared != shape.num_heads:
        log.info("%s: config.json sets %s heads, the weights hold %d", files.folder, declared, shape.num_heads)
    tensors = _add_biases(claims.read(), shape)
    format_name = (
        "Medusa-2 model"
        if is_whole_model
        else "vLLM Medusa"
        if any(map(VLLM_NAME.match, names))
        else "FasterDecoding Medusa"
    )
    return Checkpoint(NAME, format_name, files.folder, shape, tensors, config)


def _map_names(files: TensorFiles, config: dict[str, Any], names: list[str]) -> dict[str, str]:
    """Map internal names to stored names. An output matrix that all heads share is mapped once for each head."""
    mapped: dict[str, str] = {}
    outputs: dict[int, str] = {}
    shared_output: str | None = None
    for stored in names:
        name = HEADS_PREFIX.sub("", stored)
        if match := VLLM_NAME.match(name):
            name = f"{match[1]}.{match[2]}.linear.{match[3]}"
        elif match := VLLM_OUTPUT_NAME.match(name):
            outputs[int(match[1])] = stored
            continue
        elif name == "lm_head.weight":
            shared_output = stored
            continue
        if name in mapped:
            raise files.refuse(f"{mapped[name]} and {stored} are the same tensor in two naming schemes; keep one")
        mapped[name] = stored
    heads = {int(match[1]) for name in mapped if (match := RESIDUAL_NAME.match(name))}
    layers = {int(match[2]) for name in mapped if (match := RESIDUAL_NAME.match(name))}
    if config.get("original_lm_head") and len(outputs) == 1 and shared_output is None:
        shared_output = outputs.pop(min(outputs))
    last = max(layers, default=-1) + 1
    for head in heads if shared_output is not None else ():
        outputs.setdefault(head, str(shared_output))
    return mapped | {f"{head}.{last}.weight": stored for head, stored in outputs.items()}


def _infer_shape(claims: TensorClaims, config: dict[str, Any], target: TargetInfo) -> MedusaShape:
    num_heads, num_layers = claims.count_heads(RESIDUAL_NAME)
    hidden = claims.require_shape("0.0.linear.weight", 2)[1]
    claims.check_target("hidden size", hidden, target.name, target.hidden)
    outputs = [name for name in claims.stored_names if OUTPUT_NAME.match(name)]
    if outputs:
        rows = claims.require_shape(min(outputs), 2)[0]
        claims.check_target("vocabulary size", rows, target.name, target.vocab_size)
    return MedusaShape(
        hidden=hidden,
        vocab_size=target.vocab_size,
        num_heads=num_heads,
        num_layers=num_layers,
        has_own_head=bool(outputs),
        accuracies=_read_accuracies(claims, config, num_heads),
    )


def _read_accuracies(
    claims: TensorClaims, config: dict[str, Any], num_heads: int
) -> tuple[tuple[float, ...], ...] | None:
    value = config.get(ACCURACIES_KEY)
    if value is None:
        return None
    is_table = isinstance(value, list) and len(value) == num_heads and all(isinstance(row, list) for row in value)
    if not is_table or not all(isinstance(x, int | float) and 0 <= x <= 1 for row in value for x in row):
        raise claims.refuse(f"{ACCURACIES_KEY} in config.json has to be {num_heads} lists of numbers from 0 to 1")
    return tuple(tuple(float(x) for x in row) for row in value)


def list_tensor_shapes(shape: MedusaShape) -> dict[str, tuple[int, ...]]:
    """List the expected tensors of a shape by internal name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(shape.num_heads):
        for layer in range(shape.num_layers):
            shapes[f"{head}.{layer}.linear.weight"] = (shape.hidden, shape.hidden)
            shapes[f"{head}.{layer}.linear.bias"] = (shape.hidden,)
        if shape.has_own_head:
            shapes[f"{head}.{shape.num_layers}.weight"] = (shape.vocab_size, shape.hidden)
    return shapes


def _add_biases(tensors: dict[str, Tensor], shape: MedusaShape) -> dict[str, Tensor]:
    dtype = tensors["0.0.linear.weight"].dtype
    return {
        name: tensors[name] if name in tensors else torch.zeros(size, dtype=dtype)
        for name, size in list_tensor_shapes(shape).items()
    }


def make_layout(shape: MedusaShape, tensors: Mapping[str, Tensor]) -> CheckpointLayout:
    """Use FasterDecoding's names, which vLLM and TGI read too. vLLM drops biases that config.json does not declare."""
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "medusa_num_heads": shape.num_heads,
        "medusa_num_layers": shape.num_layers,
        "hidden_size": shape.hidden,
        "vocab_size": shape.vocab_size,
        "medusa_fc_bias": True,
    }
    if not shape.has_own_head:
        config["version"] = "2"
    if shape.accuracies is not None:
        config[ACCURACIES_KEY] = [list(row) for row in shape.accuracies]
    return CheckpointLayout(
        NAME, check_tensors(tensors, list_tensor_shapes(shape)), config, "medusa_lm_head.safetensors"
    )
