"""Conversion of a Hugging Face folder of a Llama to a GGUF file for llama.cpp. It needs the `gguf` package."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

# Module name without "model.layers.N." -> name of the tensor in a GGUF file.
GGUF_TENSOR_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Dtype in a safetensors header -> dtype of numpy, which has no bfloat16.
_NUMPY_DTYPES: dict[str, Any] = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
DEFAULT_ROPE_THETA = 10000.0  # of a Llama configuration without a value


def convert(folder: Path, out: Path, dtype: str) -> None:
    """Convert the model in `folder` and write the file `out`.

    Args:
        folder: folder with config.json, safetensors files and optionally tokenizer.json.
        out: GGUF file.
        dtype: bfloat16 or float32, for matrices; norms are float32.

    Raises:
        ValueError: the architecture or a dtype is not supported.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    _check_config(config)
    writer = gguf.GGUFWriter(str(out), "llama")
    _write_metadata(writer, config, dtype)
    _add_tokens(writer, folder, config)
    for name, values in _read_tensors(folder):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue  # llama.cpp uses the embeddings if there is no output matrix
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            is_query = name.endswith("q_proj.weight")
            values = _interleave_rows(values, config["num_attention_heads" if is_query else "num_key_value_heads"])
        if values.ndim == 1 or dtype == "float32":
            writer.add_tensor(_rename_tensor(name), values)
        else:
            halves = _to_bfloat16(values)
            writer.add_tensor(_rename_tensor(name), halves.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _check_config(config: dict[str, Any]) -> None:
    if config["model_type"] != "llama" or config.get("attention_bias") or config.get("mlp_bias"):
        raise ValueError(f"only Llama models without biases are converted, and this is {config['model_type']!r}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rotary positions of type {rope['rope_type']!r} are not converted")


def _write_metadata(writer: Any, config: dict[str, Any], dtype: str) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    writer.add_name("benchmark")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta") or DEFAULT_ROPE_THETA)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    kind = gguf.LlamaFileType.ALL_F32 if dtype == "float32" else gguf.LlamaFileType.MOSTLY_BF16
    writer.add_file_type(kind)


def _add_tokens(writer: Any, folder: Path, config: dict[str, Any]) -> None:
    """Add a byte-level BPE vocabulary. Any other vocabulary is omitted, as prompts are token ids."""
    file = folder / "tokenizer.json"
    data = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    model = data.get("model", {})
    if model.get("type") != "BPE":
        writer.add_tokenizer_model("none")
        return
    token_texts = {i: token for token, i in model["vocab"].items()}
    special_tokens = {token["id"]: token["content"] for token in data.get("added_tokens", [])}
    token_texts |= special_tokens
    tokens = [token_texts.get(i, f"[unused {i}]") for i in range(config["vocab_size"])]
    normal, control, unused = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL, gguf.TokenType.UNUSED
    kinds = [control if i in special_tokens else normal if i in token_texts else unused for i in range(len(tokens))]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    for add, key in ((writer.add_bos_token_id, "bos_token_id"), (writer.add_eos_token_id, "eos_token_id")):
        if isinstance(config.get(key), int):
            add(config[key])


def _read_tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Read every tensor of a folder as float32; yield (name, values)."""
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
        data = np.memmap(file, dtype=np.uint8, mode="r", offset=8 + size)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in _NUMPY_DTYPES:
                raise ValueError(f"{name} is stored as {entry['dtype']}, which is not converted")
            begin, end = entry["data_offsets"]
            yield name, _to_float32(data[begin:end].view(_NUMPY_DTYPES[entry["dtype"]]).reshape(entry["shape"]))


def _to_float32(values: Any) -> Any:
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def _to_bfloat16(values: Any) -> Any:
    """Round float32 to bits of bfloat16, to nearest, ties to even; exact for values that were bfloat16."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _interleave_rows(values: Any, heads: int) -> Any:
    """Interleave the halves of every head: llama.cpp rotates neighbouring rows, transformers one row of each half."""
    rows, columns = values.shape
    pairs = values.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2)
    return np.ascontiguousarray(pairs).reshape(rows, columns)


def _rename_tensor(name: str) -> str:
    parts = name.removesuffix(".weight").split(".")
    if parts[:2] == ["model", "layers"]:
        return f"blk.{parts[2]}.{GGUF_TENSOR_NAMES['.'.join(parts[3:])]}.weight"
    return f"{GGUF_TENSOR_NAMES['.'.join(parts)]}.weight"
