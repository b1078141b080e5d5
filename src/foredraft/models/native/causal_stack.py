"""Decoder and head of a causal LM, or of the text part of a multimodal model, for the native code."""

from dataclasses import dataclass
from typing import Any

from transformers import MODEL_MAPPING

from foredraft.models.text_part import is_plain_wrapper


@dataclass(frozen=True)
class CausalStack:
    """Modules of which text makes logits: a decoder from tokens to hidden states, and a head."""

    decoder: Any
    head: Any

    @classmethod
    def from_model(cls, model: Any) -> "CausalStack":
        """Find the modules of a transformers model for which `explain_missing_stack` returned None."""
        if model.config.get_text_config() is model.config:
            return cls(model.model, model.lm_head)
        return cls(model.get_decoder(), model.get_output_embeddings())


def explain_missing_stack(model: Any) -> str | None:
    """Return why a model is more than a decoder and a head, as far as text is concerned; None if it is not.

    Around the decoder, a multimodal model may do more than to look up embeddings and to apply the head.
    """
    text = model.config.get_text_config()
    if text is model.config:
        return None
    is_known = type(text) in MODEL_MAPPING and type(model.get_decoder()) is MODEL_MAPPING[type(text)]
    # Causal LMs of Granite, Cohere and Gemma scale or cap their logits. Multimodal models around them may not.
    factors = [getattr(text, name, None) or 1.0 for name in ("logits_scaling", "logit_scale")]
    is_scaled = factors != [1.0, 1.0] or bool(getattr(text, "final_logit_softcapping", None))
    if is_known and not is_scaled and is_plain_wrapper(model):
        return None
    return f"the text part of a model of type {model.config.model_type}"
