"""With images in a batch, speculative and plain decoding are bit-equal too, for every method."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foredraft import LLM, Completion
from foredraft.image_prompt import EncodedImagePrompt
from foredraft.llm import MemoryLimits
from foredraft.placed_images import EncodedImage, PlacedImages
from tests.invariants.test_bits import GREEDY, PROMPTS, SAMPLED, drafter, list_results, plain
from tests.support import tiny_models
from tests.support.library_setups import NATIVE
from tests.support.method_cases import EACH_CASE

pytestmark = NATIVE
NUM_TOKENS = 4
HIDDEN, LENGTH = 64, 9  # of an image: text of one token, seven rows, and text of one token


def make_states(seed: int) -> Tensor:
    return torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(seed))


def make_image(seed: int, has_block: bool = False) -> EncodedImage:
    tokens, rows = (3, *[4] * 7, 5), tuple(range(1, 8))
    layers = (0.3 * make_states(seed + 100), 0.3 * make_states(seed + 200))
    return EncodedImage(tokens, rows, make_states(seed), ((1, 8),) if has_block else (), layers)


def place(text: Sequence[int], *images: EncodedImage) -> EncodedImagePrompt:
    """Put images into a text, the first after its second token, then one after every further token."""
    tokens, places = list(text[:2]), []
    for image, token in zip(images, text[2:], strict=False):
        places.append((len(tokens), image))
        tokens += [*image.tokens, token]
    tokens += text[2 + len(images) :]
    return EncodedImagePrompt(tuple(tokens), PlacedImages.place(len(tokens), places))


MIXED = [
    place(PROMPTS[0], make_image(1)),
    PROMPTS[1],
    place(PROMPTS[2], make_image(2, has_block=True), make_image(3, has_block=True)),
    place(PROMPTS[3], make_image(1)),
    place(PROMPTS[4], make_image(1), make_image(4, has_block=True)),
    place(PROMPTS[4], make_image(1), make_image(5, has_block=True)),
]


def generate(llm: LLM, sampling=GREEDY) -> list[Completion]:
    return llm.generate(MIXED, sampling)


def generate_alone(sampling=GREEDY) -> list[Completion]:
    """Generate every request by itself, on pages that no other request has filled."""
    return [
        completion
        for prompt in MIXED
        for completion in plain(torch.bfloat16).with_drafter(None).generate([prompt], sampling)
    ]


@pytest.mark.parametrize("name", EACH_CASE)
def test_every_bit_is_that_of_plain_decoding(name: str) -> None:
    accepted = 0
    for sampling in (GREEDY, SAMPLED):
        expected = generate_alone(sampling)
        llm = plain(torch.bfloat16).with_drafter(drafter(name, NUM_TOKENS, torch.bfloat16), NUM_TOKENS, verify="match")
        found = generate(llm, sampling)
        assert list_results(found) == list_results(expected)
        assert llm.engine.drafter.num_failures == 0
        accepted += sum(c.stats.num_accepted for c in found)
    assert accepted > 0


@pytest.mark.parametrize("part", ["states", "layers", "block", "image"])
def test_every_part_of_an_image_changes_the_output(part: str) -> None:
    whole = make_image(1, has_block=True)
    parts = {
        "states": replace(whole, states=make_states(2)),
        "layers": replace(whole, layer_states=whole.layer_states[::-1]),
        "block": make_image(1),
        "image": make_image(2, has_block=True),
    }
    llm = plain(torch.bfloat16).with_drafter(None)
    outputs = llm.generate([place(PROMPTS[0], image) for image in (whole, parts[part])], GREEDY)
    assert outputs[0].logprobs != outputs[1].logprobs


@pytest.mark.parametrize("max_chunk", [3, 5, 16])  # a block has seven tokens
def test_preemption_and_chunked_prompts_change_no_bit(max_chunk: int) -> None:
    limits = MemoryLimits(kv_tokens=168, page_size=4, max_batch=6, max_step_tokens=48)
    llm = tiny_models.limit_memory(plain(torch.bfloat16), "ngram", limits, max_chunk=max_chunk)
    for sampling in (GREEDY, SAMPLED):
        assert list_results(generate(llm, sampling)) == list_results(generate_alone(sampling))
    assert llm.engine.scheduler.num_preempted > 0
