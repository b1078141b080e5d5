"""The `speculators` layout: one config.json for many methods, with the decoder layer's config inside."""

from collections.abc import Collection, Mapping
from typing import Any

from foredraft.checkpoints.tensors import TensorFiles

MODEL_TYPE_KEY = "speculators_model_type"


def is_type(config: Mapping[str, Any], model_type: str) -> bool:
    """Check whether config.json declares a drafter of this type in the `speculators` layout."""
    return bool(config.get(MODEL_TYPE_KEY) == model_type)


def merge_config(files: TensorFiles, config: Mapping[str, Any], head_keys: Collection[str]) -> dict[str, Any]:
    """Return the config of the decoder layer, with the keys of the head beside it.

    Raises:
        ForedraftError: if config.json has no decoder layer.
    """
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise files.refuse("config.json has no transformer_layer_config, which the speculators format requires")
    return dict(layer) | {name: config[name] for name in head_keys if config.get(name) is not None}
