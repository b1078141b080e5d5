"""The `speculators` library's layout: one config for many methods, of which EAGLE-3 is read."""

from typing import Any

from foredraft.checkpoints import eagle3
from foredraft.checkpoints.aux_layers import IDS
from foredraft.checkpoints.base import Checkpoint, TargetFacts
from foredraft.checkpoints.tensors import TensorFiles

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
    made = eagle3.read(files, merged, target, kind="speculators EAGLE-3", slides=True)
    return Checkpoint(made.method, made.format, made.folder, made.shape, made.tensors, config)
