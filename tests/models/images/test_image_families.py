"""Images of every family are decoded as transformers' own `generate` does, with drafts as without."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers as hf

from foredraft import LLM, ForedraftError, Sampling
from foredraft.drafters.draft_model.architecture import DraftSize, shrink_config
from foredraft.image_prompt import EncodedImagePrompt, ImagePrompt
from foredraft.llm import MemoryLimits
from foredraft.models.images.families import TESTED_FAMILIES
from tests.support import tiny_models
from tests.support.tiny_vision import (
    CORE_KINDS,
    KINDS,
    TEXT,
    generate_reference,
    make_image,
    make_model,
    wrap_vision_model,
)

NUM_TOKENS = 16
GREEDY = Sampling(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
SAMPLED = Sampling(max_tokens=NUM_TOKENS, temperature=0.8, seed=3, ignore_eos=True)
TEXTS = [
    "user : @ what is in the picture @ and this",
    "@ red",
    "a b c d a b c d @ a b",
    "user : what is @ @ @ not that",
]
SIZES = [(40, 30), (30, 52), (64, 64), (28, 90), (80, 33)]
DTYPES = {True: torch.float32, False: torch.float64}  # torch's operators round a draft otherwise than single tokens


def _list_paths(kinds: Iterable[str]) -> Any:
    """List the families with native code and with torch's operators; some have the latter alone."""
    paths = [(kind, is_fused) for kind in kinds for is_fused in (True, False) if KINDS[kind].is_native or not is_fused]
    names = [f"{kind}-{'native' if is_fused else 'torch'}" for kind, is_fused in paths]
    return pytest.mark.parametrize(("kind", "is_fused"), paths, ids=names)


EACH_PATH, EACH_CORE_PATH = _list_paths(KINDS), _list_paths(CORE_KINDS)
EACH_KIND = pytest.mark.parametrize("kind", CORE_KINDS)


def list_prompts(kind: str) -> list[ImagePrompt]:
    images = iter([make_image(seed, size) for seed, size in enumerate(SIZES * 2)])
    return [ImagePrompt(KINDS[kind].write(text), [next(images) for _ in range(text.count("@"))]) for text in TEXTS]


def make_text_prompts() -> list[list[int]]:
    return [[15, 16, 17, 18, 19, 20, 15, 16, 17], [22] * 21]


@cache
def make_llm(kind: str, is_fused: bool) -> LLM:
    target = wrap_vision_model(make_model(kind), kind, is_fused, dtype=DTYPES[is_fused])
    assert target.runs_native == is_fused
    return LLM(target, None, tokenizer=KINDS[kind].make_processor().tokenizer, is_debug=True)


def make_drafter(name: str, llm: LLM) -> Any:
    if name != "draft_model":
        return name
    torch.manual_seed(1)
    config = llm.target.model.config
    # One layer of Gemma 4 is no model: its last layers share the keys of earlier ones.
    config = hf.LlamaConfig(**TEXT) if config.model_type == "gemma4" else shrink_config(config, DraftSize(1, 32))
    return {"method": "draft_model", "model": hf.AutoModelForCausalLM.from_config(config), "num_speculative_tokens": 3}


def generate(llm: LLM, prompts: Any, sampling: Sampling = GREEDY) -> list[list[int]]:
    return [list(completion.token_ids) for completion in llm.generate(prompts, sampling)]


def test_every_family_is_tried() -> None:
    assert {KINDS[kind].make_config().model_type for kind in KINDS} == TESTED_FAMILIES


@EACH_PATH
def test_images_are_decoded_as_transformers_does(kind: str, is_fused: bool) -> None:
    model = make_model(kind)
    expected = [generate_reference(model, kind, str(p.text), p.images, NUM_TOKENS) for p in list_prompts(kind)]
    assert generate(make_llm(kind, is_fused), list_prompts(kind)) == expected


@pytest.mark.parametrize("name", ["ngram", "suffix", "lookahead", "early_exit", "draft_model"])
@EACH_CORE_PATH
def test_drafts_change_no_token(kind: str, is_fused: bool, name: str) -> None:
    llm = make_llm(kind, is_fused)
    drafted = llm.with_drafter(make_drafter(name, llm), verify="match")
    for sampling in (GREEDY, SAMPLED):
        assert generate(drafted, list_prompts(kind), sampling) == generate(llm, list_prompts(kind), sampling)
    assert drafted.engine.drafter.num_failures == 0


