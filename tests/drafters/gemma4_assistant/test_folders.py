"""Folders of Gemma-4 assistants: how they are found, read, written and refused, and which engines load them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foredraft.checkpoints.schema import TargetInfo
from foredraft.drafters.checkpoint_folders import read, recognise, write
from foredraft.drafters.gemma4_assistant.method import METHOD
from foredraft.errors import ForedraftError
from foredraft.handover.drafter_plan import find_counterpart
from foredraft.handover.registry import load_engines
from tests.support import gemma4_assistants as tiny

TARGET = TargetInfo("the-target", 32, tiny.VOCAB, 4)


def edit_config(folder: Path, text: Any = None, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= text or {}
    (folder / "config.json").write_text(json.dumps(config | changes))


def edit_tensors(folder: Path, drop: str = "", **more: Tensor) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name: t for name, t in (tensors | more).items() if name != drop}, folder / "model.safetensors")


@pytest.mark.parametrize(
    "declared",
    [
        {"architectures": ["Gemma4AssistantForCausalLM"]},
        {"architectures": ["Gemma4UnifiedAssistantForCausalLM"], "model_type": "gemma4_unified_assistant"},
        {"architectures": None},
    ],
)
def test_a_folder_is_found_by_its_config(tmp_path: Path, declared: dict[str, Any]) -> None:
    folder = tiny.save_assistant(tmp_path)
    edit_config(folder, **declared)
    assert recognise(folder)[0] == "gemma4_assistant"
    assert read(folder, TARGET).shape.layer_kinds == ("sliding_attention", "sliding_attention", "full_attention")


def test_copies_and_unused_projections_are_left_out(tmp_path: Path) -> None:
    folder = tiny.save_assistant(tmp_path)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    unused = {f"model.layers.0.self_attn.{name}.weight": torch.ones(3, 3) for name in ("k_proj", "v_norm")}
    edit_tensors(folder, **{"lm_head.weight": torch.zeros_like(embedding)}, **unused)
    assert torch.equal(read(folder, TARGET).tensors["lm_head.weight"], embedding)
    edit_config(folder, tie_word_embeddings=False)
    assert not read(folder, TARGET).tensors["lm_head.weight"].any()


@pytest.mark.parametrize("is_ordered", [False, True], ids=["plain", "ordered"])
def test_a_folder_is_written_as_it_was_published(tmp_path: Path, is_ordered: bool) -> None:
    """The rewritten folder loads here, and in transformers' class with equal weights."""
    stored = read(tiny.save_assistant(tmp_path / "published", is_ordered), TARGET)
    write(tmp_path / "written", METHOD.name, stored.shape, stored.tensors)
    again = read(tmp_path / "written", TARGET)
    assert again.shape == stored.shape
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in stored.tensors.items())
    published, written = (load_file(tmp_path / name / "model.safetensors").keys() for name in ("published", "written"))
    assert published == written


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        ({"hidden_size_per_layer_input": 256}, {}, "sets hidden_size_per_layer_input to 256, and only 0 is supported"),
        ({"hidden_activation": "silu"}, {}, "only 'gelu_pytorch_tanh' is supported"),
        ({"layer_types": ["full_attention"]}, {}, "layer_types in config.json has to be 3 of"),
        ({"layer_types": ["chunked_attention"] * 3}, {}, "layer_types in config.json has to be 3 of"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, {}, "no rope_theta for sliding_attention"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4, "rope_type": "yarn"}}},
            {},
            "rope_type 'yarn' is not supported",
        ),
        ({"rms_norm_eps": 2}, {}, "rms_norm_eps in config.json is 2"),
        ({"num_attention_heads": 0}, {}, "num_attention_heads to a positive number, not 0"),
        ({"num_attention_heads": 3}, {}, "q_proj.weight is .64, 24. and has to be .48, 24."),
        ({"sliding_window": -1}, {}, "sliding_window to a positive number"),
        ({}, {"num_centroids": 7}, "num_centroids has to divide"),
        ({}, {"centroid_intermediate_top_k": 9}, "centroid_intermediate_top_k is at most"),
        ({}, {"use_ordered_embeddings": False}, "no place for masked_embedding.centroids.weight"),
    ],
)
def test_settings_that_are_not_supported_are_named(tmp_path: Path, text: Any, changes: Any, message: str) -> None:
    folder = tiny.save_assistant(tmp_path, is_ordered=True)
    edit_config(folder, text, **changes)
    with pytest.raises(ForedraftError, match=message):
        read(folder, TARGET)


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    folder = tiny.save_assistant(tmp_path, is_ordered=True)
    with pytest.raises(ForedraftError, match="target with hidden size 32, and the-target has 48"):
        read(folder, TargetInfo("the-target", 48, tiny.VOCAB, 4))
    with pytest.raises(ForedraftError, match="target with vocabulary size 96, and the-target has 97"):
        read(folder, TargetInfo("the-target", 32, 97, 4))
    edit_tensors(folder, **{"masked_embedding.token_ordering": torch.zeros(tiny.VOCAB, dtype=torch.int64)})
    with pytest.raises(ForedraftError, match="no order of all 96 tokens"):
        read(folder, TARGET)
    edit_tensors(folder, drop="model.layers.1.layer_scalar")
    with pytest.raises(ForedraftError, match=r"layers\.1\.layer_scalar is missing"):
        read(folder, TARGET)
    edit_config(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "text_config"}))
    with pytest.raises(ForedraftError, match="has no text_config"):
        read(folder, TARGET)


@pytest.mark.parametrize(
    ("engine", "name"), [("vllm", "mtp"), ("sglang", "NEXTN"), ("trtllm", "MTP"), ("llama.cpp", "draft-mtp")]
)
def test_engines_load_the_published_folder(engine: str, name: str) -> None:
    counterpart = find_counterpart(METHOD, load_engines()[engine])
    assert (counterpart.name, counterpart.export) == (name, None)
