"""Decoding of a GGUF file to a transformers configuration and weights of a floating type."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from foredraft.errors import ForedraftError
from foredraft.files.gguf import GgufHeader, GgufTensor, read_gguf_header
from foredraft.models.gguf_blocks import decode_blocks
from foredraft.models.gguf_families import GGUF_FAMILIES, GgufFacts, GgufFamily, make_config_values
from foredraft.models.widening import DecodedModel

CHUNK_WEIGHTS = 1 << 22  # weights decoded at a time
FLOAT_FORMATS = ("F32", "F16", "BF16")
FREQUENCY_FACTORS = "rope_freqs.weight"  # divisors of the rotary frequencies
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS)
# Llama 3.1 and its successors; files hold only the divisors that follow from these numbers and a factor.
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
TENSOR_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


def decode_gguf(file: Path, dtype: torch.dtype | str, name: str, processes: int = 1) -> DecodedModel:
    """Decode a GGUF file.

    Args:
        file: GGUF file.
        dtype: floating type of the result; "auto" = float32 if every weight has it, else bfloat16.
        name: name of the model in errors.
        processes: processes that share the model. Default 1.

    Raises:
        ForedraftError: the file is damaged, its architecture or a format is not read, or there are several processes.
    """
    if processes > 1:
        raise ForedraftError(
            f"{name} is a GGUF file, which one process reads; use tensor_parallel_size=1, or the folder"
        )
    header = read_gguf_header(file, name)
    family = GGUF_FAMILIES.get(header.architecture)
    if family is None:
        raise ForedraftError(
            f"{name}: GGUF files of the architecture {header.architecture!r} are not read (only "
            f"{', '.join(GGUF_FAMILIES)}); give the folder of the safetensors model that it was made from"
        )
    if "token_embd.weight" not in header.tensors:
        raise ForedraftError(f"{name} has no embedding, so it is not a whole model; give the GGUF file of the model")
    keys = {key: _rename_tensor(key, family, name) for key in header.tensors if key not in ROPE_TENSORS}
    config = _make_config(header, family, name)
    formats = {tensor.format.name for tensor in header.tensors.values()}
    if not isinstance(dtype, torch.dtype):  # float16 is slow and inexact on the CPU
        dtype = torch.float32 if formats == {"F32"} else torch.bfloat16
    weights = {}
    for key, tensor in header.tensors.items():
        if key in keys:
            decoded = _convert(
                _read_tensor(file, tensor, dtype, family.adds_one_to_norms and "norm" in key), family, key, config
            )
            weights[keys[key]] = decoded
    count = sum(tensor.format.name not in FLOAT_FORMATS for tensor in header.tensors.values())
    kind = "GGUF " + ", ".join(sorted(formats - set(FLOAT_FORMATS)))
    return DecodedModel(config, weights, dtype, kind, count, file.stat().st_size)


def _rename_tensor(key: str, family: GgufFamily, name: str) -> str:
    """Return the name of a tensor in transformers."""
    match = TENSOR_NAME.fullmatch(key)
    names = {} if match is None else family.top_names if match[1] is None else family.layer_names
    if match is None or match[2] not in names:
        raise ForedraftError(f"{name}: models of type {family.model_type} have no tensor {key}; give the folder")
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{names[match[2]]}.{match[3]}"


def _make_config(header: GgufHeader, family: GgufFamily, name: str) -> Any:
    """Make the transformers configuration."""
    values = make_config_values(GgufFacts(header, name), family)
    if values["num_hidden_layers"] > len(header.tensors):
        raise ForedraftError(
            f"{name}: its metadata says {values['num_hidden_layers']} layers, and it has fewer tensors"
        )
    if LONG_FACTORS in header.tensors:
        factors = {key: _read_numbers(header, key) for key in (LONG_FACTORS, SHORT_FACTORS)}
        values["rope_parameters"] |= {
            "rope_type": "longrope", "long_factor": factors[LONG_FACTORS], "short_factor": factors[SHORT_FACTORS],
            "original_max_position_embeddings": values["original_max_position_embeddings"],
        }  # fmt: skip
    if FREQUENCY_FACTORS in header.tensors:
        factor = max(_read_numbers(header, FREQUENCY_FACTORS))
        values["rope_parameters"] |= {"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}
    config = AutoConfig.for_model(family.model_type, **values)
    if FREQUENCY_FACTORS in header.tensors:
        _check_frequencies(config, _read_numbers(header, FREQUENCY_FACTORS), name)
    return config


def _check_frequencies(config: Any, divisors: list[float], name: str) -> None:
    """Compare the rotary frequencies of a configuration with the divisors of a file."""
    rope = config.rope_parameters
    plain = rope["rope_theta"] ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    if not torch.allclose(plain / torch.tensor(divisors), frequencies, rtol=1e-4):
        raise ForedraftError(f"{name}: its rotary divisors are not those of Llama 3; give the folder")


def _read_numbers(header: GgufHeader, key: str) -> list[float]:
    return _read_tensor(header.file, header.tensors[key], torch.float32, False).tolist()


def _read_tensor(file: Path, tensor: GgufTensor, dtype: torch.dtype, subtracts_one: bool) -> Tensor:
    """Read and decode a tensor in chunks."""
    out = torch.empty(tensor.shape, dtype=dtype).flatten()
    form, chunk = tensor.format, CHUNK_WEIGHTS // tensor.format.weights
    blocks = out.numel() // form.weights
    for first in range(0, blocks, chunk):
        count = min(chunk, blocks - first)
        data = np.fromfile(file, np.uint8, count * form.size, offset=tensor.start + first * form.size)
        decoded = decode_blocks(form.name, torch.from_numpy(data).view(count, form.size)).flatten()
        start = first * form.weights
        out[start : start + len(decoded)] = decoded - 1 if subtracts_one else decoded
    return out.view(tensor.shape)


def _convert(weight: Tensor, family: GgufFamily, key: str, config: Any) -> Tensor:
    """Order the rows of query and key as transformers does: the first halves of all pairs, then the second ones."""
    if not family.interleaves_heads or not re.search(r"\.attn_[qk]\.", key):
        return weight
    heads = config.num_attention_heads if ".attn_q." in key else config.num_key_value_heads
    return weight.view(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
