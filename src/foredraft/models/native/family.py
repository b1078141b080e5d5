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


def _rotate_if_configured(attention: Any) -> int:
    return ROTARY if attention.config.position_embedding_type == "rope" else NO_ROTARY


def _rotate_if_marked(attention: Any) -> int:
    return ROTARY if attention.use_rope else NO_ROTARY


@dataclass(frozen=True)
class FamilyNorms:
    """Norms of a family. A name is that of an attribute of the layer; "" = the layer has none."""

    attention: str = "input_layernorm"
    attention_post: str = ""  # of the attention's output before it is added
    mlp: str = "post_attention_layernorm"  # that of the attention = both read the same states
    mlp_post: str = ""
    query: str = "q_norm"  # of the attention
    key: str = "k_norm"
    final: str = "norm"  # of the decoder
    eps: str = "variance_epsilon"  # name of the attribute of a norm
    offset: float = 0.0  # added to the weights
    are_layer_norms: bool = False  # LayerNorm without a bias, otherwise RMSNorm
    have_joint_heads: bool = False  # whether q_norm and k_norm cover all heads together

    @property
    def are_shared(self) -> bool:
        """Whether attention and MLP read the same normed states, side by side."""
        return self.attention == self.mlp != ""


@dataclass(frozen=True)
class ExpertNames:
    """Names of the modules of a mixture of experts, and of options."""

    block: str = "mlp"  # attribute of the layer
    router: str = "gate"  # attribute of the block
    num_chosen: str = "num_experts_per_tok"  # option of the text config
    normalisation: str = "norm_topk_prob"  # option: whether the chosen experts' weights sum to 1; "" = they do
    shared: str = ""  # path of an MLP in the layer that every token reads too; "" = there is none
    shared_gate: str = ""  # path of its gate; "" = it has none
    has_pairs: bool = False  # whether the matrices are transposed, gates and values adjacent, with biases
    is_clamped: bool = False  # whether gates and values are clamped (`swiglu_limit`), otherwise as in an MLP

    def is_normalised(self, config: Any) -> bool:
        """Return whether the weights of the chosen experts sum to 1."""
        return bool(getattr(config, self.normalisation)) if self.normalisation else True


