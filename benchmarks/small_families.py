"""Small random models of the families of transformers, in which every mechanism of a family matters."""

from typing import Any

import torch
import transformers

VOCAB, HIDDEN, INNER, HEADS, HEAD_DIM, CONTEXT, WINDOW = 64, 64, 96, 4, 16, 128, 6
SPREAD = 0.2  # standard deviation of what is added to constant parameters
MAX_PARAMETERS = 16_000_000  # of one model; a larger one has parts whose sizes are not listed here
# Sizes by their names in configurations; a configuration gets the names that it has and that are not None.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), VOCAB),
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embed_dim", "embedding_dim", "word_embed_proj_dim"),
        HIDDEN,
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff", "d_inner", "dim_ff", "decoder_ffn_dim",
         "encoder_ffn_dim", "feed_forward_size", "shared_intermediate_size"), INNER
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers",
         "num_encoder_layers", "num_decoder_layers"), 2
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
         "num_encoder_attention_heads", "num_decoder_attention_heads", "swa_num_attention_heads", "linear_num_heads"),
        HEADS,
    ),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(
        ("head_dim", "d_kv", "d_head", "dim_head", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "swa_head_dim",
         "linear_head_dim", "attention_head_size", "index_head_dim"), HEAD_DIM
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "keep_window_size"), CONTEXT),
    **dict.fromkeys(
        ("sliding_window", "sliding_window_size", "attention_chunk_size", "window_size", "index_topk"), WINDOW
    ),
    **dict.fromkeys(("moe_intermediate_size", "kv_lora_rank", "q_lora_rank", "rel_extent", "image_size"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "d_rel", "rotary_dim", "patch_size"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "prompt_length"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "num_mem_blocks"), 1),
    "hidden_size_per_layer_input": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "initializer_range": 0.2, "init_std": 0.2, "is_decoder": True,
    "use_sliding_window": True, "max_window_layers": 1,
}  # fmt: skip
LAYER_KINDS = ("layer_types", "mlp_layer_types")  # kinds by layer; a small model has one layer of each kind
# Changes of SIZES, tried in turn. None leaves the default of the family.
VARIANTS: tuple[dict[str, Any], ...] = tuple(
    change | kinds
    for kinds in ({}, dict.fromkeys(LAYER_KINDS))
    for change in (
        {},
        {"num_key_value_heads": HEADS},
        {"num_key_value_heads": HEADS, "head_dim": None},
        {"head_dim": None},
    )
)
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
# Two layers of which the last ones read the keys of earlier ones.
SHARED = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}  # a cache without attention has no length
INDEXED = {
    "layer_types": ["linear_attention", "indexed_attention"], "indexer_n_heads": 2, "indexer_kv_heads": 1,
    "indexer_head_dim": HEAD_DIM, "indexer_budget": 8, "indexer_compress_ratio": 4, "hc_lowrank": 4,
    "ple_embed_dim": HIDDEN, "ngram_vocab_size_base": 64, "split_ngram_parts": 4,
}  # fmt: skip
# What a family needs beside SIZES, whether or not it has a default. A dict by the name of a part is for that part.
SPECIAL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "blt": {
        "encoder_hash_byte_group_vocab": 50,
        "encoder_config": {"hidden_size_global": HIDDEN},
        "decoder_config": {"hidden_size_global": HIDDEN},
    },
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "gemma3n_text": SHARED,
    "gemma4_text": SHARED,
    "granitemoehybrid": MAMBA | HYBRID,
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 8},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
                            for kind in ("sliding_attention", "full_attention")},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "ministral": {"head_dim": HEAD_DIM},
    "mllama": {"text_config": {"cross_attention_layers": [1]}},
    "moshi": {"sliding_window": CONTEXT},  # generate() drops keys outside it that the model's own pass sees
    "nemotron": {"num_key_value_heads": 2},
    # transformers clamps the time step of these in prompts and not in single tokens
    "nemotron_h": {"time_step_min": 1e-9},
    "kimi_linear": HYBRID,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "qwen3_5": {"text_config": HYBRID},
    "qwen3_5_moe": {"text_config": HYBRID},
    "qwen3_5_moe_text": HYBRID,
    "qwen3_5_text": HYBRID,
    "qwen3_next": HYBRID,
    "qwen4_exp": {"text_config": INDEXED},
    "qwen4_exp_text": INDEXED,
    "reformer": {"axial_pos_shape": [8, 16], "axial_pos_embds_dim": [16, 48], "attn_layers": ["local", "lsh"],
                 "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "num_buckets": 2},
    "roc_bert": {"pronunciation_vocab_size": 16, "shape_vocab_size": 16, "pronunciation_embed_dim": 8,
                 "shape_embed_dim": 8},
    "zamba": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "time_step_min": 1e-9},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def make_model(family: str, is_seq2seq: bool = False) -> Any:
    """Make a small random model of a family.

    Args:
        family: model type in transformers.
        is_seq2seq: whether to make an encoder-decoder model. Default False.

    Raises:
        Exception: the family objects to all sizes, in any way; the error of the first.
    """
    errors = []
    for variant in VARIANTS:
        try:
            return _make_variant(family, is_seq2seq, variant)
        except TimeoutError:
            raise
        except Exception as error:  # a family may object to these sizes in any way
            errors.append(error)
    raise errors[0]


