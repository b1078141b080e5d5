"""With LoRA adapters in a batch, speculative and plain decoding are bit-equal too, for every method."""

from collections.abc import Iterator

import pytest
import torch

from foredraft import LLM, Completion, RequestOptions
from foredraft.llm import MemoryLimits
from tests.invariants.test_bits import GREEDY, PROMPTS, SAMPLED, drafter, list_results, plain
from tests.support import tiny_models
from tests.support.library_setups import NATIVE, ON_CPU
from tests.support.lora_folders import write_adapter
from tests.support.method_cases import EACH_CASE

pytestmark = [NATIVE, ON_CPU]
NAMES = ["one", None, "two", "two", "one"]  # adapters of the prompts
NUM_TOKENS = 4


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Iterator[LLM]:
    """The target of test_bits.py with two adapters."""
    llm, model = plain(torch.bfloat16), tiny_models.llama(hidden=64)
    for seed, name in enumerate(("one", "two"), 1):
        llm.add_adapter(name, write_adapter(tmp_path_factory.mktemp(name), model, rank=2 + seed, seed=seed, std=0.05))
    yield llm
    for name in llm.adapter_names:
        llm.remove_adapter(name)


def generate(llm: LLM, names: list[str | None], sampling=GREEDY) -> list[Completion]:
    return llm.generate(PROMPTS, sampling, options=[RequestOptions(adapter=name) for name in names])


@pytest.mark.parametrize("name", EACH_CASE)
def test_every_bit_is_that_of_plain_decoding(name: str, base: LLM) -> None:
    accepted = 0
    for sampling in (GREEDY, SAMPLED):
        expected = generate(base, NAMES, sampling)
        llm = base.with_drafter(drafter(name, NUM_TOKENS, torch.bfloat16), NUM_TOKENS, verify="match")
        found = generate(llm, NAMES, sampling)
        assert list_results(found) == list_results(expected)
        assert llm.engine.drafter.num_failures == 0
        accepted += sum(c.stats.num_accepted for c in found)
    assert accepted > 0


def test_adapters_change_their_requests_alone(base: LLM) -> None:
    without, mixed = generate(base, [None] * len(NAMES)), generate(base, NAMES)
    equal = [a == b for a, b in zip(list_results(without), list_results(mixed), strict=True)]
    assert equal == [name is None for name in NAMES]


def test_preemption_and_chunked_prompts_change_no_bit(base: LLM) -> None:
    limits = MemoryLimits(kv_tokens=132, page_size=4, max_batch=8, max_step_tokens=48)
    llm = tiny_models.limit_memory(base, "ngram", limits, max_chunk=5)
    assert list_results(generate(llm, NAMES)) == list_results(generate(base, NAMES))
    assert llm.engine.scheduler.num_preempted > 0
