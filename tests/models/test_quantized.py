"""A quantised checkpoint that transformers would run with wrong weights is refused at the door, with what to do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft import LLM, Sampling
from foredraft.errors import ForedraftError
from foredraft.models.loading import load_model
from foredraft.models.quantized import check_quantization_kind, check_stored_dtypes, check_unused_tensors
from tests.support import tiny_models

CPU = torch.device("cpu")
LAYER = "model.layers.0.self_attn.q_proj"


def save_float8(
    folder: Path, block: Any = None, beside: str | None = "weight_scale", dtype: Any = torch.float8_e4m3fn
) -> Path:
    """Save a Llama with every projection rounded to float8, with or without a description of the quantisation."""
    tiny_models.llama().float().save_pretrained(folder)
    held = load_file(folder / "model.safetensors")
    for name in [name for name in held if "proj" in name]:
        scale = held[name].abs().max() / 448
        held[name] = (held[name] / scale).to(dtype)
        if beside is not None:
            held[name.removesuffix("weight") + beside] = scale.reshape(1)
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config if block is None else config | {"quantization_config": block}))
    return folder


KINDS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "modelopt": (
        lambda f: save_float8(f, {"quant_method": "modelopt", "quant_algo": "FP8"}),
        "quant_method 'modelopt'",
    ),
    "unnamed": (lambda f: save_float8(f, {"bits": 8}), "quant_method None"),
    "block left out": (save_float8, "float8"),
    "block left out, weights widened": (lambda f: save_float8(f, dtype=torch.bfloat16), r"down_proj\.weight_scale"),
    "inverse scales": (lambda f: save_float8(f, beside="weight_scale_inv", dtype=torch.bfloat16), "weight_scale_inv"),
    "scales of the inputs": (lambda f: save_float8(f, beside="input_scale", dtype=torch.bfloat16), "input_scale"),
    "no scales at all": (lambda f: save_float8(f, beside=None), "float8"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_that_would_decode_wrongly_is_refused(tmp_path: Path, kind: str) -> None:
    make, said = KINDS[kind]
    make(tmp_path / "model")
    with pytest.raises(ForedraftError, match=said) as caught:
        load_model(str(tmp_path / "model"), "auto", CPU)
    assert "\n" not in str(caught.value)
    assert "use the unquantised checkpoint" in str(caught.value)


def test_what_modelopt_says_beside_config_json_is_read(tmp_path: Path) -> None:
    tiny_models.llama().float().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    with pytest.raises(ForedraftError, match=r"hf_quant_config\.json says that ModelOpt"):
        load_model(str(tmp_path / "model"), "auto", CPU)


def test_kinds_that_transformers_decodes_pass() -> None:
    for kind in ("compressed-tensors", "fp8", "gptq", "awq", "mxfp4", "bitsandbytes"):
        assert check_quantization_kind({"quantization_config": {"quant_method": kind}}, "m") == kind
    assert check_quantization_kind({"quantization_config": {"load_in_4bit": True}}, "m") == "bitsandbytes"
    assert check_quantization_kind({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "m") == "fp8"
    assert check_quantization_kind({}, "m") is None
    stored = {f"{LAYER}.weight": ("F8_E4M3", (32, 32)), f"{LAYER}.weight_scale": ("F32", (1,))}
    check_stored_dtypes(Path("nowhere"), stored, "compressed-tensors", "m")


def test_scales_of_a_kv_cache_change_no_weight() -> None:
    check_unused_tensors(["model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.attn.v_scale"], "m")


def test_a_bitsandbytes_folder_without_scales_is_refused() -> None:
    stored = {f"{LAYER}.weight": ("U8", (512, 1))}
    with pytest.raises(ForedraftError, match="is packed, but no scales"):
        check_stored_dtypes(Path("nowhere"), stored, "bitsandbytes", "m")
    check_stored_dtypes(Path("nowhere"), stored | {f"{LAYER}.weight.absmax": ("F32", (8,))}, "bitsandbytes", "m")
    check_stored_dtypes(Path("nowhere"), {f"{LAYER}.weight": ("BF16", (32, 32))}, "bitsandbytes", "m")


def test_bitsandbytes_without_its_package_is_refused_with_what_to_do(tmp_path: Path) -> None:
    tiny_models.llama().float().save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    block = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": block}))
    with pytest.raises(ForedraftError, match=r"use the unquantised checkpoint .*, or install bitsandbytes$"):
        load_model(str(tmp_path / "model"), "auto", CPU)


def test_a_model_with_scales_of_a_kv_cache_decodes_as_without(tmp_path: Path) -> None:
    tiny_models.llama().float().save_pretrained(tmp_path / "model")
    sampling = Sampling(max_tokens=6, temperature=0)
    [plain] = LLM(str(tmp_path / "model"), None).generate([[5, 6, 7]], sampling)
    held = load_file(tmp_path / "model" / "model.safetensors")
    save_file(held | {"model.layers.0.self_attn.k_scale": torch.ones(1)}, tmp_path / "model" / "model.safetensors")
    [scaled] = LLM(str(tmp_path / "model"), None).generate([[5, 6, 7]], sampling)
    assert scaled.token_ids == plain.token_ids
