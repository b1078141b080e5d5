"""Checkpoints that the packages of their formats write: compressed-tensors and gguf, if they are installed.

The packages are no dependency of the tests. `pip install compressed-tensors gguf` lets these run.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from foredraft.models.loading import load_model
from tests.models.test_gguf_model import list_weights, make
from tests.support.gguf_files import describe_model, interleave_pairs

CPU = torch.device("cpu")
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int4": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 16}),
    "int4 with zero points": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False},
    ),
    "float8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
}
GGUF_KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


def compress(model: hf.PreTrainedModel, layout: str, weights: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    """Save a model with weights rounded by compressed-tensors. Returns the matrices that the package decodes."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    apply_quantization_config(model, QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"]))
    meant = {}
    for name, module in model.named_modules():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        weight = module.weight.detach()
        grouped = weight.unflatten(1, (-1, args.group_size or weight.shape[1]))
        scale, zeros = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
        module.weight_scale.data.copy_(scale)
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(zeros)
            zeros = module.weight_zero_point
        meant[f"{name}.weight"] = fake_quantize(weight, module.weight_scale, zeros, args)
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format=layout)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    return meant


@pytest.mark.parametrize("kind", SCHEMES)
def test_weights_of_compressed_tensors_are_those_that_it_decodes(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("compressed_tensors", reason="needs the package compressed-tensors")
    model = make(hf.LlamaForCausalLM, hf.LlamaConfig)
    exact = {name: each.detach().clone() for name, each in model.named_parameters()}
    meant = compress(model, *SCHEMES[kind], tmp_path / "model")
    assert len(meant) == 14
    assert not any(torch.equal(matrix, exact[name]) for name, matrix in meant.items())
    weights = dict(load_model(str(tmp_path / "model"), "float32", CPU).named_parameters())
    for name, matrix in meant.items():
        torch.testing.assert_close(weights[name], matrix, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_weights_of_a_file_by_gguf_are_those_that_it_decodes(tmp_path: Path, kind: str) -> None:
    gguf = pytest.importorskip("gguf", reason="needs the package gguf")
    model = make(hf.LlamaForCausalLM, hf.LlamaConfig)
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    for key, value in describe_model(model, "llama").items():
        if key != "general.architecture":
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    meant, rounded = {}, gguf.GGMLQuantizationType[kind]
    for key, weight in list_weights(model).items():
        heads = 4 if ".attn_q." in key else 2 if ".attn_k." in key else 0
        array = (interleave_pairs(weight, heads) if heads else weight).detach().numpy()
        if array.ndim == 1:
            writer.add_tensor(key, array)
            continue
        data = gguf.quants.quantize(array, rounded)
        writer.add_tensor(key, data, raw_dtype=rounded)
        meant[key] = torch.from_numpy(gguf.quants.dequantize(data, rounded))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = list_weights(load_model(str(tmp_path / "tiny.gguf"), "float32", CPU))
    assert len(meant) == 16
    for key, matrix in meant.items():
        heads = 4 if ".attn_q." in key else 2 if ".attn_k." in key else 0
        torch.testing.assert_close(interleave_pairs(found[key], heads) if heads else found[key], matrix, rtol=0, atol=0)
