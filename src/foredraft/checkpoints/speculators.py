"""The `speculators` library's layout: one config for many methods, of which EAGLE-3 is read."""

from dataclasses import replace
from typing import Any

from foredraft.checkpoints import eagle3
from foredraft.checkpoints.aux_layers import IDS
from foredraft.checkpoints.base import Checkpoint, Eagle3Shape, TargetFacts
from foredraft.checkpoints.tensors import TensorFiles

FULL, SLIDING = "full_attention", "sliding_attention"
KEY = "speculators_model_type"
METHODS = {eagle3.METHOD: eagle3.METHOD}  # its name for a method -> ours
OWN = ("draft_vocab_size", "target_hidden_size", "norm_before_fc", "fc_norm", "norm_output", eagle3.FEEDBACK, IDS)


def read(files: TensorFiles, config: dict[str, Any], target: TargetFacts) -> Checkpoint:
    """The decoder layer's config with the head's own words beside it; its norm_before_residual is on unless denied."""
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise files.refuse("config.json has no transformer_layer_config, which the speculators format requires")
    merged = dict(layer) | {name: config[name] for name in OWN if config.get(name) is not None}
    merged["norm_before_residual"] = config.get("norm_before_residual", True)
    made = eagle3.read(files, merged, target, kind="speculators EAGLE-3")
    assert isinstance(made.shape, Eagle3Shape)
    block = replace(made.shape.block, windows=_windows(files, layer, made.shape.num_layers))
    shape = replace(made.shape, block=block)
    return Checkpoint(made.method, made.format, made.folder, shape, made.tensors, config)


def _windows(files: TensorFiles, layer: dict[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """How far every layer sees. `sliding_window` counts for layers that `layer_types` calls sliding, and for no other."""
    kinds = layer.get("layer_types") or [FULL] * num_layers
    if not isinstance(kinds, list) or len(kinds) != num_layers or not {*kinds} <= {FULL, SLIDING}:
        raise files.refuse(
            f"layer_types in config.json has to be {num_layers} of {FULL} and {SLIDING}, and is {kinds!r}"
        )
    if SLIDING not in kinds:
        return ()
    size = layer.get("sliding_window")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise files.refuse(f"sliding_window in config.json has to be a positive number of positions, and is {size!r}")
    return tuple(size if kind == SLIDING else None for kind in kinds)
