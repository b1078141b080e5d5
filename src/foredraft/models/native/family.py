"""Families of decoders with native code: where their modules differ from Llama's."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from foredraft.models.native.rotary import RotaryTables

ROTARY, LOCAL_ROTARY, NO_ROTARY = 0, 1, 2  # positions of a layer, with the values of foredraft.h


def _rotate_always(attention: Any) -> int:
    return ROTARY


def _rotate_by_window(attention: Any) -> int:
    return ROTARY if attention.sliding_window is None else LOCAL_ROTARY


def _rotate_in_window(attention: Any) -> int:
    return NO_ROTARY if attention.sliding_window is None else ROTARY


def _rotate_if_marked(attention: Any) -> int:
    return ROTARY if attention.use_rope else NO_ROTARY


@dataclass(frozen=True)
class FamilyNorms:
    """Norms of a family. A name is that of an attribute of the layer; "" = the layer has none."""

    attention: str = "input_layernorm"
    attention_post: str = ""  # of the attention's output before it is added
    mlp: str = "post_attention_layernorm"  # that of the attention = both read the same states
    mlp_post: str = ""
    eps: str = "variance_epsilon"  # name of the attribute of a norm
    offset: float = 0.0  # added to the weights
    are_layer_norms: bool = False  # LayerNorm without a bias, otherwise RMSNorm
    have_joint_heads: bool = False  # whether q_norm and k_norm cover all heads together

    @property
    def are_shared(self) -> bool:
        """Whether attention and MLP read the same normed states, side by side."""
        return self.attention == self.mlp != ""


@dataclass(frozen=True)
class DecoderFamily:
    """Names of a family's modules and of its options, and what they compute. The defaults are Llama's."""

    positions: Callable[[Any], int] = _rotate_always  # attention module -> positions of the layer
    norms: FamilyNorms = FamilyNorms()
    has_interleaved_rotary: bool = False  # whether adjacent values are rotated, otherwise the halves of a head
    has_paired_factors: bool = False  # whether the rotary module repeats its factors by pairs, otherwise by halves
    has_local_rotary: bool = False  # whether layers with a sliding window have a rotary table of their own
    has_scaled_embedding: bool = False  # whether the module of the embeddings multiplies them
    activation: str = "hidden_act"  # options of the text config
    softcap: str = ""  # of attention scores; "" = none
    logit_softcap: str = ""
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")

    def is_own_embedding(self, module: Any, decoder: Any) -> bool:
        """Return whether the embeddings of a decoder are those of its family."""
        if not self.has_scaled_embedding:
            return type(module) is nn.Embedding
        return type(module).__module__ == type(decoder).__module__ and isinstance(module, nn.Embedding)

    def read_embedding_scale(self, module: Any, config: Any) -> float:
        """Read the factor of the embeddings from their module, or from a text config."""
        if self.has_scaled_embedding:
            return float(module.embed_scale.to(module.weight.dtype))
        return float(getattr(config, "embedding_multiplier", 1.0))

    def make_rotary_tables(self, module: Any) -> RotaryTables:
        """Make the tables of a rotary module."""
        if self.has_local_rotary:
            return RotaryTables.from_module_by_type(module)
        return RotaryTables.from_module(module, self.has_paired_factors)

    def list_rope_types(self, config: Any) -> list[str | None]:
        """List the rope types of a text config; None = a layer type without rotary factors."""
        parameters = getattr(config, "rope_parameters", None) or {}
        every = [parameters.get(kind) for kind in set(config.layer_types)] if self.has_local_rotary else [parameters]
        return [None if each is None else each.get("rope_type") for each in every]

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
OLMO2 = DecoderFamily(
    norms=FamilyNorms(
        attention="",
        attention_post="post_attention_layernorm",
        mlp="",
        mlp_post="post_feedforward_layernorm",
        have_joint_heads=True,
    )
)
OLMO3 = replace(OLMO2, positions=_rotate_by_window, has_local_rotary=True)
GEMMA2 = DecoderFamily(
    norms=FamilyNorms(
        attention_post="post_attention_layernorm",
        mlp="pre_feedforward_layernorm",
        mlp_post="post_feedforward_layernorm",
        eps="eps",
        offset=1.0,
    ),
    has_scaled_embedding=True,
    activation="hidden_activation",
    softcap="attn_logit_softcapping",
    logit_softcap="final_logit_softcapping",
)
# The attention of Gemma 3 has no soft-cap, whatever its config says.
GEMMA3 = replace(GEMMA2, positions=_rotate_by_window, has_local_rotary=True, softcap="")
GLM4 = DecoderFamily(
    norms=FamilyNorms(attention_post="post_self_attn_layernorm", mlp_post="post_mlp_layernorm"),
    has_interleaved_rotary=True,
    gate_up=("gate_up_proj",),
)
ERNIE4_5 = DecoderFamily(has_interleaved_rotary=True)
COHERE2 = DecoderFamily(
    positions=_rotate_in_window,
    norms=FamilyNorms(mlp="input_layernorm", are_layer_norms=True),
    has_interleaved_rotary=True,
    has_paired_factors=True,
)

# By config.model_type. Text has three equal positions in Qwen-VL, which makes its rotary factors those of Qwen.
VISION_FAMILIES = ("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text")
FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "ministral", "qwen2", "qwen3", "granite", *VISION_FAMILIES), LLAMA),
    "smollm3": SMOLLM3,
    "phi3": PHI3,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "glm4": GLM4,
    "ernie4_5": ERNIE4_5,
    "cohere2": COHERE2,
}
