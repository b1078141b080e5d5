"""Reader of MLP speculators as IBM publishes them."""

import logging
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from foredraft.checkpoints.layouts import CheckpointLayout, check_tensors
from foredraft.checkpoints.schema import Checkpoint, TargetInfo
from foredraft.checkpoints.tensor_claims import TensorClaims
from foredraft.checkpoints.tensors import TensorFiles
from foredraft.drafters.mlp_speculator.shape import MlpSpeculatorShape

NAME = "mlp_speculator"
TENSOR_NAME = re.compile(r"^(?:speculator\.)?((emb|proj|ln|head)\.(\d+)\.(?:weight|bias))$")
log = logging.getLogger(__name__)


def read(files: TensorFiles, config: dict[str, Any], target: TargetInfo) -> Checkpoint:
    """Read an MLP speculator. Tensors of tied steps are read once, whether the file repeats them or not."""
    claims = claim_tensors(files, TENSOR_NAME)
    shape = _infer_shape(claims, config, target)
    originals = {name: _find_original(name) for name in _list_repeats(claims, shape)}
    tensors = read_once(claims, list_tensor_shapes(shape), originals)
    return Checkpoint(NAME, "MLPSpeculator", files.folder, shape, tensors, config)


def claim_tensors(files: TensorFiles, pattern: re.Pattern[str]) -> TensorClaims:
    """Claim all tensors of a folder. The first group of `pattern` is the internal name; other names stay as stored."""
    stored: dict[str, str] = {}
    for name in files.stored_tensors:
        match = pattern.match(name)
        internal = match[1] if match else name
        if internal in stored:
            raise files.refuse(f"{stored[internal]} and {name} are the same tensor in two naming schemes; keep one")
        stored[internal] = name
    return TensorClaims(files, stored)


def read_once(
    claims: TensorClaims, shapes: Mapping[str, tuple[int, ...]], originals: Mapping[str, str]
) -> dict[str, Tensor]:
    """Read the tensors of `shapes`, and check that stored repeats equal them.

    Args:
        claims: tensors of the folder.
        shapes: expected tensors by internal name, without repeats.
        originals: name of the repeated tensor, by the internal name of each stored repeat.
    """
    claims.check({**shapes, **{name: shapes[original] for name, original in originals.items()}})
    tensors = claims.read()
    for name, original in originals.items():
        if not torch.equal(tensors[name], tensors[original]):
            raise claims.refuse(
                f"{claims.stored_names[name]} differs from {claims.stored_names[original]}, and config.json sets "
                "tie_weights; one is wrong"
            )
        del tensors[name]
    return tensors


def _infer_shape(claims: TensorClaims, config: dict[str, Any], target: TargetInfo) -> MlpSpeculatorShape:
    inner, hidden = claims.require_shape("proj.0.weight", 2)
    vocab_size = claims.require_shape("emb.0.weight", 2)[0]
    claims.check_target("hidden size", hidden, target.name, target.hidden)
    claims.check_target("vocabulary size", vocab_size, target.name, target.vocab_size)
    steps = [int(match[3]) for name in claims.stored_names if (match := TENSOR_NAME.match(name)) and match[2] == "head"]
    num_stored = 1 + max(steps, default=0)
    if num_stored > len(claims.stored_names):
        raise claims.refuse_missing("head.1.weight")
    declared = config.get("n_predict")
    is_tied = bool(config.get("tie_weights")) or (num_stored == 1 and declared not in (None, 1))
    n_predict = num_stored
    if is_tied and num_stored == 1:
        if not isinstance(declared, int) or declared < 1:
            raise claims.refuse("config.json must set n_predict, which tied weights do not determine")
        n_predict = declared
    elif declared not in (None, num_stored):
        log.info(
            "%s: config.json sets n_predict %s, the weights hold %d steps", claims.files.folder, declared, num_stored
        )
    return MlpSpeculatorShape(
        hidden=hidden,
        inner=inner,
        vocab_size=vocab_size,
        n_predict=n_predict,
        is_tied=is_tied,
        scales_input=bool(config.get("scale_input", False)),
        branching=read_branching(claims, config, n_predict),
        candidates=read_candidates(claims, config),
    )


def read_branching(claims: TensorClaims, config: dict[str, Any], n_predict: int) -> tuple[int, ...] | None:
    """Read the published tree: children per node by depth."""
    branching = config.get("top_k_tokens_per_head")
    if branching is None:
        return None
    is_list = isinstance(branching, list) and all(isinstance(k, int) and k > 0 for k in branching)
    if not is_list or len(branching) != n_predict:
        raise claims.refuse(
            f"top_k_tokens_per_head in config.json has to be {n_predict} positive numbers, not {branching}"
        )
    return tuple(branching)


def read_candidates(claims: TensorClaims, config: dict[str, Any]) -> int | None:
    """Read the number of whole paths of the published tree that are verified."""
    candidates = config.get("n_candidates")
    if candidates is not None and (not isinstance(candidates, int) or isinstance(candidates, bool) or candidates < 1):
        raise claims.refuse(f"n_candidates in config.json has to be a positive number of paths, not {candidates!r}")
    return candidates


def list_tensor_shapes(shape: MlpSpeculatorShape) -> dict[str, tuple[int, ...]]:
    """List the expected tensors of a shape by internal name; of tied tensors only the first."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(shape.n_predict):
        if i == 0 or not shape.is_tied:
            shapes |= {f"emb.{i}.weight": (shape.vocab_size, shape.inner)}
            shapes |= {f"ln.{i}.weight": (shape.inner,), f"ln.{i}.bias": (shape.inner,)}
            shapes |= {f"head.{i}.weight": (shape.vocab_size, shape.inner)}
        if i <= 1 or not shape.is_tied:
            shapes[f"proj.{i}.weight"] = (shape.inner, shape.inner if i else shape.hidden)
    return shapes


def _find_original(name: str) -> str:
    """Return the name of the tensor that a tied tensor repeats."""
    kind, _, rest = name.partition(".")
    return f"{kind}.{1 if kind == 'proj' else 0}.{rest.partition('.')[2]}"


def _list_repeats(claims: TensorClaims, shape: MlpSpeculatorShape) -> list[str]:
    if not shape.is_tied:
        return []
    unique, untied = list_tensor_shapes(shape), list_tensor_shapes(_untie(shape))
    return [name for name in untied if name in claims and name not in unique]


def _untie(shape: MlpSpeculatorShape) -> MlpSpeculatorShape:
    return MlpSpeculatorShape(shape.hidden, shape.inner, shape.vocab_size, shape.n_predict)


def make_layout(shape: MlpSpeculatorShape, tensors: Mapping[str, Tensor]) -> CheckpointLayout:
    """Use IBM's names."""
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": shape.vocab_size,
        "emb_dim": shape.hidden,
        "inner_dim": shape.inner,
        "n_predict": shape.n_predict,
        "tie_weights": shape.is_tied,
        "scale_input": shape.scales_input,
    }
    tree = describe_tree(shape)
    return CheckpointLayout(NAME, check_tensors(tensors, list_tensor_shapes(shape), "speculator."), config | tree)


def describe_tree(shape: MlpSpeculatorShape) -> dict[str, Any]:
    """Return the entries of config.json for the published tree."""
    tree: dict[str, Any] = {}
    if shape.branching is not None:
        tree["top_k_tokens_per_head"] = list(shape.branching)
    if shape.candidates is not None:
        tree["n_candidates"] = shape.candidates
    return tree
