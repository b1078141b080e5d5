"""Small random models with recurrent layers, by family: state spaces, linear attention, short convolutions."""

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import transformers as hf

from foredraft.models.hf import HFModel
from tests.support.families import EXACT, EXPERTS, TINY, VOCAB

PAIR = ["linear_attention", "full_attention"]
STATE_SPACE = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "conv_kernel": 4,
    "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8}
DELTA = {
    "head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "layer_types": PAIR,
}  # fmt: skip
MOE = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, **EXPERTS}
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "linear_head_dim": 8, "linear_num_heads": 4, "moe_intermediate_size": 16,
}  # fmt: skip
JAMBA = {
    "use_mamba_kernels": False, "mamba_d_state": 4, "mamba_dt_rank": 4, "num_experts": 2, "attn_layer_period": 2,
    "attn_layer_offset": 1, **EXPERTS,
}  # fmt: skip


def _configure(config: str, *parts: dict[str, Any], without: tuple[str, ...] = (), **more: Any) -> Callable[[], Any]:
    values: dict[str, Any] = {"num_hidden_layers": 2}
    for part in (*parts, more):
        values |= part
    return lambda: getattr(hf, config)(**{key: value for key, value in values.items() if key not in without})


HYBRIDS: dict[str, Callable[[], Any]] = {
    "mamba": _configure("MambaConfig", STATE_SPACE, time_step_rank=4),
    "mamba2": _configure("Mamba2Config", STATE_SPACE, num_heads=4, head_dim=16, n_groups=2, chunk_size=8),
    "falcon_mamba": _configure("FalconMambaConfig", STATE_SPACE, time_step_rank=4),
    "jamba": _configure("JambaConfig", TINY, JAMBA, num_hidden_layers=2, num_experts_per_tok=1),
    "bamba": _configure("BambaConfig", TINY, MAMBA, num_hidden_layers=2, attn_layer_indices=[1]),
    "granitemoehybrid": _configure(
        "GraniteMoeHybridConfig", TINY, MAMBA, num_hidden_layers=2, layer_types=PAIR, num_local_experts=2,
        shared_intermediate_size=16, **EXPERTS,
    ),
    "falcon_h1": _configure("FalconH1Config", TINY, MAMBA, num_hidden_layers=2, mamba_d_ssm=64),
    "nemotron_h": _configure(
        "NemotronHConfig", TINY, without=("num_hidden_layers",), layers_block_type=[*PAIR, "mlp"], ssm_state_size=8,
        mamba_num_heads=4, mamba_head_dim=16, n_groups=2, chunk_size=8, head_dim=8, moe_intermediate_size=16,
    ),
    "zamba": _configure(
        "ZambaConfig", TINY, without=("attention_hidden_size",), num_hidden_layers=4, attn_layer_period=2,
        attn_layer_offset=1, n_mamba_heads=2, mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False,
        num_key_value_heads=4,
    ),
    "zamba2": _configure(
        "Zamba2Config", TINY, num_hidden_layers=4, layers_block_type=["linear_attention", "hybrid"] * 2,
        mamba_d_state=8, n_mamba_heads=4, mamba_ngroups=2, chunk_size=8, adapter_rank=4, num_key_value_heads=4,
        num_mem_blocks=1,
    ),
    "qwen3_next": _configure("Qwen3NextConfig", TINY, DELTA, MOE, num_hidden_layers=2),
    "qwen3_5": _configure("Qwen3_5TextConfig", TINY, DELTA, num_hidden_layers=2),
    "qwen3_5_moe": _configure("Qwen3_5MoeTextConfig", TINY, DELTA, MOE, num_hidden_layers=2),
    "olmo_hybrid": _configure("OlmoHybridConfig", TINY, DELTA, num_hidden_layers=2),
    "lara_mini": _configure("LaraMiniConfig", TINY, DELTA, MOE, num_hidden_layers=2),
    "kimi_linear": _configure(
        "KimiLinearConfig", TINY, LATENT, num_hidden_layers=2, layer_types=PAIR, num_experts=4,
        num_experts_per_token=2, experts_implementation="eager", mlp_layer_types=["dense", "sparse"],
    ),
    "bailing_hybrid": _configure(
        "BailingHybridConfig", TINY, LATENT, num_hidden_layers=2, layer_types=PAIR, num_experts=4,
        num_experts_per_token=2, num_expert_group=1, topk_group=1, experts_implementation="eager",
        mlp_layer_types=["dense", "sparse"],
    ),
    "lfm2": _configure("Lfm2Config", TINY, num_hidden_layers=2, layer_types=["conv", "full_attention"]),
    "lfm2_moe": _configure(
        "Lfm2MoeConfig", TINY, MOE, without=("shared_expert_intermediate_size",), num_hidden_layers=2,
        layer_types=["conv", "full_attention"], num_dense_layers=1,
    ),
    "lfm3": _configure(
        "Lfm3Config", TINY, num_hidden_layers=3, head_dim=8, sliding_window=6,
        layer_types=["conv", "sliding_attention", "full_attention"],
    ),
    "minimax": _configure(
        "MiniMaxConfig", TINY, num_hidden_layers=2, head_dim=8, layer_types=PAIR, num_local_experts=2, block_size=8,
        **EXPERTS,
    ),
    "zaya": _configure(
        "ZayaConfig", TINY, num_hidden_layers=2, head_dim=8, num_experts=4, moe_intermediate_size=16,
        router_hidden_size=8, layer_types=["hybrid", "hybrid"], experts_implementation="eager",
    ),
}  # fmt: skip

