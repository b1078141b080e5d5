"""Medusa heads as FasterDecoding, TGI and vLLM name them, alone or inside a whole model (Medusa-2)."""

import logging
import re
from typing import Any

import torch
from torch import Tensor

from foredraft.checkpoints.schema import Checkpoint, MedusaShape, TargetInfo
from foredraft.checkpoints.tensor_claims import TensorClaims
from foredraft.checkpoints.tensors import TensorFiles

METHOD, TITLE = "medusa", "Medusa heads"
ACCURACIES_KEY = "foredraft_head_accuracies"
BIAS_SUFFIX = ".linear.bias"
HEADS_PREFIX = re.compile(r"^medusa_heads?\.")
RESIDUAL_NAME = re.compile(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$")
OUTPUT_NAME = re.compile(r"^(\d+)\.(\d+)\.weight$")
VLLM_NAME = re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$")
VLLM_OUTPUT_NAME = re.compile(r"^lm_heads\.(\d+)\.weight$")
log = logging.getLogger(__name__)


def is_tensor_name(name: str) -> bool:
    """Whether a stored name says Medusa."""
    bare = HEADS_PREFIX.sub("", name)
    return any(pattern.match(bare) for pattern in (RESIDUAL_NAME, VLLM_NAME))


def read(files: TensorFiles, config: dict[str, Any], target: TargetInfo) -> Checkpoint:
    """Heads and layers are counted from the keys: the counts in published configs are wrong."""
    inside = "model.embed_tokens.weight" in files.stored_tensors
    names = [name for name in files.stored_tensors if not inside or HEADS_PREFIX.match(name)]
    if "token_map" in {HEADS_PREFIX.sub("", name) for name in names}:
        raise files.refuse("its heads draft from a truncated vocabulary (token_map), which is not supported")
    claims = TensorClaims(files, _map_names(files, config, names))
    shape = _infer_shape(claims, config, target)
    has_bias = any(
        name.endswith(BIAS_SUFFIX) for name in claims.stored_names
    )  # vLLM writes heads without; some lacking is a fault
    claims.check(
        {name: size for name, size in list_tensor_shapes(shape).items() if has_bias or not name.endswith(BIAS_SUFFIX)}
    )
    if inside:
        log.warning(
            "%s is a whole model with Medusa heads: they belong to that model, and the target is %s",
            files.folder, target.name,
        )  # fmt: skip
    said = config.get("medusa_num_heads", shape.num_heads)
    if said != shape.num_heads:
        log.info("%s: config.json says %s heads, the weights hold %d", files.folder, said, shape.num_heads)
    tensors = _add_biases(claims.read(), shape)
    kind = (
        "Medusa-2 model" if inside else "vLLM Medusa" if any(map(VLLM_NAME.match, names)) else "FasterDecoding Medusa"
    )
    return Checkpoint(METHOD, kind, files.folder, shape, tensors, config)


def _map_names(files: TensorFiles, config: dict[str, Any], names: list[str]) -> dict[str, str]:
    """Ours -> as stored. A matrix that all heads share is claimed by each of them."""
    found: dict[str, str] = {}
    outputs: dict[int, str] = {}
    shared: str | None = None
    for stored in names:
        name = HEADS_PREFIX.sub("", stored)
        if match := VLLM_NAME.match(name):
            name = f"{match[1]}.{match[2]}.linear.{match[3]}"
        elif match := VLLM_OUTPUT_NAME.match(name):
            outputs[int(match[1])] = stored
            continue
        elif name == "lm_head.weight":
            shared = stored
            continue
        if name in found:
            raise files.refuse(f"{found[name]} and {stored} are the same tensor in two naming schemes; keep one")
        found[name] = stored
    heads = {int(match[1]) for name in found if (match := RESIDUAL_NAME.match(name))}
    layers = {int(match[2]) for name in found if (match := RESIDUAL_NAME.match(name))}
    if config.get("original_lm_head") and len(outputs) == 1 and shared is None:
        shared = outputs.pop(min(outputs))
    last = max(layers, default=-1) + 1
    for head in heads if shared is not None else ():
        outputs.setdefault(head, str(shared))
    return found | {f"{head}.{last}.weight": stored for head, stored in outputs.items()}


def _infer_shape(claims: TensorClaims, config: dict[str, Any], target: TargetInfo) -> MedusaShape:
    residual = [match for name in claims.stored_names if (match := RESIDUAL_NAME.match(name))]
    num_heads = 1 + max(int(match[1]) for match in residual)
    num_layers = 1 + max(int(match[2]) for match in residual)
    if num_heads * num_layers > len(claims.stored_names):
        raise claims.refuse_missing(f"a part of {num_heads} heads of {num_layers} layers")
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
    given = config.get(ACCURACIES_KEY)
    if given is None:
        return None
    is_table = isinstance(given, list) and len(given) == num_heads and all(isinstance(row, list) for row in given)
    if not is_table or not all(isinstance(x, int | float) and 0 <= x <= 1 for row in given for x in row):
        raise claims.refuse(f"{ACCURACIES_KEY} in config.json has to be {num_heads} lists of numbers from 0 to 1")
    return tuple(tuple(float(x) for x in row) for row in given)


def list_tensor_shapes(shape: MedusaShape) -> dict[str, tuple[int, ...]]:
    """The tensors of a shape."""
    found: dict[str, tuple[int, ...]] = {}
    for head in range(shape.num_heads):
        for layer in range(shape.num_layers):
            found[f"{head}.{layer}.linear.weight"] = (shape.hidden, shape.hidden)
            found[f"{head}.{layer}.linear.bias"] = (shape.hidden,)
        if shape.has_own_head:
            found[f"{head}.{shape.num_layers}.weight"] = (shape.vocab_size, shape.hidden)
    return found


def _add_biases(tensors: dict[str, Tensor], shape: MedusaShape) -> dict[str, Tensor]:
    dtype = tensors["0.0.linear.weight"].dtype
    return {
        name: tensors[name] if name in tensors else torch.zeros(size, dtype=dtype)
        for name, size in list_tensor_shapes(shape).items()
    }
