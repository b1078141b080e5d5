"""Families of decoders with native code: where their modules differ from Llama's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ROTARY, LOCAL_ROTARY, NO_ROTARY = 0, 1, 2  # positions of a layer, with the values of foredraft.h


def _rotate_always(attention: Any) -> int:
    return ROTARY


def _rotate_if_marked(attention: Any) -> int:
    return ROTARY if attention.use_rope else NO_ROTARY


@dataclass(frozen=True)
class DecoderFamily:
    """Names of a family's modules and what they compute. The defaults are Llama's.

    A norm's name is that of an attribute of the layer; "" = the layer has none.
    """

    positions: Callable[[Any], int] = _rotate_always  # attention module -> positions of the layer
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")

    def list_projections(self, block: Any) -> list[Any]:
        """List the linear modules of a layer."""
        attention, mlp = block.self_attn, block.mlp
        return [
            *(getattr(attention, name) for name in (*self.qkv, "o_proj")),
            *(getattr(mlp, name) for name in (*self.gate_up, "down_proj")),
        ]


LLAMA = DecoderFamily()
SMOLLM3 = DecoderFamily(positions=_rotate_if_marked)
PHI3 = DecoderFamily(qkv=("qkv_proj",), gate_up=("gate_up_proj",))

# By config.model_type. Text has three equal positions in Qwen-VL, which makes its rotary factors those of Qwen.
VISION_FAMILIES = ("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text")
FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "ministral", "qwen2", "qwen3", "granite", *VISION_FAMILIES), LLAMA),
    "smollm3": SMOLLM3,
    "phi3": PHI3,
}
