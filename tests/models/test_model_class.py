"""Classes that load a model: those of configurations that no auto class knows are named in config.json."""

from pathlib import Path

import pytest
import torch
import transformers as hf

from foredraft import LLM, ForedraftError, Sampling
from foredraft.models.model_class import select_auto_class

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4}
PROMPTS = [[5, 9, 7, 11, 5, 9, 7, 11, 5, 9], [3, 4, 3, 4, 3]]


def test_the_class_that_the_folder_names() -> None:
    config = hf.Emu3TextConfig(architectures=["NoSuchModel", "Emu3ForConditionalGeneration", "Emu3ForCausalLM"])
    assert select_auto_class(config) is hf.Emu3ForCausalLM  # that of the same configuration
    assert select_auto_class(hf.LlamaConfig(architectures=["Emu3ForCausalLM"])) is hf.AutoModelForCausalLM


@pytest.mark.parametrize("name", [None, "Emu3Model", "PreTrainedModel", "NoSuchModel", "torch"])
def test_a_class_without_generation_is_not_used(name: str | None, tmp_path: Path) -> None:
    config = hf.Emu3TextConfig(architectures=None if name is None else [name])
    assert select_auto_class(config) is hf.AutoModelForCausalLM
    config.save_pretrained(tmp_path)
    with pytest.raises(ForedraftError):
        LLM(str(tmp_path), tokenizer=None)


def test_text_skips_the_layers_that_read_images(tmp_path: Path) -> None:
    """Llama 3.2 Vision: layers with cross-attention do nothing without an image."""
    text = hf.MllamaTextConfig(**SIZES, cross_attention_layers=[1, 3], initializer_range=0.2, rope_parameters=ROPE)
    eyes = hf.MllamaVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_global_layers=1, attention_heads=2,
        image_size=32, patch_size=8, vision_output_dim=64, intermediate_layers_indices=[0],
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.MllamaForConditionalGeneration(hf.MllamaConfig(vision_config=eyes, text_config=text)).eval()
    model.save_pretrained(tmp_path)
    model.generation_config.eos_token_id = None
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
        expected.append(made[0, len(prompt) :].tolist())
    sampling = Sampling(temperature=0, max_tokens=16, ignore_eos=True)
    for drafter in (None, {"method": "ngram", "branches": 2}):
        llm = LLM(str(tmp_path), drafter, tokenizer=None, num_speculative_tokens=4 if drafter else None)
        assert [completion.token_ids for completion in llm.generate(PROMPTS, sampling)] == expected
