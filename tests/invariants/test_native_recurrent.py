"""Models with recurrent layers as native code: drafts, chunks and batches change no bit of a probability or a state.

Guards against a state that depends on the rows beside it, and against sums in another order in a chunk or a tree.
"""

import random
from functools import cache
from typing import Any

import pytest
import torch

from foredraft import LLM, Sampling
from foredraft.models.hf import HFModel
from tests.support.engine_fakes import make_transcript
from tests.support.hybrids import (
    NATIVE_HYBRIDS,
    generate_greedily,
    make_model,
    make_native_hybrid,
    make_native_model,
)
from tests.support.library_setups import NATIVE, ON_CPU
from tests.support.recurrent_steps import (
    CHAIN,
    GREEDY,
    LENGTH,
    LIMITS,
    PROMPTS,
    ROOMY,
    TREE,
    check_only_cached_states,
    ids,
    make_engine_with_drafts,
    run_random_steps,
)

pytestmark = [NATIVE, ON_CPU]


@cache
def generate_native_expected(family: str) -> list[list[int]]:
    return [generate_greedily(make_native_model(family), prompt, LENGTH) for prompt in PROMPTS]


@pytest.mark.parametrize("drafter", [None, "ngram", "early_exit", CHAIN, TREE], ids=str)
@pytest.mark.parametrize("family", NATIVE_HYBRIDS)
def test_the_output_of_native_code_is_that_of_transformers(family: str, drafter: Any) -> None:
    if isinstance(drafter, dict):
        drafter = drafter | {"model": make_native_model(family)}
    llm = LLM(make_native_model(family), drafter, num_speculative_tokens=3, limits=LIMITS, is_debug=True, fused=True)
    assert llm.target.runs_native
    assert ids(llm.generate(PROMPTS, GREEDY)) == generate_native_expected(family)
    check_only_cached_states(llm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", NATIVE_HYBRIDS)
def test_native_log_probabilities_do_not_depend_on_drafts_chunks_or_the_batch(family: str, dtype: torch.dtype) -> None:
    """The last bit included, with preemptions and prompts in chunks beside a roomy engine without drafts."""
    sampling = Sampling(temperature=0.8, seed=5, max_tokens=LENGTH, ignore_eos=True, logprobs=2)
    model = make_native_model(family, dtype)
    plain = LLM(model, None, limits=ROOMY, fused=True).generate(PROMPTS, sampling)
    drafter = TREE | {"model": make_native_model(family, dtype)}
    speculative = LLM(model, drafter, num_speculative_tokens=3, limits=LIMITS, fused=True).generate(PROMPTS, sampling)
    assert [c.logprobs for c in speculative] == [c.logprobs for c in plain]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("family", NATIVE_HYBRIDS)
def test_quantised_log_probabilities_do_not_depend_on_drafts(family: str, quantization: str) -> None:
    sampling = Sampling(temperature=0.8, seed=5, max_tokens=LENGTH, ignore_eos=True, logprobs=2)
    found = []
    for drafter, limits in ((None, ROOMY), ("early_exit", LIMITS)):
        llm = LLM(make_native_model(family), drafter, limits=limits, quantization=quantization)
        assert llm.target.runs_native
        found.append([completion.logprobs for completion in llm.generate(PROMPTS, sampling)])
    assert found[0] == found[1]


@pytest.mark.parametrize("family", NATIVE_HYBRIDS)
def test_native_states_after_random_steps_are_those_of_a_fresh_pass(family: str) -> None:
    run_random_steps(family, 200, 5, is_native=True)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", NATIVE_HYBRIDS)
def test_native_states_after_many_random_steps(family: str) -> None:
    run_random_steps(family, 2000, 10, is_native=True)


def test_a_native_hybrid_takes_no_adapters_and_int8_keys() -> None:
    lm = make_native_hybrid("qwen3_5")
    assert lm.adapter_obstacle is not None
    llm = LLM(make_native_model("qwen3_5"), None, limits=ROOMY, fused=True, kv_dtype="int8")
    assert [len(output) for output in ids(llm.generate(PROMPTS, GREEDY))] == [LENGTH] * len(PROMPTS)


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next", "lfm2_moe"])
def test_modules_with_native_recurrences_give_the_output_of_transformers(family: str) -> None:
    lm = HFModel.wrap_model(make_model(family).float(), family, is_fused=True)
    assert not lm.runs_native
    engine, _ = make_engine_with_drafts(lm, random.Random(family))
    transcripts = [make_transcript(prompt, GREEDY, i) for i, prompt in enumerate(PROMPTS)]
    for transcript in transcripts:
        engine.add(transcript)
    while engine.has_work:
        engine.step()
    model = make_model(family).float()
    assert [t.request.output for t in transcripts] == [generate_greedily(model, p, LENGTH) for p in PROMPTS]
