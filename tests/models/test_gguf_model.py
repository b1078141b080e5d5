"""GGUF files as models: families, rotary factors, tokenizers, and damaged files."""

import logging
from pathlib import Path

import pytest
import torch
import transformers as hf
from torch import Tensor

from foredraft import LLM, Sampling
from foredraft.errors import ForedraftError
from foredraft.models.loading import load_model, load_tokenizer
from tests.support import tiny_models
from tests.support.gguf_files import (
    Stored,
    describe_model,
    interleave_pairs,
    store_float32,
    store_q8_0,
    write_gguf,
)

CPU = torch.device("cpu")
IDS = torch.arange(1, 21)[None]
SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3, "bos_token_id": 1,
    "eos_token_id": 3, "pad_token_id": None,
}  # fmt: skip
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "model.final_layernorm": "output_norm",
    "lm_head": "output", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.dense": "attn_output", "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.gate_up_proj": "ffn_up", "mlp.fc1": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.fc2": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
GEMMA_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


def rename(key: str, names: dict[str, str]) -> str:
    path, _, suffix = key.rpartition(".")
    if path in names:
        return f"{names[path]}.{suffix}"
    _, _, layer, rest = path.split(".", 3)
    return f"blk.{layer}.{names[rest]}.{suffix}"


def list_weights(model: hf.PreTrainedModel, names: dict[str, str] = NAMES) -> dict[str, Tensor]:
    """List the weights under the names of a GGUF file."""
    is_tied = model.config.tie_word_embeddings
    return {rename(key, names): each for key, each in model.state_dict().items() if not (is_tied and "lm_head" in key)}


def save(folder: Path, metadata: dict[str, object], weights: dict[str, Tensor]) -> str:
    return str(write_gguf(folder / "tiny.gguf", metadata, {key: store_float32(each) for key, each in weights.items()}))


def make(kind: type, config: type, **values: object) -> hf.PreTrainedModel:
    torch.manual_seed(0)
    model = kind(config(**(SIZES | values))).eval()
    with torch.no_grad():  # norms and biases start as ones and zeros
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn(parameter.shape)
    return model


def save_llama(
    folder: Path, metadata: dict[str, object] | None = None, **values: object
) -> tuple[str, hf.PreTrainedModel]:
    model = make(hf.LlamaForCausalLM, hf.LlamaConfig, **values)
    weights = list_weights(model)
    for key in weights:
        if ".attn_q." in key or ".attn_k." in key:
            weights[key] = interleave_pairs(weights[key], 4 if ".attn_q." in key else 2)
    more: dict[str, object] = {"tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.bos_token_id": 1}
    return save(folder, describe_model(model, "llama") | more | (metadata or {}), weights), model


def save_qwen2(folder: Path) -> tuple[str, hf.PreTrainedModel]:
    model = make(hf.Qwen2ForCausalLM, hf.Qwen2Config, tie_word_embeddings=True)
    return save(folder, describe_model(model, "qwen2"), list_weights(model)), model


def save_qwen3(folder: Path) -> tuple[str, hf.PreTrainedModel]:
    model = make(hf.Qwen3ForCausalLM, hf.Qwen3Config, head_dim=32)
    return save(folder, describe_model(model, "qwen3"), list_weights(model)), model


def save_gemma2(folder: Path) -> tuple[str, hf.PreTrainedModel]:
    model = make(hf.Gemma2ForCausalLM, hf.Gemma2Config, head_dim=32, query_pre_attn_scalar=32, sliding_window=8)
    weights = {key: each + 1 if "norm" in key else each for key, each in list_weights(model, GEMMA_NAMES).items()}
    more = {
        "gemma2.attention.sliding_window": 8,
        "gemma2.attn_logit_softcapping": 50.0,
        "gemma2.final_logit_softcapping": 30.0,
    }
    return save(folder, describe_model(model, "gemma2") | more, weights), model


