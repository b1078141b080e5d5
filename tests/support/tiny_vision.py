"""Small vision-language models with processors, made in code."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from foredraft.models.attention import read_implementations
from foredraft.models.hf import HFModel
from foredraft.models.images.loading import add_image_encoder

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
QWEN_EYES = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64, "patch_size": 7,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "initializer_range": 0.3,
}  # fmt: skip
ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
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
    vocabulary |= {f"w{i}": i for i in range(len(vocabulary), int(TEXT["vocab_size"]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>",
        extra_special_tokens=names or None,
    )  # fmt: skip
    made.add_special_tokens({"additional_special_tokens": SPECIAL[3:]}, replace_extra_special_tokens=False)
    made.chat_template = TEMPLATE.replace("PLACEHOLDER", placeholder)
    return made


class PlainProcessor:
    """Processor of transformers' parts, for families whose own needs torchvision.

    Args:
        image_processor: processor of images.
        placeholder: text that stands for an image.
        expand: makes the text of an image from the output of the image processor and the image's index.
        unread: outputs of the image processor that the model does not take.
    """

    def __init__(
        self, image_processor: Any, placeholder: str, expand: Callable[[Any, int], str], unread: Sequence[str] = ()
    ) -> None:
        self.image_processor, self.image_token, self._expand = image_processor, placeholder, expand
        self._unread = unread
        self.tokenizer = make_tokenizer(placeholder)

    def __call__(self, text: list[str], images: Any = None, return_tensors: str = "pt", **options: Any) -> Any:
        made: dict[str, Any] = {}
        if images:
            made = dict(self.image_processor(images=images, return_tensors="pt"))
            parts = text[0].split(self.image_token)
            rest = [self._expand(made, i) + part for i, part in enumerate(parts[1:])]
            text = ["".join([parts[0], *rest])]
            made = {name: value for name, value in made.items() if name not in self._unread}
        ids = self.tokenizer(text[0], **options).input_ids
        made["input_ids"], made["attention_mask"] = torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.int64)
        if "image_position_ids" in made or "image_grid_thw" in made:
            made["mm_token_type_ids"] = (made["input_ids"] == get_id(self.image_token)).int()
        return made


@dataclass(frozen=True)
class VisionKind:
    """A family: its configuration, and its processor."""

    make_config: Callable[[], Any]
    make_processor: Callable[[], Any]
    placeholder: str
    is_native: bool = True  # whether its text part has native code in float32
    text_before: str = ""  # text around a placeholder, as the family's templates write it
    text_after: str = ""

    def write(self, text: str) -> str:
        """Replace `@` in a text by placeholders."""
        return text.replace("@", f"{self.text_before}{self.placeholder}{self.text_after}")


def get_id(token: str) -> int:
    """Return the id of a special token."""
    return SPECIAL.index(token)


def _make_llava() -> Any:
    images = hf.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    return hf.LlavaProcessor(
        images, make_tokenizer("<image>"), patch_size=14, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=TEMPLATE.replace("PLACEHOLDER", "<image>"),
    )  # fmt: skip


def _make_mistral3() -> Any:
    images = hf.PixtralImageProcessorPil(size={"longest_edge": 56}, patch_size=28)

    def expand(made: Any, i: int) -> str:
        height, width = (int(size) // 28 for size in made["image_sizes"][i])
        rows = ["[IMG]" * width + "[IMG_BREAK]"] * height
        return "".join(rows).removesuffix("[IMG_BREAK]") + "[IMG_END]"

    return PlainProcessor(images, "[IMG]", expand)


def _make_gemma3() -> Any:
    images = hf.Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    tokenizer = make_tokenizer("<boi>", boi_token="<boi>", eoi_token="<eoi>", image_token="<soft>")
    return hf.Gemma3Processor(
        images, tokenizer, image_seq_length=4, chat_template=TEMPLATE.replace("PLACEHOLDER", "<boi>")
    )


def _make_llava_next() -> Any:
    size = {"height": 28, "width": 28}
    images = hf.LlavaNextImageProcessorPil(size={"shortest_edge": 28}, crop_size=size, image_grid_pinpoints=PINPOINTS)
    return hf.LlavaNextProcessor(
        images, make_tokenizer("<image>"), patch_size=14, vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )  # fmt: skip


def _make_internvl() -> Any:
    images = hf.GotOcr2ImageProcessorPil(size={"height": 28, "width": 28}, crop_to_patches=False)
    return PlainProcessor(images, "<image>", lambda made, i: "<boi><image><eoi>", unread=("num_patches",))


def _make_qwen() -> Any:
    size = {"shortest_edge": 14 * 14, "longest_edge": 14 * 14 * 12}
    images = hf.Qwen2VLImageProcessorPil(size=size, patch_size=7, merge_size=2, temporal_patch_size=2)
    return PlainProcessor(
        images, "<|image_pad|>", lambda made, i: "<|image_pad|>" * (int(made["image_grid_thw"][i].prod()) // 4)
    )


QWEN_IDS = {
    "image_token_id": get_id("<|image_pad|>"), "video_token_id": get_id("<|video_pad|>"),
    "vision_start_token_id": get_id("<|vision_start|>"), "vision_end_token_id": get_id("<|vision_end|>"),
}  # fmt: skip
HYBRID = {
    "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": ROPE["rope_parameters"] | {"partial_rotary_factor": 1.0},
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
PINPOINTS = [[28, 56], [56, 28], [56, 56]]


def _make_gemma4() -> Any:
    made = hf.Gemma4ImageProcessorPil(patch_size=7, max_soft_tokens=70, pooling_kernel_size=2, do_resize=False)

    def images(images: Sequence[Image.Image], return_tensors: str) -> Any:
        """Process images of few tokens: those of transformers have 70 at least."""
        small = [image.resize((image.width // 14 * 14, image.height // 14 * 14)) for image in images]
        return made(images=small, return_tensors=return_tensors)

    def expand(made: Any, i: int) -> str:
        return "<boi>" + "<soft>" * int(made["num_soft_tokens_per_image"][i]) + "<eoi>"

    return PlainProcessor(images, "<soft>", expand, unread=("num_soft_tokens_per_image",))


def make_gemma4_kind(**text: Any) -> VisionKind:
    """Make Gemma 4 with further settings of its text part."""
    return VisionKind(
        lambda: hf.Gemma4Config(
            text_config=TEXT | SLIDING | {"global_head_dim": 16, "tie_word_embeddings": False} | text,
            vision_config=EYES | {"head_dim": 8, "num_key_value_heads": 2, "patch_size": 7, "pooling_kernel_size": 2,
                                  "position_embedding_size": 64},
            audio_config=None, tie_word_embeddings=False, image_token_id=get_id("<soft>"), audio_token_id=119,
            video_token_id=get_id("<|video_pad|>"), boi_token_id=get_id("<boi>"), eoi_token_id=get_id("<eoi>"),
        ),
        _make_gemma4, "<soft>", is_native=False,
    )  # fmt: skip


def make_qwen_kind(make_config: Callable[[], Any], is_native: bool = True) -> VisionKind:
    """Make a family whose templates write tokens around a placeholder."""
    return VisionKind(make_config, _make_qwen, "<|image_pad|>", is_native, "<|vision_start|> ", " <|vision_end|>")


KINDS = {
    "llava": VisionKind(
        lambda: hf.LlavaConfig(
            text_config=hf.LlamaConfig(**TEXT), vision_config=hf.CLIPVisionConfig(**EYES),
            image_token_index=get_id("<image>"),
        ),
        _make_llava, "<image>",
    ),
    "mistral3": VisionKind(
        lambda: hf.Mistral3Config(
            text_config=hf.MistralConfig(**TEXT), vision_config=hf.PixtralVisionConfig(**EYES | {"image_size": 56}),
            image_token_index=get_id("[IMG]"), spatial_merge_size=2,
        ),
        _make_mistral3, "[IMG]",
    ),
    "gemma3": VisionKind(
        lambda: hf.Gemma3Config(
            text_config=TEXT | SLIDING, vision_config=EYES | {"image_size": 56}, mm_tokens_per_image=4,
            image_token_index=get_id("<soft>"), boi_token_index=get_id("<boi>"), eoi_token_index=get_id("<eoi>"),
            tie_word_embeddings=False,
        ),
        _make_gemma3, "<boi>",
    ),
    "gemma4": make_gemma4_kind(
        hidden_size_per_layer_input=0, use_bidirectional_attention="vision",
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        num_hidden_layers=4,
    ),
    "gemma4_small": make_gemma4_kind(
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=120, num_kv_shared_layers=2, num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    ),
    "qwen2_5_vl": make_qwen_kind(
        lambda: hf.Qwen2_5_VLConfig(
            text_config=NARROW | ROPE, vision_config=QWEN_EYES | {"fullatt_block_indexes": [0], "window_size": 28},
            **QWEN_IDS,
        )
    ),
    "qwen3_vl": make_qwen_kind(
        lambda: hf.Qwen3VLConfig(
            text_config=TEXT | ROPE, vision_config=QWEN_EYES | {"deepstack_visual_indexes": [0, 1]}, **QWEN_IDS
        )
    ),
    "qwen3_5": make_qwen_kind(
        lambda: hf.Qwen3_5Config(text_config=TEXT | HYBRID, vision_config=QWEN_EYES, **QWEN_IDS)
    ),
    "qwen2_vl": make_qwen_kind(
        lambda: hf.Qwen2VLConfig(
            text_config=NARROW | ROPE, vision_config=QWEN_EYES | {"embed_dim": 16, "hidden_size": 64, "mlp_ratio": 2},
            **QWEN_IDS,
        )
    ),
    "qwen3_vl_moe": make_qwen_kind(
        lambda: hf.Qwen3VLMoeConfig(
            text_config=TEXT | ROPE | EXPERTS, vision_config=QWEN_EYES | {"deepstack_visual_indexes": [0, 1]},
            **QWEN_IDS,
        ),
        is_native=False,
    ),
    "llava_next": VisionKind(
        lambda: hf.LlavaNextConfig(
            text_config=hf.LlamaConfig(**TEXT), vision_config=hf.CLIPVisionConfig(**EYES),
            image_token_index=get_id("<image>"), image_grid_pinpoints=PINPOINTS,
        ),
        _make_llava_next, "<image>",
    ),
    "vipllava": VisionKind(
        lambda: hf.VipLlavaConfig(
            text_config=hf.LlamaConfig(**TEXT), vision_config=hf.CLIPVisionConfig(**EYES),
            vision_feature_layers=[-2, -1], image_token_index=get_id("<image>"),
        ),
        _make_llava, "<image>",
    ),
    "internvl": VisionKind(
        lambda: hf.InternVLConfig(
            text_config=hf.Qwen2Config(**NARROW),
            vision_config=hf.InternVLVisionConfig(**EYES | {"image_size": [28, 28], "patch_size": [14, 14]}),
            image_token_id=get_id("<image>"),
        ),
        _make_internvl, "<image>",
    ),
}  # fmt: skip
CORE_KINDS = (
    "llava",
    "mistral3",
    "gemma3",
    "gemma4",
    "gemma4_small",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_5",
)  # fmt: skip - each with mechanisms of its own


@cache
def make_model(kind: str, seed: int = 0) -> Any:
    """Make a random model in float32. Copies of it may be changed, and it may not."""
    torch.manual_seed(seed)
    model = hf.AutoModelForImageTextToText.from_config(KINDS[kind].make_config())
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1 and not weight.any():  # a projector that starts at zero hides its images
                weight.normal_(0, 0.3)
    if kind == "qwen3_vl_moe":
        model.set_experts_implementation("eager")  # the default takes no float64
    model.generation_config.eos_token_id = 2
    return model.eval()


def save_vision_model(kind: str, folder: Path, seed: int = 0) -> Any:
    """Save a random model, and its processor if transformers has it without torchvision. Returns the model."""
    model = make_model(kind, seed)
    model.save_pretrained(folder)
    KINDS[kind].make_processor().save_pretrained(folder)
    return model


def wrap_vision_model(
    model: Any, kind: str, is_fused: bool = True, max_images: int = 4, dtype: torch.dtype = torch.float32
) -> HFModel:
    """Wrap a copy of a model as a target that reads images."""
    copied = copy.deepcopy(model).to(dtype)
    implementations = read_implementations(copied)
    target = HFModel.wrap_model(copied, kind, is_fused)
    add_image_encoder(target, KINDS[kind].make_processor(), implementations, max_images)
    return target


def make_image(seed: int = 0, size: tuple[int, int] = (40, 30)) -> Image.Image:
    """Make an image of noise, the same for one seed."""
    generator = torch.Generator().manual_seed(seed)
    return Image.fromarray(torch.randint(0, 256, (size[1], size[0], 3), generator=generator, dtype=torch.uint8).numpy())


@torch.no_grad()
def generate_reference(model: Any, kind: str, text: str, images: Sequence[Any], max_tokens: int) -> list[int]:
    """Return the greedy token ids of transformers' own `generate`."""
    inputs = KINDS[kind].make_processor()(text=[text], images=list(images) or None, return_tensors="pt")
    made = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False, eos_token_id=None)
    return made[0, inputs["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]
