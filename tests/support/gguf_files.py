"""Writer of GGUF files, by the published format. It shares no code with the reader."""

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

Stored = tuple[int, tuple[int, ...], bytes]  # number of the format, shape as in torch, data
ALIGNMENT = 32
TYPES = {bool: (7, "?"), int: (4, "I"), float: (6, "f")}


def write_gguf(file: Path, metadata: Mapping[str, object], tensors: Mapping[str, Stored]) -> Path:
    """Write a file. Integers are 32 bits wide. Returns the file."""
    out = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    out += [_pack_text(key) + _pack_value(value) for key, value in metadata.items()]
    offset, data = 0, b""
    for name, (kind, shape, content) in tensors.items():
        out.append(_pack_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset))
        data += content + bytes(-len(content) % ALIGNMENT)
        offset = len(data)
    head = b"".join(out)
    file.write_bytes(head + bytes(-len(head) % ALIGNMENT) + data)
    return file


def _pack_text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _pack_value(value: object, has_type: bool = True) -> bytes:
    if isinstance(value, str):
        return (struct.pack("<I", 8) if has_type else b"") + _pack_text(value)
    if isinstance(value, list):
        kind = 8 if isinstance(value[0], str) else TYPES[type(value[0])][0]
        return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(_pack_value(each, False) for each in value)
    kind, form = TYPES[type(value)]
    return (struct.pack("<I", kind) if has_type else b"") + struct.pack(f"<{form}", value)


def store_float32(weight: Tensor) -> Stored:
    return 0, tuple(weight.shape), weight.detach().float().numpy().tobytes()


def store_q8_0(weight: Tensor) -> tuple[Stored, Tensor]:
    """Round [.., k] to Q8_0. Returns it and the weights that it means."""
    blocks = weight.detach().float().reshape(-1, 32)
    scale = (blocks.abs().amax(1, keepdim=True) / 127).half()
    codes = (blocks / scale.float()).round().clamp(-127, 127).to(torch.int8)
    data = np.concatenate([scale.numpy().view(np.uint8), codes.numpy().view(np.uint8)], 1)
    return (8, tuple(weight.shape), data.tobytes()), (codes * scale.float()).view(weight.shape)


def describe_model(model: PreTrainedModel, architecture: str) -> dict[str, object]:
    """Return the metadata that llama.cpp's converter writes for a model of Llama's kind."""
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": width,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    if hasattr(config, "rms_norm_eps"):
        values["attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
    return {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in values.items()}


def interleave_pairs(weight: Tensor, heads: int) -> Tensor:
    """Order rows as llama.cpp rotates them in Llama: row i of the first half of a head, then row i of the second."""
    half = len(weight) // heads // 2
    rows = [head * 2 * half + part * half + i for head in range(heads) for i in range(half) for part in (0, 1)]
    return weight[rows]
