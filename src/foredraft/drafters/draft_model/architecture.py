"""Architecture of a new draft model: that of its target, with fewer layers and a smaller hidden size."""

import copy
import math
from dataclasses import dataclass
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, LlamaConfig

from foredraft.errors import ForedraftError
from foredraft.models.encdec import t5

LAYER_DIVISOR = 6  # default depth: the target's decoder layers over this
ENCODER_DIVISOR = 2  # default depth of an encoder, which runs once per request: the target's encoder layers over this
WIDTH_DIVISOR = 2  # default width: the target's hidden size over this
DEFAULT_ROPE_THETA = 10000.0  # rotary base of a text part that names none
WIDTH_MULTIPLE = 16  # the width of an MLP layer is a multiple of this


@dataclass(frozen=True)
class DraftSize:
    """Size of a new draft model; None = the default."""

    layers: int | None = None  # decoder layers
    hidden: int | None = None
    encoder_layers: int | None = None


def shrink_config(config: Any, size: DraftSize) -> Any:
    """Copy a model configuration with fewer layers and a smaller hidden size. The head size stays.

    Args:
        config: configuration of the target.
        size: layers and hidden size; by default a sixth of the decoder layers, half of the encoder layers, and half of
            the hidden size.

    Raises:
        ForedraftError: for an unusual architecture, a hidden size that is no multiple of the head size, or encoder
            layers without an encoder.
    """
    if config.is_encoder_decoder:
        return _shrink_encoder_decoder(config, size)
    if size.encoder_layers is not None:
        raise ForedraftError(f"models of type {config.model_type} have no encoder; leave encoder_layers out")
    shape = copy.deepcopy(config.get_text_config())
    if not hasattr(shape, "num_attention_heads") or not hasattr(shape, "intermediate_size"):
        raise _make_error(shape)
    head = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    target_width = shape.hidden_size
    width, heads = _choose_width(size.hidden, target_width, head)
    depth = _choose_depth(size.layers, shape.num_hidden_layers, LAYER_DIVISOR)
    kv_heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    shape.intermediate_size = _scale_width(shape.intermediate_size, width, target_width)
    shape.hidden_size, shape.num_hidden_layers, shape.num_attention_heads = width, depth, heads
    shape.num_key_value_heads = math.gcd(heads, kv_heads)
    if getattr(shape, "head_dim", None):
        shape.head_dim = head
    if getattr(shape, "layer_types", None):
        shape.layer_types = shape.layer_types[:depth]
    return shape if type(shape) in MODEL_FOR_CAUSAL_LM_MAPPING else _convert_to_llama(shape, head)


def _convert_to_llama(shape: Any, head: int) -> Any:
    """Make a Llama configuration of the sizes of a text part that has no causal LM of its own, as in Qwen3-VL."""
    rope = getattr(shape, "rope_parameters", None) or {}
    return LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=head,
        max_position_embeddings=shape.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": rope.get("rope_theta", DEFAULT_ROPE_THETA)},
        bos_token_id=shape.bos_token_id,
        eos_token_id=shape.eos_token_id,
        pad_token_id=shape.pad_token_id,
    )


def _shrink_encoder_decoder(config: Any, size: DraftSize) -> Any:
    shape = copy.deepcopy(config)
    target_width = shape.d_model
    is_t5 = shape.model_type in t5.FAMILIES  # other encoder-decoders have BART's names of sizes
    if not is_t5 and not hasattr(shape, "decoder_ffn_dim"):
        raise _make_error(shape)
    head = shape.d_kv if is_t5 else target_width // shape.decoder_attention_heads
    width, heads = _choose_width(size.hidden, target_width, head)
    target_encoder, target_decoder = _read_depths(config)
    encoder_layers = _choose_depth(size.encoder_layers, target_encoder, ENCODER_DIVISOR)
    decoder_layers = _choose_depth(size.layers, target_decoder, LAYER_DIVISOR)
    shape.d_model = width
    if is_t5:
        shape.num_layers, shape.num_decoder_layers, shape.num_heads = encoder_layers, decoder_layers, heads
        shape.d_ff = _scale_width(shape.d_ff, width, target_width)
        return shape
    shape.encoder_layers, shape.decoder_layers = encoder_layers, decoder_layers
    shape.encoder_attention_heads = shape.decoder_attention_heads = heads
    shape.encoder_ffn_dim = _scale_width(shape.encoder_ffn_dim, width, target_width)
    shape.decoder_ffn_dim = _scale_width(shape.decoder_ffn_dim, width, target_width)
    return shape


def read_size(config: Any) -> DraftSize:
    """Return the sizes of a model from its configuration."""
    if not config.is_encoder_decoder:
        shape = config.get_text_config()
        return DraftSize(shape.num_hidden_layers, shape.hidden_size)
    encoder_layers, decoder_layers = _read_depths(config)
    return DraftSize(decoder_layers, config.d_model, encoder_layers)


def _read_depths(config: Any) -> tuple[int, int]:
    """Return the numbers of encoder layers and decoder layers of an encoder-decoder model."""
    if config.model_type in t5.FAMILIES:
        return config.num_layers, config.num_decoder_layers
    return config.encoder_layers, config.decoder_layers


def _choose_width(hidden: int | None, target_width: int, head: int) -> tuple[int, int]:
    """Return hidden size and number of heads."""
    width = hidden or max(head, target_width // WIDTH_DIVISOR // head * head)
    if width % head or width < 1:
        raise ForedraftError(f"hidden must be a multiple of the head size {head}, got {width}")
    return width, width // head


def _choose_depth(layers: int | None, target_layers: int, divisor: int) -> int:
    depth = layers or max(1, target_layers // divisor)
    if depth < 1:
        raise ForedraftError(f"layers must be positive, got {depth}")
    return depth


def _scale_width(intermediate: int, width: int, target_width: int) -> int:
    return max(WIDTH_MULTIPLE, round(intermediate * width / target_width / WIDTH_MULTIPLE) * WIDTH_MULTIPLE)


def _make_error(shape: Any) -> ForedraftError:
    return ForedraftError(
        f"models of type {shape.model_type} cannot be made smaller; give a whole configuration as draft_config"
    )
