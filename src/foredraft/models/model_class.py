"""Choice of the class of transformers that loads a model."""

from typing import Any

import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedModel,
)


def select_auto_class(config: Any) -> Any:
    """Select the class for a transformers configuration: an auto class, or the model class that the file names.

    The text part of a multimodal family may have a causal LM and a configuration that no auto class knows.
    """
    if config.is_encoder_decoder:
        is_speech = type(config) in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING
        return AutoModelForSpeechSeq2Seq if is_speech else AutoModelForSeq2SeqLM
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return AutoModelForMultimodalLM  # only its text part is used
    return _find_named_class(config) or AutoModelForCausalLM


def _find_named_class(config: Any) -> type[PreTrainedModel] | None:
    """Find the first class for generation that `architectures` names and that has this configuration."""
    for name in config.architectures or ():
        kind: Any = getattr(transformers, str(name), None)  # loaded lazily
        is_model_class = isinstance(kind, type) and issubclass(kind, PreTrainedModel)
        if is_model_class and kind.config_class is type(config) and kind.can_generate():
            return kind  # type: ignore[no-any-return]
    return None


def is_multimodal(config: Any) -> bool:
    """Whether a configuration is of a decoder that reads more than text."""
    return not config.is_encoder_decoder and config.get_text_config() is not config