def save_phi3(folder: Path) -> tuple[str, hf.PreTrainedModel]:
    factors = {"long_factor": [1.0 + i for i in range(8)], "short_factor": [1.0 + i / 8 for i in range(8)]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32, **factors}
    model = make(
        hf.Phi3ForCausalLM, hf.Phi3Config, rope_parameters=rope, original_max_position_embeddings=32, sliding_window=16
    )
    metadata = describe_model(model, "phi3")
    metadata |= {"phi3.rope.scaling.original_context_length": 32, "phi3.attention.sliding_window": 16}
    tables = {f"rope_factors_{key.removesuffix('_factor')}.weight": torch.tensor(each) for key, each in factors.items()}
    return save(folder, metadata, list_weights(model) | tables), model


def save_phi2(folder: Path) -> tuple[str, hf.PreTrainedModel]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    model = make(hf.PhiForCausalLM, hf.PhiConfig, num_key_value_heads=4, rope_parameters=rope)
    metadata = describe_model(model, "phi2")
    metadata |= {"phi2.rope.dimension_count": 8, "phi2.attention.layer_norm_epsilon": 1e-5}
    return save(folder, metadata, list_weights(model)), model


FAMILIES = (save_llama, save_qwen2, save_qwen3, save_gemma2, save_phi3, save_phi2)


@pytest.mark.parametrize("save_family", FAMILIES, ids=lambda each: each.__name__)
def test_logits_of_a_family_are_those_of_its_folder(tmp_path: Path, save_family, caplog) -> None:
    name, model = save_family(tmp_path)
    loaded = load_model(name, "auto", CPU)
    assert loaded.dtype is torch.float32
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)
    assert "widened" not in caplog.text


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rotary_divisors_of_llama_3_are_recognised(tmp_path: Path, factor: float) -> None:
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    _, model = save_llama(tmp_path, rope_parameters=rope, head_dim=16)
    weights = list_weights(model)
    frequencies = model.model.rotary_emb.inv_freq
    divisors = 500000.0 ** -(torch.arange(0, 16, 2) / 16) / frequencies
    for key in weights:
        if ".attn_q." in key or ".attn_k." in key:
            weights[key] = interleave_pairs(weights[key], 4 if ".attn_q." in key else 2)
    metadata = describe_model(model, "llama")
    loaded = load_model(save(tmp_path, metadata, weights | {"rope_freqs.weight": divisors}), "auto", CPU)
    torch.testing.assert_close(loaded.model.rotary_emb.inv_freq, frequencies)
    other = save(tmp_path, metadata, weights | {"rope_freqs.weight": divisors.flip(0)})
    with pytest.raises(ForedraftError, match="rotary divisors are not those of Llama 3"):
        load_model(other, "auto", CPU)


def test_a_rounded_file_is_widened_with_a_warning_and_generates(tmp_path: Path, caplog) -> None:
    model = make(hf.Qwen2ForCausalLM, hf.Qwen2Config)
    stored: dict[str, Stored] = {}
    meant = {}
    for key, weight in list_weights(model).items():
        if weight.dim() == 1:
            stored[key], meant[key] = store_float32(weight), weight
        else:
            stored[key], meant[key] = store_q8_0(weight)
    metadata = describe_model(model, "qwen2") | {"tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.eot_token_id": 5}
    name = str(write_gguf(tmp_path / "tiny.Q8_0.gguf", metadata, stored))
    with caplog.at_level(logging.WARNING):
        loaded = load_model(name, "float32", CPU)
    assert all(torch.equal(each, meant[key]) for key, each in list_weights(loaded).items())
    assert "16 matrices of GGUF Q8_0 are widened to float32" in caplog.text
    assert loaded.generation_config.eos_token_id == [3, 5]
    assert load_model(str(tmp_path), "auto", CPU).dtype is torch.bfloat16  # the only file of a folder
    tokens = LLM(name, device="cpu").generate([[1, 2, 4]], Sampling(temperature=0, max_tokens=6))[0].token_ids
    assert (
        tokens
        == LLM(loaded, tokenizer=None, dtype="float32")
        .generate([[1, 2, 4]], Sampling(temperature=0, max_tokens=6))[0]
        .token_ids
    )


