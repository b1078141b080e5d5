"""Families of models in GGUF files: names of tensors and the transformers configuration of the metadata."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from foredraft.errors import ForedraftError
from foredraft.files.gguf import GgufHeader

ROPE_THETA = 10000.0  # if a file names none
GEMMA2_27B_LAYERS = 46  # llama.cpp knows this model by its layers; it scales attention by another width
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")  # tokens that end a reply in llama.cpp
TOKEN_KEYS = (*END_KEYS, "bos_token_id", "padding_token_id")
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION_NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm",
}  # fmt: skip
LLAMA_NAMES = ATTENTION_NAMES | {
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}  # fmt: skip


@dataclass(frozen=True)
class GgufFacts:
    """Metadata of the model in a file, by keys without the name of the architecture."""

    header: GgufHeader
    name: str  # name of the file in errors

    def read(self, key: str) -> Any:
        """Read a value. Raises ForedraftError without it."""
        value = self.find(key)
        if value is None:
            full = f"{self.header.architecture}.{key}"
            raise ForedraftError(f"{self.name}: its metadata lacks {full}; fetch the file again, or convert it again")
        return value

    def find(self, key: str, default: Any = None) -> Any:
        return self.header.metadata.get(f"{self.header.architecture}.{key}", default)

    def has_tensor(self, name: str) -> bool:
        return name in self.header.tensors

    @property
    def head_width(self) -> int:
        """Width of an attention head."""
        return int(
            self.find("attention.key_length", self.read("embedding_length") // self.read("attention.head_count"))
        )


@dataclass(frozen=True)
class GgufFamily:
    """Family of models: what differs between its tensors in a file and in transformers."""

    model_type: str
    layer_names: Mapping[str, str]
    make_settings: Callable[[GgufFacts], dict[str, Any]]  # of the configuration, besides the common ones
    top_names: Mapping[str, str] = field(default_factory=lambda: TOP_NAMES)
    interleaves_heads: bool = False  # rows of query and key are in pairs that rotate together
    adds_one_to_norms: bool = False


def make_config_values(facts: GgufFacts, family: GgufFamily) -> dict[str, Any]:
    """Make the values of the transformers configuration of a file.

    Args:
        facts: metadata of the file.
        family: its family.

    Raises:
        ForedraftError: a value is missing, or describes a mechanism that is not read.
    """
    if facts.find("expert_count", 0):
        raise ForedraftError(f"{facts.name} has experts, and GGUF files of such models are not read; give the folder")
    tokens = {key: facts.header.metadata.get(f"tokenizer.ggml.{key}") for key in TOKEN_KEYS}
    end_ids = [tokens[key] for key in END_KEYS if tokens[key] is not None]
    return {
        "vocab_size": facts.header.tensors["token_embd.weight"].shape[0],
        "hidden_size": facts.read("embedding_length"),
        "intermediate_size": facts.read("feed_forward_length"),
        "num_hidden_layers": facts.read("block_count"),
        "num_attention_heads": facts.read("attention.head_count"),
        "num_key_value_heads": facts.find("attention.head_count_kv", facts.read("attention.head_count")),
        "max_position_embeddings": facts.read("context_length"),
        "rope_parameters": _make_rope(facts),
        "tie_word_embeddings": not facts.has_tensor("output.weight"),
        "bos_token_id": tokens["bos_token_id"],
        "eos_token_id": end_ids[0] if len(end_ids) == 1 else list(dict.fromkeys(end_ids)) or None,
        "pad_token_id": tokens["padding_token_id"],
        **family.make_settings(facts),
    }


def _make_rope(facts: GgufFacts) -> dict[str, Any]:
    """Make the rotary parameters of the metadata. Factors in tensors are added later."""
    kind, theta = facts.find("rope.scaling.type", "none"), facts.find("rope.freq_base", ROPE_THETA)
    width = facts.find("rope.dimension_count", facts.head_width)
    rope = {"rope_type": "default", "rope_theta": theta}
    if width != facts.head_width:
        rope["partial_rotary_factor"] = width / facts.head_width
    if kind in ("none", "longrope") or facts.find("rope.scaling.factor", 1.0) == 1.0:
        return rope
    if kind not in ("linear", "yarn"):
        raise ForedraftError(f"{facts.name}: rotary positions of kind {kind!r} are not read; give the folder")
    rope |= {"rope_type": kind, "factor": facts.read("rope.scaling.factor")}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = facts.read("rope.scaling.original_context_length")
    return rope


def _make_llama(facts: GgufFacts) -> dict[str, Any]:
    return {
        "rms_norm_eps": facts.read("attention.layer_norm_rms_epsilon"),
        "head_dim": facts.head_width,
        "attention_bias": facts.has_tensor("blk.0.attn_q.bias"),
    }


def _make_qwen2(facts: GgufFacts) -> dict[str, Any]:
    if facts.head_width * facts.read("attention.head_count") != facts.read("embedding_length"):
        raise ForedraftError(f"{facts.name}: heads of width {facts.head_width} do not fit Qwen2; give the folder")
    return {"rms_norm_eps": facts.read("attention.layer_norm_rms_epsilon")}


def _make_gemma2(facts: GgufFacts) -> dict[str, Any]:
    is_largest = facts.read("block_count") == GEMMA2_27B_LAYERS
    scale = facts.read("embedding_length") // facts.read("attention.head_count") if is_largest else facts.head_width
    return {
        "rms_norm_eps": facts.read("attention.layer_norm_rms_epsilon"),
        "head_dim": facts.head_width,
        "query_pre_attn_scalar": scale,
        "sliding_window": facts.read("attention.sliding_window"),
        "attn_logit_softcapping": facts.read("attn_logit_softcapping"),
        "final_logit_softcapping": facts.read("final_logit_softcapping"),
    }


def _make_phi3(facts: GgufFacts) -> dict[str, Any]:
    return {
        "rms_norm_eps": facts.read("attention.layer_norm_rms_epsilon"),
        "sliding_window": facts.find("attention.sliding_window"),
        "original_max_position_embeddings": facts.find("rope.scaling.original_context_length"),
    }


def _make_phi(facts: GgufFacts) -> dict[str, Any]:
    return {"layer_norm_eps": facts.read("attention.layer_norm_epsilon")}


# Families by the name of the architecture in a file.
GGUF_FAMILIES = {
    "llama": GgufFamily("llama", LLAMA_NAMES, _make_llama, interleaves_heads=True),
    "qwen2": GgufFamily("qwen2", LLAMA_NAMES, _make_qwen2),
    "qwen3": GgufFamily(
        "qwen3",
        LLAMA_NAMES | {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
        _make_llama,
    ),
    "gemma2": GgufFamily(
        "gemma2",
        LLAMA_NAMES
        | {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        _make_gemma2,
        adds_one_to_norms=True,
    ),
    "phi3": GgufFamily(
        "phi3", LLAMA_NAMES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}, _make_phi3
    ),
    "phi2": GgufFamily(
        "phi",
        ATTENTION_NAMES | {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        _make_phi,
        TOP_NAMES | {"output_norm": "model.final_layernorm"},
    ),
}  # fmt: skip
