"""Reader of the `speculators` layout: one config.json for many methods, of which EAGLE-3 is supported."""

from typing import Any

from foredraft.checkpoints import eagle3
from foredraft.checkpoints.aux_layers import LAYER_IDS_KEY
from foredraft.checkpoints.schema import Checkpoint, TargetInfo
from foredraft.checkpoints.tensors import TensorFiles

MODEL_TYPE_KEY = "speculators_model_type"
METHODS = {eagle3.METHOD: eagle3.METHOD}  # name in speculators -> name of the method
HEAD_KEYS = (
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    eagle3.FEEDBACK_KEY,
    LAYER_IDS_KEY,
)


def read(files: TensorFiles, config: dict[str, Any], target: TargetInfo) -> Checkpoint:
    """Read a drafter from the config of its decoder layer and the keys of the head beside it.

    `norm_before_residual` is true in this layout unless config.json sets it to false.
    """
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise files.refuse("config.json has no transformer_layer_config, which the speculators format requires")
    merged = dict(layer) | {name: config[name] for name in HEAD_KEYS if config.get(name) is not None}
    merged["norm_before_residual"] = config.get("norm_before_residual", True)
    checkpoint = eagle3.read(files, merged, target, format_name="speculators EAGLE-3", has_sliding_windows=True)
    return Checkpoint(
        checkpoint.method, checkpoint.format, checkpoint.folder, checkpoint.shape, checkpoint.tensors, config
    )