@dataclass(frozen=True)
class DecoderFamily:
    """Names of a family's modules and of its options, and what they compute. The defaults are Llama's."""

    positions: Callable[[Any], int] = _rotate_always  # attention module -> positions of the layer
    norms: FamilyNorms = FamilyNorms()
    has_interleaved_rotary: bool = False  # whether adjacent values are rotated, otherwise the halves of a head
    has_paired_factors: bool = False  # whether the rotary module repeats its factors by pairs, otherwise by halves
    has_single_factors: bool = False  # whether the rotary module does not repeat its factors
    has_local_rotary: bool = False  # whether layers with a sliding window have a rotary table of their own
    has_scaled_embedding: bool = False  # whether the module of the embeddings multiplies them
    activation: str = "hidden_act"  # options of the text config; activation "" = SiLU
    softcap: str = ""  # of attention scores; "" = none
    logit_softcap: str = ""
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out: str = "o_proj"
    has_gate: bool = False  # whether every head of q_proj has a gate of the head's result after its query
    mixer: str = ""  # attribute of the layers that are recurrent, which have no attention; "" = none is
    mlp: str = "mlp"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    experts: ExpertNames | None = None  # None = every layer has an MLP
    unset_options: tuple[str, ...] = ()  # options of the text config that must be None

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
        """Make the tables of a rotary module, or of a model without one."""
        if module is None:
            return RotaryTables.make_empty()
        if self.has_local_rotary:
            return RotaryTables.from_module_by_type(module)
        return RotaryTables.from_module(module, self.has_paired_factors, self.has_single_factors)

    def list_rope_types(self, config: Any) -> list[str | None]:
        """List the rope types of a text config; None = a layer type without rotary factors."""
        parameters = getattr(config, "rope_parameters", None) or {}
        every = [parameters.get(kind) for kind in set(config.layer_types)] if self.has_local_rotary else [parameters]
        return [None if each is None else each.get("rope_type") for each in every]

    def find_experts(self, block: Any) -> Any | None:
        """Return the module of a layer that routes to its experts; None if the layer has an MLP."""
        if self.experts is None:
            return None
        module = dict(block.named_children()).get(self.experts.block)
        return module if module is not None and "experts" in dict(module.named_children()) else None

    def find_mixer(self, block: Any) -> Any | None:
        """Return the recurrent part of a layer; None if the layer has attention."""
        return dict(block.named_children()).get(self.mixer)

    def read_activation(self, config: Any) -> str:
        """Read the name of the activation of a text config."""
        return getattr(config, self.activation) if self.activation else "silu"

    def list_projections(self, block: Any) -> list[Any]:
        """List the linear modules of a layer, those of a recurrent part aside."""
        mixer = self.find_mixer(block)
        of_attention = [] if mixer is not None else [getattr(block.self_attn, name) for name in (*self.qkv, self.out)]
        if (mlp := self.find_mlp(block)) is None:
            return of_attention
        return [*of_attention, *self.list_gate_up(mlp), getattr(mlp, self.down)]

    def find_mlp(self, block: Any) -> Any | None:
        """Return the MLP of a layer, or the one beside its experts; None if it has experts alone."""
        if self.experts is None or self.find_experts(block) is None:
            return getattr(block, self.mlp)
        return block.get_submodule(self.experts.shared) if self.experts.shared else None

    def find_shared_gate(self, block: Any) -> Any | None:
        """Return the gate of the MLP beside the experts of a layer; None if it has none."""
        if self.experts is None or not self.experts.shared_gate or self.find_experts(block) is None:
            return None
        return block.get_submodule(self.experts.shared_gate)

    def list_gate_up(self, mlp: Any) -> list[Any]:
        """List the linear modules of an MLP that act on its input."""
        return [getattr(mlp, name) for name in self.gate_up]


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
MIXTRAL = DecoderFamily(experts=ExpertNames(normalisation=""))
QWEN3_MOE = DecoderFamily(experts=ExpertNames())
OLMOE = DecoderFamily(norms=FamilyNorms(have_joint_heads=True), experts=ExpertNames(), unset_options=("clip_qkv",))
GRANITE_MOE = DecoderFamily(experts=ExpertNames(block="block_sparse_moe", router="router", normalisation=""))
GPT_OSS = DecoderFamily(
    has_single_factors=True,
    experts=ExpertNames(router="router", normalisation="", has_pairs=True, is_clamped=True),
)
QWEN3_5 = DecoderFamily(norms=FamilyNorms(offset=1.0, eps="eps"), has_gate=True, mixer="linear_attn")
QWEN3_5_MOE = replace(
    QWEN3_5,
    experts=ExpertNames(normalisation="", shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate"),
)
QWEN3_NEXT = replace(QWEN3_5, experts=ExpertNames(shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate"))
GRANITE_HYBRID = DecoderFamily(
    positions=_rotate_if_configured,
    mixer="mamba",
    mlp="shared_mlp",
    gate_up=("input_linear",),
    down="output_linear",
    experts=ExpertNames(block="block_sparse_moe", router="router", normalisation="", shared="shared_mlp"),
)
LFM2 = DecoderFamily(
    norms=FamilyNorms(
        attention="operator_norm", mlp="ffn_norm", query="q_layernorm", key="k_layernorm", final="embedding_norm"
    ),
    activation="",
    out="out_proj",
    mixer="conv",
    mlp="feed_forward",
    gate_up=("w1", "w3"),
    down="w2",
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
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "olmoe": OLMOE,
    "granitemoe": GRANITE_MOE,
    "gpt_oss": GPT_OSS,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "qwen3_next": QWEN3_NEXT,
    "granitemoehybrid": GRANITE_HYBRID,
    "lfm2": LFM2,
}
