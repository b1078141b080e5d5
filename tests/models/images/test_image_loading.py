"""Models that cannot be served with images are refused by name, with the reason and what to do."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft import LLM, ForedraftError, ImagePrompt, Sampling
from foredraft.models.images.decoder_input import encode_image
from foredraft.models.images.encoder import ImageEncoder
from tests.support import tiny_models, tiny_seq2seq
from tests.support.tiny_vision import KINDS, make_image, make_model, save_vision_model, wrap_vision_model

SAMPLING = Sampling(max_tokens=6, temperature=0, ignore_eos=True, logprobs=1)


@pytest.mark.parametrize("kind", ["llava", "gemma3"])
@pytest.mark.parametrize("options", [{}, {"fused": False}, {"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
def test_a_folder_is_loaded_with_its_image_part(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    save_vision_model(kind, tmp_path)
    prompt = ImagePrompt(KINDS[kind].write("a b @ c d"), [make_image()])
    with LLM(str(tmp_path), None, max_images=1, **options) as llm:
        [plain] = llm.generate([prompt], SAMPLING)
        assert llm.with_drafter("ngram").generate([prompt], SAMPLING)[0].token_ids == plain.token_ids
        [other] = llm.generate([ImagePrompt(prompt.text, [make_image(5)])], SAMPLING)
        assert other.logprobs != plain.logprobs
        with pytest.raises(ForedraftError, match="has 2 images and at most 1"):
            llm.generate([ImagePrompt(KINDS[kind].write("@ @"), [make_image()] * 2)], SAMPLING)


def test_other_models_and_options_are_refused(tmp_path: Path) -> None:
    save_vision_model("llava", tmp_path / "llava")
    tiny_models.llama().save_pretrained(tmp_path / "text")
    refused = [
        ({"model": make_model("llava")}, "needs the processor of the model"),
        ({"model": str(tmp_path / "llava"), "tensor_parallel_size": 2}, "one process"),
        ({"model": str(tmp_path / "llava"), "max_images": -1}, "from 0 up"),
        ({"model": str(tmp_path / "llava"), "max_images": True}, "from 0 up"),
        ({"model": str(tmp_path / "text"), "tokenizer": None}, "processor|reads text alone"),
    ]
    for options, message in refused:
        with pytest.raises(ForedraftError, match=message):
            LLM(**{"drafter": None, "max_images": 1} | options)


def test_a_folder_without_a_processor_is_refused(tmp_path: Path) -> None:
    make_model("llava").save_pretrained(tmp_path)
    with pytest.raises(ForedraftError, match=r"processor of .* leave max_images out"):
        LLM(str(tmp_path), None, max_images=1, tokenizer=None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("paligemma", "all tokens of its prompts see each other"),
        ("llama4", "chunked attention"),
        ("mllama", "cross-attention"),
        ("idefics9", "were not compared with transformers"),
    ],
)
def test_families_are_refused_by_name(change: str, message: str) -> None:
    model = copy.deepcopy(make_model("llava"))
    model.config.model_type = change
    with pytest.raises(ForedraftError, match=f"llava cannot be served with images: .*{message}.*leave max_images out"):
        wrap_vision_model(model, "llava", is_fused=False)


def test_an_encoder_decoder_reads_no_images() -> None:
    llm = LLM(tiny_seq2seq.make_model("t5"), None, tokenizer=None)
    with pytest.raises(ForedraftError, match="reads no images"):
        llm.generate([ImagePrompt([5, 6], [make_image()])])


def make_far_mask(arguments: dict[str, Any]) -> dict[str, Any]:
    length = arguments["inputs_embeds"].shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    mask[0, -1] = True
    return {"attention_mask": mask[None, None]}


CHANGES = {
    "reads per_layer_inputs": lambda arguments: {"per_layer_inputs": arguments["inputs_embeds"] + 1},
    "no block of tokens": make_far_mask,
    "several ways": lambda arguments: {
        "attention_mask": {
            "a": torch.ones(1, 1, 4, 4, dtype=torch.bool), "b": torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
        }
    },
    "other places": lambda arguments: {
        "deepstack_visual_embeds": [torch.ones(1)], "visual_pos_masks": torch.zeros(1, 4, dtype=torch.bool)
    },
    "no state of an image": lambda arguments: {
        "inputs_embeds": make_model("llava").get_input_embeddings()(torch.tensor([[3] * 4]))
    },
}  # fmt: skip


@pytest.mark.parametrize("message", CHANGES)
def test_what_a_decoder_reads_beside_embeddings_is_refused(message: str) -> None:
    """A family that does more than the engine places must not be computed wrongly."""
    model = copy.deepcopy(make_model("llava"))
    encoder = wrap_vision_model(make_model("llava"), "llava").image_encoder
    assert isinstance(encoder, ImageEncoder)
    made = encoder._process(make_image())
    assert len(encode_image(model, encoder.implementations, made).indices) == 4
    change = CHANGES[message]
    model.get_decoder().register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | change(kwargs)), with_kwargs=True
    )
    with pytest.raises(ForedraftError, match=message):
        encode_image(model, encoder.implementations, made)


def test_transformers_text_tokens_are_those_of_the_processor() -> None:
    """Placeholders are replaced token by token here, and in the text there."""
    for kind, each in KINDS.items():
        processor, encoder = each.make_processor(), wrap_vision_model(make_model(kind), kind).image_encoder
        assert encoder is not None
        text, images = each.write("a @ b c @ d"), [make_image(0), make_image(1, (64, 64))]
        expected = processor(text=[text], images=images, return_tensors="pt")["input_ids"][0].tolist()
        assert encoder.place(processor.tokenizer(text).input_ids, encoder.read(images))[0] == expected
