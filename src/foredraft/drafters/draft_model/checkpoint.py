"""Signs of a whole language model, which transformers loads."""

from collections.abc import Collection, Mapping
from typing import Any

from foredraft.checkpoints.recognise import is_whole_model, read_architectures

ARCHITECTURE_SUFFIXES = ("ForCausalLM", "LMHeadModel")


def has_model_tensors(names: Collection[str], config: Mapping[str, Any]) -> bool:
    """Check whether a folder has tensors of a whole language model."""
    return is_whole_model(names)


def has_model_architecture(names: Collection[str], config: Mapping[str, Any]) -> bool:
    """Check whether config.json names the architecture of a language model."""
    return any(name.endswith(ARCHITECTURE_SUFFIXES) for name in read_architectures(config))