def test_the_tokenizer_of_a_file_is_that_of_its_vocabulary(tmp_path: Path) -> None:
    own = tiny_models.tokenizer()
    content = own.backend_tokenizer.model
    vocabulary = own.get_vocab()
    content.save(str(tmp_path))
    merges = (tmp_path / "merges.txt").read_text().splitlines()[1:]
    order = sorted(vocabulary, key=vocabulary.__getitem__)
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": order,
        "tokenizer.ggml.merges": merges, "tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.token_type": [3 if token in ("<end>", "<stop>", "<pad>") else 1 for token in order],
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }  # fmt: skip
    name, _ = save_llama(tmp_path, metadata, vocab_size=len(order))
    tokenizer = load_tokenizer(name, len(order))
    assert len(tokenizer) == len(order)
    for text in ("the end of the end", "größe 東京 🍣 <stop>the"):
        ids = own(text).input_ids
        assert tokenizer(text).input_ids == ids
        assert tokenizer.decode(ids) == own.decode(ids)
    assert tokenizer.eos_token == "<end>"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert load_tokenizer(save_llama(tmp_path)[0]) is None


def test_a_damaged_or_foreign_file_is_refused(tmp_path: Path) -> None:
    name, model = save_llama(tmp_path)
    whole = Path(name).read_bytes()
    for size, message in (
        (10, "cut off within its header"),
        (900, "cut off within"),
        (len(whole) - 64, "is cut off: "),
    ):
        Path(name).write_bytes(whole[:size])
        with pytest.raises(ForedraftError, match=message):
            load_model(name, "auto", CPU)
    Path(name).write_bytes(b"")
    with pytest.raises(ForedraftError, match="no GGUF file"):
        load_model(name, "auto", CPU)
    weights = list_weights(model)
    described = describe_model(model, "llama")
    cases: list[tuple[dict[str, object], dict[str, Tensor], str]] = [
        (describe_model(model, "mamba"), weights, r"architecture 'mamba' are not read \(only llama, "),
        (described | {"llama.expert_count": 8}, weights, "has experts"),
        (described | {"split.count": 3}, weights, "one of 3 parts; join them"),
        (described | {"llama.rope.scaling.type": "odd", "llama.rope.scaling.factor": 2.0}, weights, "kind 'odd'"),
        (described | {"llama.block_count": 2**31}, weights, "layers, and it has fewer tensors"),
        (described | {"llama.embedding_length": 128}, weights, "its metadata makes it"),
        (described, weights | {"blk.0.attn_sinks.weight": torch.ones(4)}, "have no tensor blk.0.attn_sinks.weight"),
        ({k: v for k, v in described.items() if "block_count" not in k}, weights, "lacks llama.block_count"),
        (described, {k: v for k, v in weights.items() if "1.ffn_up" not in k}, "lack model.layers.1.mlp.up_proj"),
    ]
    for metadata, tensors, message in cases:
        with pytest.raises(ForedraftError, match=message) as caught:
            load_model(save(tmp_path, metadata, tensors), "auto", CPU)
        assert "\n" not in str(caught.value)
    write_gguf(tmp_path / "tiny.gguf", described, {"token_embd.weight": (19, (64, 64), bytes(4096))})
    with pytest.raises(ForedraftError, match=r"GGUF format number 19, and only .*Q4_K.* are decoded"):
        load_model(name, "auto", CPU)
    (tmp_path / "other.gguf").write_bytes(whole)
    with pytest.raises(ForedraftError, match=r"holds 2 GGUF files; give one of them, such as .*other\.gguf"):
        load_model(str(tmp_path), "auto", CPU)
