"""Published layout of every drafter shape: stored tensor names, and a config.json that every engine reads correctly."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from foredraft.checkpoints import (
    blockwise,
    chimera,
    eagle,
    eagle3,
    early_exit,
    hydra,
    medusa,
    mlp_speculator,
    vocabulary,
)
from foredraft.checkpoints.aux_layers import LAYER_IDS_KEY, choose_default_layers
from foredraft.checkpoints.decoder_layers import make_layer_config
from foredraft.checkpoints.schema import (
    BlockwiseShape,
    ChimeraShape,
    DrafterShape,
    Eagle3Shape,
    EagleShape,
    EarlyExitShape,
    HydraShape,
    MedusaShape,
    MlpSpeculatorShape,
)
from foredraft.models.forward_batch import AFTER_FINAL_NORM


@dataclass(frozen=True)
class CheckpointLayout:
    """Content of a checkpoint folder that is not written yet."""

    method: str
    tensors: dict[str, Tensor]
    config: dict[str, Any]
    file: str = "model.safetensors"


@singledispatch
def make_layout(shape: DrafterShape, tensors: Mapping[str, Tensor]) -> CheckpointLayout:
    """Return the layout in which a drafter of this shape is published.

    Args:
        shape: Shape of the drafter.
        tensors: Weights by internal name, exactly those that the shape requires.

    Raises:
        TypeError: if the shape is not that of a drafter.
        ValueError: if the tensors do not match the shape.
    """
    raise TypeError(f"{type(shape).__name__} is no drafter shape")


@make_layout.register
def _make_medusa_layout(shape: MedusaShape, tensors: Mapping[str, Tensor]) -> CheckpointLayout:
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
        config[medusa.ACCURACIES_KEY] = [list(row) for row in shape.accuracies]
    return CheckpointLayout(
        medusa.METHOD, _check_tensors(tensors, medusa.list_tensor_shapes(shape)), config, "medusa_lm_head.safetensors"
    )


@make_layout.register
def _make_mlp_speculator_layout(shape: MlpSpeculatorShape, tensors: Mapping[str, Tensor]) -> CheckpointLayout:
    weights = _check_tensors(tensors, mlp_speculator.list_tensor_shapes(shape))
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
    if shape.branching is not None:
        config["top_k_tokens_per_head"] = list(shape.branching)
    if shape.candidates is not None:
        config["n_candidates"] = shape.candidates
    return CheckpointLayout(
        mlp_speculator.METHOD, {f"speculator.{name}": value for name, value in weights.items()}, config
    )


@make_layout.register
def _make_blockwise_layout(shape: BlockwiseShape, tensors: Mapping[str, Tensor]) -> CheckpointLayout:
    """Use the names of this project; no other layout exists."""
    weights = _check_tensors(tensors, blockwise.list_tensor_shapes(shape))
    config = {
        "architectures": ["BlockwiseHeads"],
        "model_type": "blockwise",
        "blockwise_num_heads": shape.num_heads,
        "hidden_size": shape.hidden,
        "vocab_size": shape.vocab_size,
    }
    return CheckpointLayout(
        blockwise.METHOD, {f"{blockwise.TENSOR_PREFIX}{name}": value for name, value in weights.items()}, config
    )


@make_layout.register
def _make_hydra_layout(shape: HydraShape, tensors: Mapping[str, Tensor]) -> CheckpointLayout:
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
        config[hydra.OUTPUT_HEAD_KEY] = "target"
    if shape.prefix is not None:
        config["rope_parameters"] = dict(shape.prefix.rope)
    weights = _check_tensors(tensors, hydra.list_tensor_shapes(shape))
    if shape.prefix is not None:
        weights = {hydra.to_stored_name(name): value for name, value in weights.items()}
    return CheckpointLayout(hydra.METHOD, weights, config, "hydra_lm_head.pt")


@make_layout.register
def _make_eagle_layout(shape: EagleShape, tensors: Mapping[str, Tensor]) -> CheckpointLayout:
    """Use the authors' layout. Their code reads the key `bias`; engines read the tensors."""
    config = make_layer_config(shape.block, shape.num_layers) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "bias": shape.has_fc_bias,
        "qkv_bias": shape.block.has_qkv_bias,
    }
    return CheckpointLayout(eagle.METHOD, _check_tensors(tensors, eagle.list_tensor_shapes(shape)), config)


@make_layout.register
def _make_eagle3_layout(shape: Eagle3Shape, tensors: Mapping[str, Tensor]) -> CheckpointLayout:
    """Use the authors' names, and list hidden layers in both conventions: each engine reads its own."""
    weights = _check_tensors(tensors, eagle3.list_tensor_shapes(shape))
    return CheckpointLayout(eagle3.METHOD, make_eagle3_tensors(shape, weights), make_eagle3_config(shape))


def make_eagle3_tensors(shape: Eagle3Shape, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
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


def make_eagle3_config(shape: Eagle3Shape, num_layers: int | None = None) -> dict[str, Any]:
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
        eagle3.FEEDBACK_KEY: eagle3.NORMED_STATE if shape.feeds_normed else eagle3.RAW_STATE,
    }
    if shape.hidden_layers == (AFTER_FINAL_NORM,):
        config["eagle_config"] = {"use_aux_hidden_state": False}
    elif num_layers is None or shape.hidden_layers != choose_default_layers(num_layers):
        config[LAYER_IDS_KEY] = list(shape.hidden_layers)
        config["num_aux_hidden_states"] = len(shape.hidden_layers)
        config["eagle_config"] = {
            LAYER_IDS_KEY: [boundary - 1 for boundary in shape.hidden_layers],
            "use_aux_hidden_state": True,
        }
    return config


@make_layout.register
def _make_chimera_layout(shape: ChimeraShape, tensors: Mapping[str, Tensor]) -> CheckpointLayout:
    config = make_layer_config(shape.block, 1) | {
        "architectures": ["ChimeraModel"],
        "model_type": "chimera",
        "vocab_size": shape.vocab_size,
        "chimera_num_heads": shape.num_heads,
        chimera.HIDDEN_LAYERS_KEY: list(shape.hidden_layers),
    }
    return CheckpointLayout(chimera.METHOD, _check_tensors(tensors, chimera.list_tensor_shapes(shape)), config)


@make_layout.register
def _make_early_exit_layout(shape: EarlyExitShape, tensors: Mapping[str, Tensor]) -> CheckpointLayout:
    """Use the names of this project; no other layout exists."""
    config = {
        "architectures": ["EarlyExitAdapter"],
        "model_type": "early_exit",
        "hidden_size": shape.hidden,
        "rank": shape.rank,
        "exit_layer": shape.exit_layer,
    }
    weights = _check_tensors(tensors, early_exit.list_tensor_shapes(shape))
    return CheckpointLayout(
        early_exit.METHOD, {f"{early_exit.TENSOR_PREFIX}{name}": value for name, value in weights.items()}, config
    )


def _check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, Any]) -> dict[str, Tensor]:
    """Check that the tensors are exactly those of a shape; a mismatch is a programming error, not a user error."""
    if tensors.keys() != expected.keys():
        raise ValueError(f"tensors {sorted(tensors.keys() ^ expected.keys())} do not fit the drafter's shape")
    for name, tensor_shape in expected.items():
        size = tuple(getattr(tensor_shape, "shape", tensor_shape))
        if tuple(tensors[name].shape) != size:
            raise ValueError(f"{name} is {list(tensors[name].shape)} and has to be {list(size)}")
    return dict(tensors)
