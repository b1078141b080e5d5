"""Models that read more than text write text as transformers does, from text alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from foredraft import LLM, Sampling
from foredraft.models.loading import load_model

TEXT = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3, "head_dim": 8,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EYES = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
QWEN_EYES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
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
}
PROMPT, SAMPLING = [5, 6, 7, 8, 9], Sampling(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.mark.parametrize("dtype", ["float64", "float32"])  # the second has native code, which finds layers elsewhere
@pytest.mark.parametrize("kind", KINDS)
def test_text_alone_is_decoded_as_transformers_does(tmp_path: Path, kind: str, dtype: str) -> None:
    torch.manual_seed(0)
    hf.AutoModelForImageTextToText.from_config(KINDS[kind]()).save_pretrained(tmp_path / kind)
    theirs = load_model(str(tmp_path / kind), dtype, torch.device("cpu")).eval()
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(SAMPLING.max_tokens):
            ids = torch.cat([ids, theirs(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    plain = LLM(str(tmp_path / kind), None, dtype=dtype)
    [completion] = plain.generate([PROMPT], SAMPLING)
    assert list(completion.token_ids) == ids[0, len(PROMPT) :].tolist()
    [drafted] = plain.with_drafter("ngram").generate([PROMPT], SAMPLING)
    assert drafted.token_ids == completion.token_ids
