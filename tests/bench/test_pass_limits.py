"""Limits of a pass: the bytes and multiplications of the weights, and the longer of their times."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from foredraft.bench import machine_speed, pass_limits
from foredraft.bench.pass_limits import (
    LimitsMeter,
    PassLimits,
    find_median_limits,
    format_limit,
    measure_limits,
)
from foredraft.errors import ForedraftError
from foredraft.llm import LLM
from foredraft.models.hf import HFModel
from foredraft.outputs import Stats
from tests.support import families, tiny_models, tiny_seq2seq

# parts of a T5 decoder that a pass does not multiply with: embeddings, and keys and values of the source
UNREAD = ("embed_tokens", "relative_attention_bias", "EncDecAttention.k", "EncDecAttention.v")
LIMITS = PassLimits(weight_bytes=800_000_000, num_weights=400_000_000, gigabytes_per_second=40.0, gigaflops=400.0)


def test_a_pass_takes_the_longer_of_both_times() -> None:
    assert LIMITS.byte_seconds == pytest.approx(0.020)
    assert LIMITS.compute_arithmetic_seconds(8) == pytest.approx(0.016)
    assert LIMITS.describe(8) == "20.0 ms (bytes)"
    assert LIMITS.describe(16) == "32.0 ms (arithmetic)"


def test_the_context_is_read_once_and_multiplied_with_every_row() -> None:
    limits = replace(LIMITS, context_bytes=100_000, context_products=50_000)
    assert limits.compute_byte_seconds(4_000) == pytest.approx(0.030)
    assert limits.compute_arithmetic_seconds(8, 4_000) == pytest.approx(0.024)
    assert limits.describe(8, 4_000) == "30.0 ms (bytes)"
    assert limits.describe(16, 4_000) == "48.0 ms (arithmetic)"


def test_streams_take_one_pass_of_prompts_and_one_per_token() -> None:
    limits = replace(LIMITS, num_head_weights=100_000_000)
    # 40 tokens of prompts: 40 * 300 M + 4 * 100 M multiplications take 62 ms; a pass over 4 tokens takes 20 ms
    assert limits.compute_streams_speed(4, prompt_tokens=10, max_tokens=6) == pytest.approx(24 / (0.062 + 5 * 0.020))


def test_drafts_raise_the_tokens_and_the_rows_of_a_pass() -> None:
    plain = Stats(num_tokens=30, target_passes=30)
    assert LIMITS.compute_draft_speed(plain) == pytest.approx(1 / 0.020)
    # 10 passes give 30 tokens; with 7 drafts each, 8 rows take 16 ms of arithmetic, and two requests 32 ms
    drafts = Stats(num_tokens=30, num_drafts=10, num_drafted=70, target_passes=10)
    assert LIMITS.compute_draft_speed(drafts) == pytest.approx(3 / 0.020)
    assert LIMITS.compute_draft_speed(drafts, streams=2) == pytest.approx(2 * 3 / 0.032)


def test_a_limit_is_written_with_what_is_reached() -> None:
    assert format_limit(200.0, 150.0) == "200 (75 %)"
    assert format_limit(None, 150.0) == "-"


def test_a_row_reads_its_chosen_experts(monkeypatch) -> None:
    monkeypatch.setattr(machine_speed, "READ_BYTES", 1 << 20)
    config = families.FAMILIES["qwen3_moe"]()
    config.moe_intermediate_size = 32  # whole vectors: packed experts have no padding
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.dim() > 1 and "embed" not in name}
    experts = sum(size for name, size in sizes.items() if "experts." in name)
    target = HFModel.wrap_model(model, "qwen3_moe", is_fused=True)
    assert target.fused is not None
    assert measure_limits(target, torch.bfloat16).num_weights == sum(sizes.values()) - experts + experts * 2 // 4


def test_only_the_decoder_of_an_encoder_decoder_model_counts(monkeypatch) -> None:
    monkeypatch.setattr(machine_speed, "READ_BYTES", 1 << 20)
    model = tiny_seq2seq.make_model("t5").to(torch.bfloat16)
    target = LLM(model, None, fused=True).target
    assert target.native is not None
    matrices = {name: p.numel() for name, p in model.decoder.named_parameters() if p.dim() == 2}
    read = sum(size for name, size in matrices.items() if not any(part in name for part in UNREAD))
    assert measure_limits(target, torch.bfloat16).num_weights == read + model.lm_head.weight.numel()


def test_the_machine_is_measured_at_several_moments(monkeypatch) -> None:
    monkeypatch.setattr(machine_speed, "READ_BYTES", 1 << 20)
    speeds = iter((400.0, 100.0, 300.0))
    monkeypatch.setattr(pass_limits, "measure_peak", lambda *_: next(speeds))
    meter = LimitsMeter(LLM(tiny_models.llama(96, hidden=64).to(torch.bfloat16), None, fused=True).target)
    assert meter.limits is None
    for _ in range(3):
        meter.measure()
    assert meter.limits is not None
    assert meter.limits.gigaflops == 300.0


def test_a_meter_of_a_target_without_packed_weights_measures_nothing(monkeypatch) -> None:
    monkeypatch.setattr(pass_limits, "load_library", lambda: None)
    meter = LimitsMeter(tiny_models.plain().target)
    meter.measure()
    assert meter.limits is None


def test_layers_that_see_all_tokens_read_the_context(monkeypatch) -> None:
    monkeypatch.setattr(machine_speed, "READ_BYTES", 1 << 20)
    model = tiny_models.llama(96, hidden=64).to(torch.bfloat16)
    target = LLM(model, None, fused=True).target
    config, limits = model.config, measure_limits(target, torch.bfloat16)
    assert limits.num_head_weights == 96 * 64
    assert limits.context_bytes == target.bytes_per_token()
    assert limits.context_products == 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim


def test_the_median_is_that_of_the_speeds() -> None:
    others = [PassLimits(8, 4, speed, 10 * speed) for speed in (3.0, 1.0, 2.0)]
    assert find_median_limits(others) == PassLimits(8, 4, 2.0, 20.0)


@pytest.mark.parametrize(("quantization", "bytes_per_weight"), [(None, 2.0), ("int8", 1.0), ("int4", 0.5)])
def test_all_packed_weights_count(quantization: str | None, bytes_per_weight: float, monkeypatch) -> None:
    monkeypatch.setattr(machine_speed, "READ_BYTES", 1 << 20)
    model = tiny_models.llama(96, hidden=64).to(torch.bfloat16)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)
    limits = measure_limits(LLM(model, None, quantization=quantization, fused=True).target, torch.bfloat16)
    assert limits.num_weights == matrices
    assert bytes_per_weight * matrices <= limits.weight_bytes <= (bytes_per_weight + 1.0) * matrices  # scales, padding
    assert limits.gigabytes_per_second > 0


def test_a_target_without_packed_weights_has_no_limits(monkeypatch) -> None:
    monkeypatch.setattr(pass_limits, "load_library", lambda: None)
    with pytest.raises(ForedraftError, match="packed weights"):
        measure_limits(tiny_models.plain().target, torch.bfloat16)