# Families whose states or attention cannot be served, so that they compute whole sequences.
WHOLE_HYBRIDS: dict[str, Callable[[], Any]] = {
    "rwkv": _configure("RwkvConfig", STATE_SPACE, attention_hidden_size=32, without=("state_size", "conv_kernel")),
    "xlstm": _configure("xLSTMConfig", STATE_SPACE, num_heads=2, without=("state_size", "conv_kernel")),
    "recurrent_gemma": _configure(
        "RecurrentGemmaConfig", TINY, num_hidden_layers=3, lru_width=32, attention_window_size=64
    ),
    "qwen4_exp": _configure(
        "Qwen4ExpTextConfig", TINY, DELTA, MOE, num_hidden_layers=2, indexer_n_heads=2, indexer_kv_heads=1,
        layer_types=["linear_attention", "indexed_attention"], indexer_head_dim=8, indexer_budget=8, hc_lowrank=4,
        indexer_compress_ratio=4, ple_embed_dim=32, ngram_vocab_size_base=64, split_ngram_parts=4,
    ),
    "inkling": _configure(
        "InklingTextConfig", TINY, num_hidden_layers=2, head_dim=8, layer_types=["hybrid_sliding", "hybrid"],
        swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=8, sliding_window_size=6,
        mlp_layer_types=["dense", "sparse"], moe_intermediate_size=16, n_routed_experts=4, n_shared_experts=1,
        **EXPERTS,
    ),
}  # fmt: skip

# Families whose layers compute in float64 if no module casts to float32 (`Tensor.float`), so that only faults differ.
EXACT_HYBRIDS = (
    "mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "granitemoehybrid", "nemotron_h", "zamba", "zamba2", "lfm2",
    "lfm2_moe", "lfm3", "zaya",
)  # fmt: skip


def make_model(family: str, attention: str = "eager") -> Any:
    """Make the family's model in float64, for transformers."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config((HYBRIDS | WHOLE_HYBRIDS)[family](), attn_implementation=attention)
    model.eval().double().set_attn_implementation(attention)
    model.generation_config.eos_token_id = None  # both sides generate all tokens
    for module in model.modules():
        # transformers clamps the time step of Nemotron-H and Zamba-2 in prompts and not in single tokens.
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))
    return model


@cache
def make_hybrid(family: str) -> tuple[Any, HFModel]:
    """Make the family's model for transformers, and its copy for this package."""
    model = make_model(family, EXACT)
    return model, HFModel.wrap_model(copy.deepcopy(model), family)


def generate_greedily(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Decode with transformers' own `generate`."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return list(out[0].tolist()[len(prompt) :])


WIDE_DELTA = DELTA | {"head_dim": 16}
# Families that run as one native call, with attention heads of width 16; they are float32.
NATIVE_HYBRIDS: dict[str, Callable[[], Any]] = {
    "qwen3_5": _configure("Qwen3_5TextConfig", TINY, WIDE_DELTA, num_hidden_layers=2, hidden_size=64),
    "granitemoehybrid": _configure(
        "GraniteMoeHybridConfig", TINY, MAMBA, num_hidden_layers=2, layer_types=PAIR, num_local_experts=0,
        shared_intermediate_size=48, hidden_size=64, mamba_expand=1,
    ),
    "qwen3_next": _configure("Qwen3NextConfig", TINY, WIDE_DELTA, MOE, num_hidden_layers=2, hidden_size=64),
    "lfm2": _configure(
        "Lfm2Config", TINY, num_hidden_layers=2, layer_types=["conv", "full_attention"], hidden_size=64
    ),
}  # fmt: skip
# Families of transformers' modules with native recurrences.
NATIVE_MIXERS = (
    "mamba2", "bamba", "granitemoehybrid", "falcon_h1", "nemotron_h", "zamba2", "qwen3_next", "qwen3_5", "qwen3_5_moe",
    "lfm2", "lfm2_moe", "lfm3",
)  # fmt: skip


def make_native_model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """Make a model that runs as one native call, for transformers."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(NATIVE_HYBRIDS[family](), attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None  # both sides generate all tokens
    return model.to(dtype)


@cache
def make_native_hybrid(family: str) -> HFModel:
    """Make a model that runs as one native call."""
    lm = HFModel.wrap_model(make_native_model(family), family, is_fused=True)
    assert lm.fused is not None
    return lm