def _make_variant(family: str, is_seq2seq: bool, variant: dict[str, Any]) -> Any:
    kind = transformers.AutoModelForSeq2SeqLM if is_seq2seq else transformers.AutoModelForCausalLM
    default = transformers.CONFIG_MAPPING[family]()
    changed = SIZES | dict.fromkeys(LAYER_KINDS, ()) | variant
    sizes = {name: value for name, value in changed.items() if value is not None}
    if is_seq2seq:
        del sizes["is_decoder"]
    with torch.device("meta"):
        count = sum(p.numel() for p in kind.from_config(_shrink(default, sizes, SPECIAL.get(family, {}))).parameters())
    if count > MAX_PARAMETERS:
        raise ValueError(f"it has {count} parameters at these sizes")
    torch.manual_seed(0)
    model = kind.from_config(_shrink(default, sizes, SPECIAL.get(family, {}))).eval().float()
    for parameter in model.parameters():
        if parameter.numel() > 1 and parameter.std() == 0:  # zeros or ones would leave a mechanism without effect
            parameter.data += SPREAD * torch.randn_like(parameter)
    return model


def _shrink(config: Any, sizes: dict[str, Any], special: dict[str, Any]) -> Any:
    """Make a configuration like `config` and its parts, with the sizes that they have."""
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    shrunk = {
        name: _shrink(part, sizes, special.get(name, {})).to_dict()
        for name, part in parts.items()
        if hasattr(part, "to_dict")
    }
    stored = config.to_dict()
    if stored.get("kv_lora_rank") is not None:  # latent attention has as many key heads as query heads
        sizes = sizes | {"num_key_value_heads": HEADS}
    names = set(stored) | set(config.attribute_map)
    own = {name: value for name, value in sizes.items() if name in names and _has_number(config, name)}
    own |= _choose_layer_kinds({name: stored[name] for name in LAYER_KINDS if name in sizes and stored.get(name)})
    return type(config)(**own | {name: value for name, value in special.items() if name not in parts} | shrunk)


def _choose_layer_kinds(kinds: dict[str, list[str]]) -> dict[str, Any]:
    """Choose few layers in which every kind of the full model occurs; nothing for a model with one kind."""
    distinct = {name: list(dict.fromkeys(values)) for name, values in kinds.items()}
    count = max([2, *map(len, distinct.values())])
    if all(len(values) == 1 for values in distinct.values()):
        return {}
    layers = {name: [values[i % len(values)] for i in range(count)] for name, values in distinct.items()}
    return layers | {"num_hidden_layers": count}


def _has_number(config: Any, name: str) -> bool:
    """Whether an entry of a configuration has one value for all layers."""
    try:
        value = getattr(config, name, None)
    except Exception:  # a value for each layer, of which the class makes one if it gets one
        return True
    return value is not None and (name.endswith("_token_id") or not isinstance(value, list | tuple | dict))