@EACH_CORE_PATH
def test_a_request_in_a_mixed_batch_is_as_alone(kind: str, is_fused: bool) -> None:
    llm = make_llm(kind, is_fused)
    prompts: list[Any] = [x for pair in zip(list_prompts(kind), make_text_prompts() * 2, strict=True) for x in pair]
    alone = [generate(llm.with_drafter(None), [prompt])[0] for prompt in prompts]
    assert generate(llm.with_drafter("ngram"), prompts) == alone
    limits = MemoryLimits(kv_tokens=160, page_size=4, max_batch=8, max_step_tokens=48)
    small = tiny_models.limit_memory(llm, "ngram", limits, max_chunk=3)
    assert generate(small, prompts) == alone
    assert small.engine.scheduler.num_preempted > 0


@EACH_KIND
def test_samples_of_a_prompt_share_its_images(kind: str) -> None:
    llm = make_llm(kind, KINDS[kind].is_native).with_drafter("ngram", verify="match")
    prompt, sampling = list_prompts(kind)[0], Sampling(n=3, temperature=0.8, seed=3, max_tokens=8, ignore_eos=True)
    together = generate(llm, [prompt], sampling)
    plain = make_llm(kind, KINDS[kind].is_native).with_drafter(None)
    assert together == generate(plain, [prompt], sampling)
    assert len({tuple(tokens) for tokens in together}) > 1


@EACH_CORE_PATH
def test_another_image_changes_the_output(kind: str, is_fused: bool) -> None:
    llm, text = make_llm(kind, is_fused).with_drafter(None), KINDS[kind].write("user : @ what is @")
    first, second, third = (make_image(seed, (64, 64)) for seed in range(3))
    outputs = generate(llm, [ImagePrompt(text, pair) for pair in ([first, second], [first, third], [second, first])])
    assert len({tuple(tokens) for tokens in outputs}) == 3


def count_hits(llm: LLM, prompt: ImagePrompt) -> tuple[list[int], int]:
    """Return the output of a prompt, and the tokens that the prefix cache had of it."""
    before = llm.engine.scheduler.prefix_hits
    [tokens] = generate(llm, [prompt])
    return tokens, llm.engine.scheduler.prefix_hits - before


@pytest.mark.parametrize("kind", [kind for kind in CORE_KINDS if kind != "qwen3_5"])  # not every page has a state there
def test_pages_are_shared_by_equal_images_alone(kind: str) -> None:
    llm = tiny_models.limit_memory(make_llm(kind, KINDS[kind].is_native), None, MemoryLimits(page_size=4))
    text = "a b c d a b c d @ " + "red green blue " * 8
    one = ImagePrompt(KINDS[kind].write(text), [make_image(1)])
    first, equal = count_hits(llm, one), count_hits(llm, one)
    _, other = count_hits(llm, replace(one, images=[make_image(2)]))
    _, longer = count_hits(llm, ImagePrompt(KINDS[kind].write(text + "@"), [make_image(1), make_image(2)]))
    assert first[1] == 0
    assert equal[1] > 24
    assert equal[0] == first[0]
    assert other == 8  # the text before the image
    assert longer > 24


@pytest.mark.parametrize("change", ["states", "positions"])
def test_an_error_in_an_image_would_be_noticed(change: str) -> None:
    """A mutant of the rows, or of the positions after an image, has another output than transformers."""
    kind, llm = "qwen2_5_vl", make_llm("qwen2_5_vl", is_fused=True).with_drafter(None)
    prompt = list_prompts(kind)[0]
    [request] = llm.prepare(prompt, GREEDY)
    images = request.request.spec.images
    assert images is not None
    broken = {"states": images.states.flip(0), "positions": torch.arange(images.positions.shape[1]).expand(3, -1)}
    object.__setattr__(images, change, broken[change])
    expected = generate_reference(make_model(kind), kind, str(prompt.text), prompt.images, NUM_TOKENS)
    assert generate(llm, [EncodedImagePrompt(request.request.spec.prompt, images)]) != [expected]


def test_a_target_without_image_part_refuses_images() -> None:
    with pytest.raises(ForedraftError, match="max_images"):
        LLM(tiny_models.llama(), None, tokenizer=None).generate([ImagePrompt([5, 6], [make_image()])])
