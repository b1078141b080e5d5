"""Checks of a draft model against its target."""

from typing import Any

from foredraft.errors import ForedraftError
from foredraft.models.hf import HFModel
from foredraft.models.loading import load_tokenizer
from foredraft.models.vocabularies import check_vocabularies


def check_same_kind(config: Any, name: str, target: HFModel) -> None:
    """Raise ForedraftError if only one of a model, given by its configuration, and the target has an encoder."""
    if config.is_encoder_decoder != target.has_encoder:
        kinds = ("a decoder alone", "an encoder-decoder model")
        raise ForedraftError(
            f"{name} is {kinds[not target.has_encoder]} and {target.name} {kinds[target.has_encoder]}; use a draft of "
            "the same architecture, or a method without a model, such as ngram"
        )


def check_same_vocabulary(model: Any, name: str, target: HFModel) -> None:
    """Raise ForedraftError if a model has another vocabulary than the target."""
    size = model.get_output_embeddings().weight.shape[0]
    target_vocab = (target.name, load_tokenizer(target.name), target.vocab_size)
    check_vocabularies(target_vocab, (name, load_tokenizer(name), size))
