"""The published layout of every shape: names as on disk, and a config.json right in every engine that loads it."""

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
from foredraft.checkpoints.aux_layers import IDS, default_taps
from foredraft.checkpoints.base import (
    BlockwiseShape,
    ChimeraShape,
    Eagle3Shape,
    EagleShape,
    EarlyExitShape,
    HydraShape,
    MedusaShape,
    Shape,
    SpeculatorShape,
)
from foredraft.checkpoints.layers import layer_config
from foredraft.models.window import NORMED


@dataclass(frozen=True)
class Layout:
    """A folder to be."""

    method: str
    tensors: dict[str, Tensor]
    config: dict[str, Any]
    file: str = "model.safetensors"


@singledispatch
def layout(shape: Shape, tensors: Mapping[str, Tensor]) -> Layout:
    """How a drafter of this shape is published."""
    raise TypeError(f"{type(shape).__name__} is no drafter's shape")


@layout.register
def _medusa(shape: MedusaShape, tensors: Mapping[str, Tensor]) -> Layout:
    """FasterDecoding's names, which vLLM and TGI read too. vLLM drops biases unless config says there are some."""
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
        config[medusa.ACCURACIES] = [list(row) for row in shape.accuracies]
    return Layout(medusa.METHOD, _named(tensors, medusa.expected(shape)), config, "medusa_lm_head.safetensors")


@layout.register
def _speculator(shape: SpeculatorShape, tensors: Mapping[str, Tensor]) -> Layout:
    held = _named(tensors, mlp_speculator.expected(shape))
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
    return Layout(mlp_speculator.METHOD, {f"speculator.{name}": value for name, value in held.items()}, config)


@layout.register
def _blockwise(shape: BlockwiseShape, tensors: Mapping[str, Tensor]) -> Layout:
    """Ours: there is no other."""
    held = _named(tensors, blockwise.expected(shape))
    config = {
        "architectures": ["BlockwiseHeads"],
        "model_type": "blockwise",
        "blockwise_num_heads": shape.num_heads,
        "hidden_size": shape.hidden,
        "vocab_size": shape.vocab_size,
    }
    return Layout(blockwise.METHOD, {f"{blockwise.PREFIX}{name}": value for name, value in held.items()}, config)


@layout.register
def _hydra(shape: HydraShape, tensors: Mapping[str, Tensor]) -> Layout:
    """The authors' names; what is missing from them is said under keys that their code does not read."""
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
        config[hydra.BORROWED] = "target"
    if shape.prefix is not None:
        config["rope_parameters"] = dict(shape.prefix.rope)
    held = _named(tensors, hydra.expected(shape))
    if shape.prefix is not None:
        held = {hydra.theirs(name): value for name, value in held.items()}
    return Layout(hydra.METHOD, held, config, "hydra_lm_head.pt")


@layout.register
def _eagle(shape: EagleShape, tensors: Mapping[str, Tensor]) -> Layout:
    """The authors' layout. Their own code reads `bias`, engines read the tensors."""
    config = layer_config(shape.block, shape.num_layers) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "bias": shape.has_fc_bias,
        "qkv_bias": shape.block.has_qkv_bias,
    }
    return Layout(eagle.METHOD, _named(tensors, eagle.expected(shape)), config)


@layout.register
def _eagle3(shape: Eagle3Shape, tensors: Mapping[str, Tensor]) -> Layout:
    """The authors' names, with the layers in both conventions: each engine reads the one it understands."""
    held = _named(tensors, eagle3.expected(shape))
    return Layout(eagle3.METHOD, eagle3_tensors(shape, held), eagle3_config(shape))


def eagle3_tensors(shape: Eagle3Shape, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On disk: t2d beside d2t, and the first layer as `midlayer` unless there are more.

    The one norm of a later layer is stored under both names that engines know it by.
    """
    found = dict(held)
    if "d2t" in found:
        found["d2t"] = found["d2t"].long()
        found["t2d"] = torch.zeros(shape.vocab_size, dtype=torch.bool)
        found["t2d"][vocabulary.target_ids(found["d2t"])] = True
    if shape.num_layers == 1:
        return {
            f"midlayer.{k.removeprefix('layers.0.')}" if k.startswith("layers.0.") else k: v for k, v in found.items()
        }
    for layer in range(1, shape.num_layers):
        norm = found[f"layers.{layer}.input_layernorm.weight"]
        found[f"layers.{layer}.hidden_norm.weight"] = norm.clone()
    return found


def eagle3_config(shape: Eagle3Shape, num_layers: int | None = None) -> dict[str, Any]:
    """`num_layers` of the target, where known: layers that every engine takes by default are then left unsaid."""
    config = layer_config(shape.block, shape.num_layers) | {
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
        eagle3.FEEDBACK: eagle3.NORMED_STATE if shape.feeds_normed else eagle3.RAW_STATE,
    }
    if shape.taps == (NORMED,):
        config["eagle_config"] = {"use_aux_hidden_state": False}
    elif num_layers is None or shape.taps != default_taps(num_layers):
        config[IDS] = list(shape.taps)
        config["num_aux_hidden_states"] = len(shape.taps)
        config["eagle_config"] = {IDS: [tap - 1 for tap in shape.taps], "use_aux_hidden_state": True}
    return config


@layout.register
def _chimera(shape: ChimeraShape, tensors: Mapping[str, Tensor]) -> Layout:
    config = layer_config(shape.block, 1) | {
        "architectures": ["ChimeraModel"],
        "model_type": "chimera",
        "vocab_size": shape.vocab_size,
        "chimera_num_heads": shape.num_heads,
        chimera.TAPS: list(shape.taps),
    }
    return Layout(chimera.METHOD, _named(tensors, chimera.expected(shape)), config)


@layout.register
def _early_exit(shape: EarlyExitShape, tensors: Mapping[str, Tensor]) -> Layout:
    """Ours alone."""
    config = {
        "architectures": ["EarlyExitAdapter"],
        "model_type": "early_exit",
        "hidden_size": shape.hidden,
        "rank": shape.rank,
        "exit_layer": shape.exit_layer,
    }
    held = _named(tensors, early_exit.expected(shape))
    return Layout(early_exit.METHOD, {f"{early_exit.PREFIX}{name}": value for name, value in held.items()}, config)


def _named(tensors: Mapping[str, Tensor], expected: Mapping[str, Any]) -> dict[str, Tensor]:
    """Exactly the tensors of a shape; anything else is our own mistake, not the user's."""
    if tensors.keys() != expected.keys():
        raise ValueError(f"tensors {sorted(tensors.keys() ^ expected.keys())} do not fit the drafter's shape")
    for name, want in expected.items():
        size = tuple(getattr(want, "shape", want))
        if tuple(tensors[name].shape) != size:
            raise ValueError(f"{name} is {list(tensors[name].shape)} and its shape says {list(size)}")
    return dict(tensors)
