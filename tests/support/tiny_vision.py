"""Small vision-language models with processors, made in code and saved to folders."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEXT = {
    "vocab_size": 120, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3, "head_dim": 16,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
NARROW = {name: value for name, value in TEXT.items() if name != "head_dim"}
EYES = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14, "initializer_range": 0.3,
}  # fmt: skip
WORDS = ["\n\n", *"user : assistant what is in the picture a b c d e f g h and or not this that red green blue".split()]
SPECIAL = [
    "<pad>", "<s>", "</s>", "<image>", "<soft>", "<boi>", "<eoi>", "[IMG]", "[IMG_BREAK]", "[IMG_END]",
    "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
TEMPLATE = """\
{%- for message in messages %}{{ message.role }} : {% for part in message.content %}
{%- if part.type == 'image' %}PLACEHOLDER {% else %}{{ part.text }} {% endif %}{% endfor %}{% endfor %}
{%- if add_generation_prompt %}assistant :{% endif %}"""


def make_tokenizer(placeholder: str, **names: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer of whole words; `names` are further attributes, such as boi_token."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS, "<unk>"])}
    vocabulary |= {f"w{i}": i for i in range(len(vocabulary), TEXT["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>",
        extra_special_tokens=names or None,
    )  # fmt: skip
    made.add_special_tokens({"additional_special_tokens": SPECIAL[3:]}, replace_extra_special_tokens=False)
    made.chat_template = TEMPLATE.replace("PLACEHOLDER", placeholder)
    return made


@dataclass(frozen=True)
class VisionKind:
    """A family: its configuration, and its processor."""

    make_config: Callable[[], Any]
    make_processor: Callable[[], Any]
    placeholder: str
    is_native: bool = True  # the text part runs as native code in float32


def _get_id(token: str) -> int:
    return SPECIAL.index(token)


def _make_llava() -> Any:
    images = hf.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    return hf.LlavaProcessor(
        images, make_tokenizer("<image>"), patch_size=14, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=TEMPLATE.replace("PLACEHOLDER", "<image>"),
    )  # fmt: skip


def _make_mistral3() -> Any:
    images = hf.PixtralImageProcessorPil(size={"longest_edge": 56}, patch_size=14)
    return hf.PixtralProcessor(
        images, make_tokenizer("[IMG]"), patch_size=14, spatial_merge_size=2,
        chat_template=TEMPLATE.replace("PLACEHOLDER", "[IMG]"),
    )  # fmt: skip


def _make_gemma3() -> Any:
    images = hf.Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    tokenizer = make_tokenizer("<boi>", boi_token="<boi>", eoi_token="<eoi>", image_token="<soft>")
    return hf.Gemma3Processor(
        images, tokenizer, image_seq_length=4, chat_template=TEMPLATE.replace("PLACEHOLDER", "<boi>")
    )


KINDS = {
    "llava": VisionKind(
        lambda: hf.LlavaConfig(
            text_config=hf.LlamaConfig(**TEXT), vision_config=hf.CLIPVisionConfig(**EYES),
            image_token_index=_get_id("<image>"),
        ),
        _make_llava, "<image>",
    ),
    "mistral3": VisionKind(
        lambda: hf.Mistral3Config(
            text_config=hf.MistralConfig(**TEXT), vision_config=hf.PixtralVisionConfig(**EYES | {"image_size": 56}),
            image_token_index=_get_id("[IMG]"),
        ),
        _make_mistral3, "[IMG]",
    ),
    "gemma3": VisionKind(
        lambda: hf.Gemma3Config(
            text_config=TEXT | {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            vision_config=EYES | {"image_size": 56}, mm_tokens_per_image=4, image_token_index=_get_id("<soft>"),
            boi_token_index=_get_id("<boi>"), eoi_token_index=_get_id("<eoi>"), tie_word_embeddings=False,
        ),
        _make_gemma3, "<boi>",
    ),
}  # fmt: skip


def save_vision_model(kind: str, folder: Path, seed: int = 0) -> Any:
    """Save a random model with its processor. Returns the model, in float32."""
    torch.manual_seed(seed)
    model = hf.AutoModelForImageTextToText.from_config(KINDS[kind].make_config())
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    KINDS[kind].make_processor().save_pretrained(folder)
    return model.eval()


def make_image(seed: int = 0, size: tuple[int, int] = (40, 30)) -> Image.Image:
    """Make an image of noise, the same for one seed."""
    noise = torch.randint(0, 256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(noise.numpy())


def generate_reference(model: Any, folder: Path, text: str, images: list[Any], max_tokens: int) -> list[int]:
    """Return the greedy token ids of transformers' own `generate`."""
    processor = hf.AutoProcessor.from_pretrained(folder)
    inputs = processor(text=[text], images=images or None, return_tensors="pt")
    made = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False, eos_token_id=None)
    return made[0, inputs["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]
