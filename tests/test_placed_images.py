"""Places, positions and digests of images in prompts, beside what transformers computes for whole prompts."""

from dataclasses import replace

import pytest
import torch
import transformers as hf

from foredraft import ForedraftError
from foredraft.engine.step_chunks import SchedulerLimits, select_chunks
from foredraft.placed_images import EncodedImage, PlacedImages, expand_placeholders
from foredraft.sampling.params import Sampling
from tests.support.requests import make_request
from tests.support.tiny_vision import KINDS, make_image, make_model, wrap_vision_model

IMAGE = EncodedImage((3, 4, 4, 4, 5), (1, 2, 3), torch.arange(6.0).view(3, 2), ((1, 4),))


def place(*starts: int, num_tokens: int = 20, image: EncodedImage = IMAGE) -> PlacedImages:
    return PlacedImages.place(num_tokens, [(start, image) for start in starts])


def test_placeholders_become_the_tokens_of_their_images() -> None:
    other = replace(IMAGE, tokens=(7, 8))
    ids, starts = expand_placeholders([1, 9, 9, 2], 9, [IMAGE, other])
    assert ids == [1, 3, 4, 4, 4, 5, 7, 8, 2]
    assert starts == [1, 6]
    for images in ([IMAGE], [IMAGE] * 3):
        with pytest.raises(ForedraftError, match=f"2 image placeholders and {len(images)} images"):
            expand_placeholders([1, 9, 9, 2], 9, images)


def test_rows_and_blocks_stand_at_their_images() -> None:
    images = place(2, 10)
    assert images.indices == (3, 4, 5, 11, 12, 13)
    assert images.blocks == ((3, 6), (11, 14))
    assert [images.find_rows(*pair) for pair in ((0, 3), (4, 12), (14, 20))] == [range(0), range(1, 4), range(6, 6)]
    assert [images.count_ahead(i) for i in range(2, 8)] == [0, 2, 1, 0, 0, 0]
    assert images.longest_block == 3


@pytest.mark.parametrize(
    ("start", "size", "fitted"),
    [(0, 3, 3), (0, 4, 3), (0, 5, 3), (0, 6, 6), (3, 1, 3), (4, 1, 2), (5, 1, 1), (6, 2, 2)],
)
def test_a_chunk_ends_in_no_block(start: int, size: int, fitted: int) -> None:
    assert place(2).fit_chunk(start, size) == fitted


def test_a_block_waits_for_a_step_with_room_for_it() -> None:
    prompt = make_request(0, range(20), Sampling(), images=place(2))
    decoding = [make_request(i, [5], Sampling(), num_computed=0) for i in (1, 2)]
    chunks = [select_chunks([*decoding, prompt], SchedulerLimits(max_step_tokens=size, max_chunk=4)) for size in (8, 4)]
    assert [size for _, size in chunks[0]] == [1, 1, 3]
    prompt.num_computed = 3
    few, enough = (
        select_chunks([*decoding, prompt], SchedulerLimits(max_step_tokens=size, max_chunk=2)) for size in (4, 5)
    )
    assert [size for _, size in few] == [1, 1]
    assert [size for _, size in enough] == [1, 1, 3]


def test_a_digest_covers_what_the_page_depends_on() -> None:
    images, changed = place(2, 10), replace(IMAGE, states=IMAGE.states + torch.tensor([[0.0], [0.0], [1.0]]))
    assert images.digest_tokens(0, 3) == images.digest_tokens(6, 10) == images.digest_tokens(14, 99) == b""
    assert images.digest_tokens(0, 4) != place(2, 10, image=changed).digest_tokens(0, 4)  # a block depends on all of it
    causal = [replace(each, blocks=()) for each in (IMAGE, changed)]
    assert place(2, image=causal[0]).digest_tokens(0, 4) == place(2, image=causal[1]).digest_tokens(0, 4)
    assert place(2, image=causal[0]).digest_tokens(4, 8) != place(2, image=causal[1]).digest_tokens(4, 8)
    assert place(2, 10).digest_tokens(8, 16) == place(2, 10).digest_tokens(8, 16)
    layers = replace(IMAGE, layer_states=(IMAGE.states,))
    assert place(2, image=layers).digest_tokens(0, 8) != place(2).digest_tokens(0, 8)


def test_a_shifted_page_without_an_image_has_its_own_digest() -> None:
    positions = torch.tensor([[0, 1, 1, 1, 2]] * 3)
    images = place(2, image=replace(IMAGE, positions=positions))
    assert images.shift == -2
    assert images.digest_tokens(8, 12) != images.digest_tokens(12, 16)
    assert images.digest_tokens(40, 44) != place(9, image=replace(IMAGE, positions=positions)).digest_tokens(40, 44)[:1]


def test_positions_are_those_of_transformers() -> None:
    kind, model = KINDS["qwen2_5_vl"], make_model("qwen2_5_vl")
    assert isinstance(model, hf.Qwen2_5_VLForConditionalGeneration)
    pictures = [make_image(0), make_image(1, (64, 30)), make_image(2, (20, 90))]
    text = kind.write("a b @ c @ d e f @ g h")
    inputs = kind.make_processor()(text=[text], images=pictures)
    expected, shift = model.model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], inputs["image_grid_thw"]
    )
    encoder = wrap_vision_model(model, "qwen2_5_vl").image_encoder
    assert encoder is not None
    ids, images = encoder.place(encoder.processor.tokenizer(text).input_ids, encoder.read(pictures))
    assert ids == inputs["input_ids"][0].tolist()
    assert images.positions is not None
    assert torch.equal(images.positions, expected[:, 0])
    assert images.shift == int(shift)
    assert images.list_positions([len(ids), len(ids) + 5])[0].tolist() == [len(ids) + images.shift + i for i in (0, 5)]
