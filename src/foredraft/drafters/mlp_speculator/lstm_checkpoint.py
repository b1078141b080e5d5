"""Reader of speculators with an LSTM cell, as Arctic publishes them."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from foredraft.checkpoints.layouts import CheckpointLayout, check_tensors
from foredraft.checkpoints.schema import Checkpoint, TargetInfo
from foredraft.checkpoints.tensor_claims import TensorClaims
from foredraft.checkpoints.tensors import TensorFiles
from foredraft.drafters.mlp_speculator.checkpoint import (
    NAME,
    claim_tensors,
    describe_tree,
    read_branching,
    read_candidates,
    read_once,
)
from foredraft.drafters.mlp_speculator.shape import MlpSpeculatorShape

GATES = ("forget", "input", "output", "cell")  # order of the columns of the joined matrix; the last is the candidate
EMBEDDING = "forget_emb.0.weight"
REPEATED_EMBEDDING = re.compile(r"^(?:input|output|cell)_emb\.0\.weight$")  # all gates share the embedding
REPEATED_HEAD = re.compile(r"^head\.[1-9]\d*\.weight$")  # all steps share the output matrix
OWN_TENSOR_NAME = r"^(?:speculator\.)?forget_proj\.0\.weight$"
TENSOR_NAME = re.compile(
    r"^(?:speculator\.)?((?:(?:forget|input|output|cell)_(?:emb|proj)|(?:cell|state)_ln|head)\.\d+\.(?:weight|bias))$"
)


def read(files: TensorFiles, config: dict[str, Any], target: TargetInfo) -> Checkpoint:
    """Read a speculator with an LSTM cell. Repeats of the embedding and of the output matrix are read once."""
    claims = claim_tensors(files, TENSOR_NAME)
    shape = _infer_shape(claims, config, target)
    originals = {name: EMBEDDING for name in claims.stored_names if REPEATED_EMBEDDING.match(name)}
    originals |= {name: "head.0.weight" for name in claims.stored_names if REPEATED_HEAD.match(name)}
    tensors = read_once(claims, list_tensor_shapes(shape), originals)
    return Checkpoint(NAME, "ArcticLSTMSpeculator", files.folder, shape, tensors, config)


def _infer_shape(claims: TensorClaims, config: dict[str, Any], target: TargetInfo) -> MlpSpeculatorShape:
    inner, hidden = claims.require_shape("forget_proj.0.weight", 2)
    vocab_size = claims.require_shape(EMBEDDING, 2)[0]
    claims.check_target("hidden size", hidden, target.name, target.hidden)
    claims.check_target("vocabulary size", vocab_size, target.name, target.vocab_size)
    if config.get("tie_lstm_embs") is False:
        raise claims.refuse("its gates have embeddings of their own (tie_lstm_embs), which are not supported")
    n_predict = config.get("n_predict")
    if type(n_predict) is not int or n_predict < 1:
        raise claims.refuse("config.json must set n_predict, which tied weights do not determine")
    return MlpSpeculatorShape(
        hidden=hidden,
        inner=inner,
        vocab_size=vocab_size,
        n_predict=n_predict,
        is_tied=True,
        scales_input=bool(config.get("scale_input", False)),
        branching=read_branching(claims, config, n_predict),
        candidates=read_candidates(claims, config),
        is_lstm=True,
    )


def list_tensor_shapes(shape: MlpSpeculatorShape) -> dict[str, tuple[int, ...]]:
    """List the expected tensors of a shape by internal name, each once."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (shape.vocab_size, shape.inner)}
    for gate in GATES:
        shapes[f"{gate}_proj.0.weight"] = (shape.inner, shape.hidden)
        shapes[f"{gate}_proj.1.weight"] = (shape.inner, shape.inner)
    for norm in ("cell_ln", "state_ln"):
        shapes |= {f"{norm}.0.weight": (shape.inner,), f"{norm}.0.bias": (shape.inner,)}
    return shapes | {"head.0.weight": (shape.vocab_size, shape.inner)}


def make_layout(shape: MlpSpeculatorShape, tensors: Mapping[str, Tensor]) -> CheckpointLayout:
    """Use Arctic's names."""
    config = {
        "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "method": "sum_lstm",
        "vocab_size": shape.vocab_size,
        "input_hidden_dim": shape.hidden,
        "inner_dim": str(shape.inner),  # Arctic Inference splits these three at points
        "proj_dim": str(shape.inner),
        "emb_dim": str(shape.inner),
        "n_predict": shape.n_predict,
        "tie_weights": True,
        "tie_lstm_embs": True,
        "scale_input": shape.scales_input,
    }
    return CheckpointLayout(NAME, check_tensors(tensors, list_tensor_shapes(shape)), config | describe_tree(shape))


def repeat_embeddings(layout: CheckpointLayout) -> CheckpointLayout:
    """Add the embeddings of the other gates, equal to that of the first; Arctic Inference requires them."""
    repeats = {f"{gate}_emb.0.weight": layout.tensors[EMBEDDING] for gate in GATES[1:]}
    return replace(layout, tensors={**layout.tensors, **repeats})
