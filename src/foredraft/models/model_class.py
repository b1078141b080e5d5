"""Choice of the auto class of transformers that loads a model."""

from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
)


def select_auto_class(config: Any) -> Any:
    """Select the auto class for a transformers configuration."""
    if config.is_encoder_decoder:
        is_speech = type(config) in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING
        return AutoModelForSpeechSeq2Seq if is_speech else AutoModelForSeq2SeqLM
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return AutoModelForMultimodalLM  # only its text part is used
    return AutoModelForCausalLM


def is_multimodal(config: Any) -> bool:
    """Whether a configuration is of a decoder that reads more than text."""
    return not config.is_encoder_decoder and config.get_text_config() is not config
