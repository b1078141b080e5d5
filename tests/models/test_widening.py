"""Checkpoints of GPTQ, AWQ and compressed-tensors on the CPU: decoded weights, kernels and refusals.

The packages that write these checkpoints are not in the environment. The packers below follow the published layouts
number by number, and share no code with the decoder.
"""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor

from foredraft import LLM, Sampling
from foredraft.errors import ForedraftError
from foredraft.kernels.quantize import unpack
from foredraft.models.hf import get_packed_weights
from foredraft.models.loading import load_model
from foredraft.models.native.packing import interleave_rows
from tests.support import tiny_models

CPU = torch.device("cpu")
GROUP = 16
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # output in each nibble, lowest first
Packed = tuple[dict[str, Tensor], Tensor]  # stored parts, and the matrix that they mean


def pack_rows(numbers: Tensor, bits: int, columns: tuple[int, ...] | None = None) -> Tensor:
    """Pack unsigned [r, c] to int32 [r, c * bits / 32]."""
    count = 32 // bits
    order = columns or tuple(range(count))
    rows = []
    for row in numbers.tolist():
        words = [sum(row[start + order[i]] << bits * i for i in range(count)) for start in range(0, len(row), count)]
        rows.append([word - 2**32 if word >= 2**31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def make_numbers(shape: tuple[int, ...], low: int, high: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(sum(shape)))


def make_scales(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))).add(0.5).div(200).half()


def pack_gptq(n: int, k: int, bits: int = 4, offset: int = 1, is_shuffled: bool = False) -> Packed:
    codes, groups = make_numbers((n, k), 0, 1 << bits), k // GROUP
    zeros, scales = make_numbers((groups, n), 1, (1 << bits) - 1), make_scales(groups, n)
    index = torch.arange(k) // GROUP
    if is_shuffled:
        index = index[torch.randperm(k, generator=torch.Generator().manual_seed(1))]
    parts = {
        "qweight": pack_rows(codes, bits).T.contiguous(),
        "qzeros": pack_rows(zeros - offset, bits),
        "scales": scales,
        "g_idx": index.int(),
    }
    return parts, (codes - zeros[index].T) * scales[index].T.float()


