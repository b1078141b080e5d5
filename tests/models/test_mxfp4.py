"""GPT-OSS with experts in MXFP4, as it is published: decoded values, both kinds of pass, and refusals.

The packer below follows the OCP Microscaling specification number by number, and shares no code with the decoder.
"""

import json
import logging
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from foredraft import LLM, Sampling
from foredraft.errors import ForedraftError
from foredraft.models.loading import load_model
from foredraft.models.mxfp4 import decode_mxfp4

CPU = torch.device("cpu")
EXPERTS, HIDDEN, INNER = 4, 64, 32
BLOCK = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}
PROMPTS = [[5, 9, 7, 11, 5, 9, 7, 11, 5, 9], [3, 4, 3, 4, 3]]


def read_e2m1(code: int) -> float:
    """Return the value of 4 bits by the formula of the specification: sign, 2 bits of exponent with bias 1, 1 bit."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2))


def pack_experts(k: int, n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Make blocks [E, n, G, 16], scales [E, n, G] and the matrices [E, k, n] that they mean."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (EXPERTS, n, k), generator=generator)
    scales = torch.randint(120, 126, (EXPERTS, n, k // 32), generator=generator)
    meant = torch.empty(EXPERTS, k, n)
    for e in range(EXPERTS):
        for row in range(n):
            for column in range(k):
                scale = 2.0 ** (int(scales[e, row, column // 32]) - 127)
                meant[e, column, row] = read_e2m1(int(codes[e, row, column])) * scale
    pairs = codes.view(EXPERTS, n, k // 32, 16, 2)
    return (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8), scales.to(torch.uint8), meant


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """Save a small GPT-OSS under the published names. Returns its folder and the matrices of its experts."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    config = hf.GptOssConfig(
        vocab_size=64, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=EXPERTS, num_experts_per_tok=2, sliding_window=8,
        max_position_embeddings=256, initializer_range=0.3, dtype="float32", eos_token_id=None, pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    torch.manual_seed(0)
    hf.GptOssForCausalLM(config).save_pretrained(folder)
    held, meant = load_file(folder / "model.safetensors"), {}
    for seed, name in enumerate(sorted(name for name in held if name.endswith(("gate_up_proj", "down_proj")))):
        held[f"{name}_blocks"], held[f"{name}_scales"], meant[name] = pack_experts(*held.pop(name).shape[1:], seed)
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": BLOCK}))
    return folder, meant


def test_every_code_and_scale_has_the_value_of_transformers() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 255, 16, 16).contiguous()
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(1, 255, 16).contiguous()
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(decode_mxfp4(codes, scales, dtype), convert_moe_packed_tensors(codes, scales, dtype=dtype))
    whole, narrow = (decode_mxfp4(codes, scales, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert whole.shape == (1, 512, 255)
    assert torch.equal(narrow.float(), whole)  # bfloat16 loses nothing


def test_decoded_experts_are_those_of_the_specification(
    packed: tuple[Path, dict[str, Tensor]], caplog: pytest.LogCaptureFixture
) -> None:
    folder, meant = packed
    with caplog.at_level(logging.WARNING):
        weights = dict(load_model(str(folder), "float32", CPU).named_parameters())
    assert len(meant) == 4
    for name, matrices in meant.items():
        assert torch.equal(weights[name], matrices), name
    lines = [record.getMessage() for record in caplog.records if "are widened to float32" in record.getMessage()]
    assert len(lines) == 1
    assert "4 matrices of mxfp4" in lines[0]
    narrow = dict(load_model(str(folder), "bfloat16", CPU).named_parameters())
    assert all(torch.equal(narrow[name].float(), matrices) for name, matrices in meant.items())


@pytest.mark.parametrize("is_fused", [True, False])
def test_the_output_is_that_of_transformers(packed: tuple[Path, dict[str, Tensor]], is_fused: bool) -> None:
    folder, _ = packed
    settings = hf.Mxfp4Config(dequantize=True)
    model = hf.AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, dtype=torch.float32).eval()
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
        expected.append(tokens[0, len(prompt) :].tolist())
    sampling = Sampling(temperature=0, max_tokens=16, ignore_eos=True)
    for drafter in (None, "ngram"):
        llm = LLM(str(folder), tokenizer=None, device="cpu", drafter=drafter, fused=is_fused)
        assert llm.target.runs_native == is_fused
        assert [completion.token_ids for completion in llm.generate(PROMPTS, sampling)] == expected


def test_kernels_of_8_bits_round_the_experts_a_second_time(
    packed: tuple[Path, dict[str, Tensor]], caplog: pytest.LogCaptureFixture
) -> None:
    llm = LLM(str(packed[0]), tokenizer=None, device="cpu", quantization="int8")
    assert "0 of 4 matrices of mxfp4 keep their values with quantization='int8'" in caplog.text
    assert llm.target.runs_native
    assert len(llm.generate(PROMPTS, Sampling(temperature=0, max_tokens=4))[0].token_ids) == 4


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("down_proj_blocks", None, r"experts\.down_proj could not be decoded as MXFP4 \('blocks'\)"),
        ("down_proj_scales", None, r"its weights lack model\.layers\.0\.mlp\.experts\.down_proj"),
        ("down_proj_scales", lambda scales: scales.fill_(255), "a scale is not a number"),
        ("down_proj_scales", lambda scales: scales[:, :1], r"blocks have shape \[4, 64, 1, 16\] and scales"),
        ("down_proj_blocks", lambda blocks: blocks.float(), r"blocks are torch\.float32"),
    ],
)
def test_damaged_experts_are_refused(
    packed: tuple[Path, dict[str, Tensor]], tmp_path: Path, name: str, change: object, message: str
) -> None:
    held = load_file(packed[0] / "model.safetensors")
    key = f"model.layers.0.mlp.experts.{name}"
    value = held.pop(key)
    if callable(change):
        held[key] = change(value).contiguous()
    save_file(held, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((packed[0] / "config.json").read_text())
    with pytest.raises(ForedraftError, match=message):
        load_model(str(tmp_path), "auto", CPU)
