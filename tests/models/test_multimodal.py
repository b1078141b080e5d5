"""Models that read more than text write text as transformers does, from text alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from foredraft import LLM, ForedraftError, Sampling
from foredraft.drafters.common.target_access import derive_block_shape
from foredraft.drafters.draft_model.architecture import DraftSize, shrink_config
from foredraft.models.loading import load_model
from foredraft.models.native import decoder

TEXT = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3, "head_dim": 16,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EYES = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
QWEN_EYES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
HYBRID = {
    "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": ROPE["rope_parameters"] | {"partial_rotary_factor": 1.0},
}  # fmt: skip
NARROW = {name: value for name, value in TEXT.items() if name != "head_dim"}

KINDS: dict[str, Callable[[], Any]] = {
    "llava": lambda: hf.LlavaConfig(
        text_config=hf.LlamaConfig(**TEXT), vision_config=hf.CLIPVisionConfig(**EYES), image_token_index=90
    ),
    "mistral3": lambda: hf.Mistral3Config(
        text_config=hf.MistralConfig(**TEXT), vision_config=hf.PixtralVisionConfig(**EYES), image_token_index=90
    ),
    "qwen2_5_vl": lambda: hf.Qwen2_5_VLConfig(
        text_config=NARROW | ROPE, vision_config=QWEN_EYES | {"fullatt_block_indexes": [0]}
    ),
    "qwen3_vl": lambda: hf.Qwen3VLConfig(
        text_config=TEXT | ROPE, vision_config=QWEN_EYES | {"deepstack_visual_indexes": [0]}
    ),
    "qwen3_5": lambda: hf.Qwen3_5Config(text_config=TEXT | HYBRID, vision_config=QWEN_EYES),
    "gemma3": lambda: hf.Gemma3Config(text_config=TEXT, vision_config=EYES, mm_tokens_per_image=4),
    "gemma4": lambda: hf.Gemma4Config(
        text_config=TEXT | {"global_head_dim": 16, "hidden_size_per_layer_input": 0, "pad_token_id": 0},
        vision_config=EYES | {"head_dim": 8, "num_key_value_heads": 2, "global_head_dim": 8},
        audio_config=None,
    ),
    "llama4": lambda: hf.Llama4Config(
        text_config=TEXT | {"intermediate_size_mlp": 48, "num_local_experts": 2, "pad_token_id": 0},
        vision_config=EYES | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
    ),
}
NATIVE = {
    "gemma3",
    "qwen3_5",
    "llava",
    "mistral3",
    "qwen2_5_vl",
    "qwen3_vl",
}  # their text parts are decoders of a family with native code
PROMPT, SAMPLING = [5, 6, 7, 8, 9], Sampling(max_tokens=12, temperature=0, ignore_eos=True)


def save_model(kind: str, folder: Path) -> Any:
    torch.manual_seed(0)
    model = hf.AutoModelForImageTextToText.from_config(KINDS[kind]())
    model.save_pretrained(folder)
    return model.eval()


def get_reference(model: Any) -> Any:
    """Return the model that computes the reference; that of Llama 4 as a whole fails on text in transformers 5.24."""
    return model.language_model if isinstance(model, hf.Llama4ForConditionalGeneration) else model


def generate_reference(model: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(SAMPLING.max_tokens):
            ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids[0, len(PROMPT) :].tolist()  # type: ignore[no-any-return]


def count_text_weights(model: Any) -> int:
    parts = [model.get_decoder(), model.get_output_embeddings()]
    return sum({id(weight): weight.numel() for part in parts for weight in part.parameters()}.values())


@pytest.mark.parametrize("dtype", ["float64", "float32"])  # the second has native code, which finds layers elsewhere
@pytest.mark.parametrize("kind", KINDS)
def test_text_alone_is_decoded_as_transformers_does(tmp_path: Path, kind: str, dtype: str) -> None:
    model = save_model(kind, tmp_path)
    plain = LLM(str(tmp_path), None, dtype=dtype)
    assert plain.target.num_parameters == count_text_weights(model)  # the others are not loaded
    assert plain.target.runs_native == (kind in NATIVE and dtype == "float32")
    [completion] = plain.generate([PROMPT], SAMPLING)
    assert list(completion.token_ids) == generate_reference(get_reference(model).to(getattr(torch, dtype)))
    [drafted] = plain.with_drafter("ngram").generate([PROMPT], SAMPLING)
    assert drafted.token_ids == completion.token_ids


def test_all_weights_are_loaded_unless_text_alone_is_wanted(tmp_path: Path) -> None:
    model = save_model("mistral3", tmp_path)
    loaded = load_model(str(tmp_path), "auto", torch.device("cpu"))
    assert {name for name, _ in loaded.named_parameters()} == {name for name, _ in model.named_parameters()}


def test_an_incomplete_text_part_is_refused(tmp_path: Path) -> None:
    model = save_model("mistral3", tmp_path)
    kept = {name: weight for name, weight in model.state_dict().items() if "language_model.layers.1.mlp" not in name}
    model.save_pretrained(tmp_path, state_dict=kept)
    with pytest.raises(ForedraftError, match="lack"):
        load_model(str(tmp_path), "auto", torch.device("cpu"), is_text_only=True)


@pytest.mark.parametrize("change", ["logits", "inputs"])
def test_a_model_that_does_more_around_its_decoder_does_not_run_as_native_code(change: str) -> None:
    model = hf.AutoModelForImageTextToText.from_config(KINDS["llava"]()).eval()
    assert decoder.explain_unsupported(model) is None
    if change == "logits":
        model.register_forward_hook(lambda module, args, output: output.update({"logits": output.logits * 2}) or output)
    else:
        model.get_decoder().register_forward_pre_hook(
            lambda module, args, kwargs: (args, kwargs | {"inputs_embeds": kwargs["inputs_embeds"] * 2}),
            with_kwargs=True,
        )
    assert "text part" in (decoder.explain_unsupported(model) or "")


@pytest.mark.parametrize("kind", ["qwen3_vl", "mistral3", "gemma3"])
def test_drafters_read_the_sizes_of_the_text_part(tmp_path: Path, kind: str) -> None:
    save_model(kind, tmp_path)
    target = LLM(str(tmp_path), None).target
    shape = derive_block_shape(target)
    assert (shape.hidden, shape.heads, shape.kv_heads) == (64, 4, 2)
    assert not any("mrope" in key for key in shape.rope)
    small = shrink_config(target.model.config, DraftSize(1, 32))
    draft = hf.AutoModelForCausalLM.from_config(small)
    drafted = LLM(str(tmp_path), {"method": "draft_model", "model": draft}).generate([PROMPT], SAMPLING)
    assert drafted[0].token_ids == LLM(target, None).generate([PROMPT], SAMPLING)[0].token_ids