def pack_awq(n: int, k: int) -> Packed:
    codes, zeros, scales = make_numbers((k, n), 0, 16), make_numbers((k // GROUP, n), 0, 16), make_scales(k // GROUP, n)
    index = torch.arange(k) // GROUP
    parts = {"qweight": pack_rows(codes, 4, AWQ_COLUMNS), "qzeros": pack_rows(zeros, 4, AWQ_COLUMNS), "scales": scales}
    return parts, ((codes - zeros[index]) * scales[index].float()).T


def pack_int4(n: int, k: int, has_zeros: bool) -> Packed:
    codes, scales, index = make_numbers((n, k), -8, 8), make_scales(n, k // GROUP), torch.arange(k) // GROUP
    zeros = make_numbers((n, k // GROUP), -8, 8) if has_zeros else torch.zeros(n, k // GROUP, dtype=torch.long)
    parts = {
        "weight_packed": pack_rows(codes + 8, 4),
        "weight_shape": torch.tensor([n, k]),
        "weight_scale": scales,
    }
    if has_zeros:
        parts["weight_zero_point"] = pack_rows((zeros + 8).T, 4).T.contiguous()
    return parts, (codes - zeros[:, index]) * scales[:, index].float()


def pack_ordered_int4(n: int, k: int) -> Packed:
    """Pack groups whose inputs are in the order of activations."""
    parts, _ = pack_int4(n, k, False)
    codes, scales = make_numbers((n, k), -8, 8), parts["weight_scale"]
    index = (torch.arange(k) // GROUP)[torch.randperm(k, generator=torch.Generator().manual_seed(2))]
    return parts | {"weight_g_idx": index.int()}, codes * scales[:, index].float()


def pack_int8(n: int, k: int) -> Packed:
    codes, scales = make_numbers((n, k), -128, 128), make_scales(n, 1)
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales.float()


def pack_float8(n: int, k: int, block: int | None) -> Packed:
    codes = torch.randn(n, k, generator=torch.Generator().manual_seed(n)).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-n // block), -(-k // block)).add(0.1) if block else torch.tensor([0.25])
    whole = scales.repeat_interleave(block, 0)[:n].repeat_interleave(block, 1)[:, :k] if block else scales
    parts = {"weight": codes, "weight_scale": scales, "input_scale": torch.ones(1)}
    return parts, codes.float() * whole


def describe_compressed(layout: str, bits: int, **weights: object) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits, **weights}}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


GPTQ4 = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
GPTQ_V2 = GPTQ4 | {"checkpoint_format": "gptq_v2"}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "version": "gemm", "group_size": GROUP}
KINDS: dict[str, tuple[dict[str, Any], Callable[[int, int], Packed]]] = {
    "gptq": (GPTQ4, pack_gptq),
    "gptq, inputs in the order of activations": (GPTQ4, lambda n, k: pack_gptq(n, k, is_shuffled=True)),
    "gptq of 2 bits": (GPTQ4 | {"bits": 2}, lambda n, k: pack_gptq(n, k, bits=2)),
    "gptq of 8 bits": (GPTQ4 | {"bits": 8}, lambda n, k: pack_gptq(n, k, bits=8)),
    "gptq_v2": (GPTQ_V2, lambda n, k: pack_gptq(n, k, offset=0)),
    "awq": (AWQ, pack_awq),
    "int4": (describe_compressed("pack-quantized", 4), lambda n, k: pack_int4(n, k, False)),
    "int4 with zero points": (describe_compressed("pack-quantized", 4), lambda n, k: pack_int4(n, k, True)),
    "int4, inputs in the order of activations": (describe_compressed("pack-quantized", 4), pack_ordered_int4),
    "int8 without a name": (describe_compressed("naive-quantized", 8), pack_int8),
    "int8": (describe_compressed("int-quantized", 8), pack_int8),
    "float8": (describe_compressed("float-quantized", 8), lambda n, k: pack_float8(n, k, None)),
    "float8 in blocks, the last cut off": (
        describe_compressed("float-quantized", 8, strategy="block", block_structure=[24, 24]),
        lambda n, k: pack_float8(n, k, 24),
    ),
}


def save_packed(
    folder: Path, block: dict[str, Any], pack: Callable[[int, int], Packed], hidden: int = 32
) -> dict[str, Tensor]:
    """Save a Llama with packed projections. Returns the matrices that they mean."""
    tiny_models.llama(hidden=hidden).save_pretrained(folder)
    return pack_folder(folder, block, pack)


def pack_folder(
    folder: Path, block: dict[str, Any], pack: Callable[[int, int], Packed], pattern: str = "proj"
) -> dict[str, Tensor]:
    held, meant = load_file(folder / "model.safetensors"), {}
    for name in [name for name in held if re.search(pattern, name)]:
        parts, meant[name] = pack(*held.pop(name).shape)
        held |= {f"{name.removesuffix('weight')}{part}": value for part, value in parts.items()}
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": block}))
    return meant


@pytest.mark.parametrize("kind", KINDS)
def test_decoded_weights_are_those_of_the_layout(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    meant = save_packed(tmp_path / "model", *KINDS[kind])
    with caplog.at_level(logging.WARNING):
        model = load_model(str(tmp_path / "model"), "float32", CPU)
    weights = dict(model.named_parameters())
    for name, matrix in meant.items():
        assert torch.equal(weights[name], matrix), name
    lines = [record.getMessage() for record in caplog.records if "are widened to float32" in record.getMessage()]
    assert len(lines) == 1
    assert f"{len(meant)} matrices of {KINDS[kind][0]['quant_method']}" in lines[0]


def test_a_widened_model_generates_and_is_bfloat16_by_default(tmp_path: Path) -> None:
    save_packed(tmp_path / "model", AWQ, pack_awq)
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "float16"}))
    llm = LLM(str(tmp_path / "model"), tokenizer=None, device="cpu")
    plain = llm.generate([[1, 2, 3]], Sampling(temperature=0, max_tokens=8))
    assert len(plain[0].token_ids) == 8
    assert load_model(str(tmp_path / "model"), "auto", CPU).dtype is torch.bfloat16


REFUSED = {
    "3 bits": (GPTQ4 | {"bits": 3}, r"GPTQ in format 'gptq' with 3 bits is not decoded"),
    "marlin": (GPTQ4 | {"checkpoint_format": "marlin"}, "format 'marlin'"),
    "marlin of old releases": (GPTQ4 | {"is_marlin_format": True}, "format 'marlin'"),
    "rotations": (
        describe_compressed("pack-quantized", 4) | {"transform_config": {"config_groups": {"R1": {}}}},
        "with a transform_config is not decoded",
    ),
    "gemv": (AWQ | {"version": "gemv"}, "AWQ of version 'gemv'"),
    "nvfp4": (describe_compressed("nvfp4-pack-quantized", 4), "format 'nvfp4-pack-quantized' is not decoded"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_layout_without_decoder_is_refused(tmp_path: Path, kind: str) -> None:
    block, message = REFUSED[kind]
    save_packed(tmp_path / "model", block, pack_gptq)
    with pytest.raises(ForedraftError, match=message):
        load_model(str(tmp_path / "model"), "auto", CPU)


def test_a_file_that_the_index_does_not_list_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    meant = save_packed(folder, AWQ, pack_awq)
    held = load_file(folder / "model.safetensors")
    first, last = sorted(held)[:9], sorted(held)[9:]
    for i, keys in enumerate((first, last)):
        save_file({key: held[key] for key in keys}, folder / f"part-{i}.safetensors", {"format": "pt"})
    index = dict.fromkeys(first, "part-0.safetensors") | dict.fromkeys(last, "part-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "model.safetensors").unlink()
    save_file({key: torch.zeros_like(value) for key, value in held.items()}, folder / "other.safetensors")
    weights = dict(load_model(str(folder), "float32", CPU).named_parameters())
    assert all(torch.equal(weights[name], matrix) for name, matrix in meant.items())


def test_a_model_of_the_hub_is_decoded_from_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    folder = tmp_path / "models--org--model"
    meant = save_packed(folder / "snapshots" / ("1" * 40), AWQ, pack_awq)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("1" * 40)
    weights = dict(load_model("org/model", "float32", CPU).named_parameters())
    assert all(torch.equal(weights[name], matrix) for name, matrix in meant.items())


def test_several_processes_are_refused(tmp_path: Path) -> None:
    save_packed(tmp_path / "model", AWQ, pack_awq)
    with pytest.raises(ForedraftError, match="use tensor_parallel_size=1"):
        load_model(str(tmp_path / "model"), "auto", CPU, 2)


def test_a_matrix_without_its_zero_points_is_refused(tmp_path: Path) -> None:
    save_packed(tmp_path / "model", GPTQ4, pack_gptq)
    file = tmp_path / "model" / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if not k.endswith("qzeros")}, file, {"format": "pt"})
    with pytest.raises(ForedraftError, match=r"mlp\.down_proj could not be decoded as gptq \('qzeros'\)"):
        load_model(str(tmp_path / "model"), "auto", CPU)


def pack_bf16_int4(n: int, k: int) -> Packed:
    parts, _ = pack_int4(n, k, False)
    scales = parts["weight_scale"].bfloat16()
    codes = make_numbers((n, k), -8, 8)
    return parts | {"weight_scale": scales}, codes * scales[:, torch.arange(k) // GROUP].float()


def pack_channel_int4(n: int, k: int) -> Packed:
    codes, scales = make_numbers((n, k), -8, 8), make_scales(n, 1).bfloat16()
    shape = torch.tensor([n, k])
    return {
        "weight_packed": pack_rows(codes + 8, 4),
        "weight_shape": shape,
        "weight_scale": scales,
    }, codes * scales.float()


def list_projections(model: Any, meant: dict[str, Tensor]) -> list[Tensor]:
    """List the matrices of the layers as native code joins them."""
    joined = []
    for i in range(model.config.num_hidden_layers):
        of = {name.split(".")[-2]: each for name, each in meant.items() if f"layers.{i}." in name}
        joined += [torch.cat([of["q_proj"], of["k_proj"], of["v_proj"]]), of["o_proj"]]
        joined += [interleave_rows([of["gate_proj"], of["up_proj"]]), of["down_proj"]]
    return joined


KEPT = {
    "int8": ("int8", describe_compressed("int-quantized", 8), pack_int8),
    "int4 in groups": ("int4", describe_compressed("pack-quantized", 4), pack_bf16_int4),
    "int4 of whole rows": ("int4", describe_compressed("pack-quantized", 4), pack_channel_int4),
}


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("kind", KEPT)
def test_kernels_have_exactly_the_values_of_the_checkpoint(
    tmp_path: Path, kind: str, is_fused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    quantization, block, pack = KEPT[kind]
    meant = save_packed(tmp_path / "model", block, pack, hidden=64)
    llm = LLM(str(tmp_path / "model"), tokenizer=None, device="cpu", quantization=quantization, fused=is_fused)
    assert f"{len(meant)} of {len(meant)} matrices of compressed-tensors keep their values" in caplog.text
    packed = [unpack(weight).dequantise().float() for weight in get_packed_weights(llm.target)]
    expected = list_projections(llm.target.model, meant) if is_fused else list(meant.values())
    for matrix in expected:
        assert any(other.shape == matrix.shape and torch.equal(other, matrix) for other in packed)
    assert len(llm.generate([[1, 2, 3]], Sampling(temperature=0, max_tokens=4))[0].token_ids) == 4


def test_layers_that_transformers_renames_keep_the_values_of_the_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    eyes = hf.CLIPVisionConfig(**sizes, image_size=8, patch_size=4, projection_dim=32)
    config = hf.LlavaConfig(
        text_config=hf.LlamaConfig(**sizes, vocab_size=64), vision_config=eyes, image_token_index=60
    )
    hf.LlavaForConditionalGeneration(config).save_pretrained(tmp_path)
    block = describe_compressed("int-quantized", 8)
    meant = pack_folder(tmp_path, block, pack_int8, r"language_model.*layers.*proj")
    assert not set(meant) & {name for name, _ in load_model(str(tmp_path), "float32", CPU).named_parameters()}
    LLM(str(tmp_path), tokenizer=None, device="cpu", quantization="int8")
    assert len(meant) == 7
    assert "7 of 7 matrices of compressed-tensors keep their values" in caplog.text


@pytest.mark.parametrize("kind", ["int4", "awq", "float8"])
def test_another_grid_is_rounded_a_second_time_with_a_warning(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    meant = save_packed(tmp_path / "model", *KINDS[kind], hidden=64)
    LLM(str(tmp_path / "model"), tokenizer=None, device="cpu", quantization="int4")
    assert (
        f"0 of {len(meant)} matrices of {KINDS[kind][0]['quant_method']} keep their values with quantization='int4'"
        in caplog.text
    )
