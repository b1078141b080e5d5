"""Refusals in one line, before any process starts, of all that cannot run over several processes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as hf

from foredraft import LLM, ForedraftError
from foredraft.tensor_parallel.checks import check_architecture, choose_device
from tests.support import tiny_models


@pytest.mark.parametrize("size", [0, -1, True, "2", 1.5])
def test_a_size_that_is_no_number_of_processes_is_refused(size: object) -> None:
    with pytest.raises(ForedraftError, match="must be a number of processes from 1 up"):
        LLM(tiny_models.target(), None, tensor_parallel_size=size)  # type: ignore[arg-type]


def test_options_of_one_process_are_refused() -> None:
    for options in ({"quantization": "int8"}, {"fused": True}):
        with pytest.raises(ForedraftError, match="in one process; leave"):
            LLM("builtin", None, tensor_parallel_size=2, **options)  # type: ignore[arg-type]


def test_a_loaded_model_is_refused() -> None:
    with pytest.raises(ForedraftError, match="give its folder or hub id"):
        LLM(tiny_models.target(), None, tensor_parallel_size=2)


def test_a_program_under_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ForedraftError, match="without torchrun"):
        LLM("builtin", None, tensor_parallel_size=2)


SMALL = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 1}
SIX_HEADS = SMALL | {"num_attention_heads": 6}


@pytest.mark.parametrize(
    ("make", "size", "message"),
    [
        (lambda: hf.GPT2Config(n_embd=24, n_layer=1, n_head=4), 2, "no tensor-parallel plan in transformers"),
        (lambda: hf.LlamaConfig(**SIX_HEADS, num_key_value_heads=6), 4, "6 KV heads, .*; give 2, 3, 6 or leave it out"),
        (lambda: hf.LlamaConfig(**SIX_HEADS, num_key_value_heads=1), 2, "1 KV heads, .*; leave it out"),
    ],
)
def test_an_architecture_that_cannot_be_split_is_refused(make: Callable[[], object], size: int, message: str) -> None:
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(make())
    with pytest.raises(ForedraftError, match=message):
        check_architecture(model, "tiny", size)


def test_a_model_whose_ranks_have_all_heads_needs_no_divisor() -> None:
    """Phi-3's plan gathers queries, keys and values, so 3 processes may have 4 heads."""
    config = hf.Phi3Config(**SMALL, num_attention_heads=4, num_key_value_heads=4, pad_token_id=0)
    with torch.device("meta"):
        check_architecture(hf.AutoModelForCausalLM.from_config(config), "tiny", 3)


def test_an_encoder_decoder_model_is_refused(tmp_path: Path) -> None:
    config = hf.T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    hf.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ForedraftError, match="encoder-decoder model, which runs in one process"):
        LLM(str(tmp_path), None, tensor_parallel_size=2)


def test_a_named_gpu_and_too_many_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto", 2) == torch.device("cuda", 0)
    for device, size, message in (
        ("auto", 3, "needs 3 GPUs, and torch sees 2; give at most 2"),
        ("cuda:1", 2, "uses the GPUs 0 to 1"),
        ("cpu", 2, "CUDA_VISIBLE_DEVICES=''"),
    ):
        with pytest.raises(ForedraftError, match=message):
            choose_device(device, size)
