"""On CPU, with native kernels, speculative and plain decoding are bit-equal, in bfloat16 too.

Not only the texts: the logits, and so every log-probability to its last bit. Elsewhere a pass over eight tokens rounds
otherwise than eight passes over one, and a near tie may fall either way; here there is nothing to explain away.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from foredraft import LLM, Completion, Sampling
from foredraft.drafters.common.tree_builder import TreeOptions
from foredraft.drafters.draft_model.drafter import DraftModel
from foredraft.drafters.interface import Drafter
from foredraft.drafters.method import VARIANT_BRANCHING, DrafterContext
from foredraft.drafters.registry import load_methods
from foredraft.llm import MemoryLimits
from foredraft.models.forward_batch import ForwardBatch
from foredraft.models.hf import HFModel
from tests.support import tiny_models
from tests.support.library_setups import EACH_SET, NATIVE, ON_CPU, THREAD_SETUPS, use_library
from tests.support.method_cases import (
    EACH_CASE,
    METHOD_CASES,
    list_missing_methods,
    pair_cases_with_rules,
)
from tests.support.tiny_vocabularies import CROSS_VOCAB_CASES

pytestmark = [NATIVE, ON_CPU]
PROMPTS: list[list[int]] = [
    [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6],
    [33],
    [11, 12] * 12,
    [(7 * i) % 31 + 4 for i in range(70)],
    [61, 62, 63, 64, 61, 62],
]
# warm, or a random model of low precision repeats itself; logprobs of the sampled distribution and of the raw one
GREEDY = Sampling(max_tokens=24, temperature=0, ignore_eos=True, logprobs=3, prompt_logprobs=1)
SAMPLED = Sampling(
    max_tokens=24, temperature=0.7, top_p=0.95, repetition_penalty=1.05, seed=11, ignore_eos=True, logprobs=3
)
MODES = {"greedy": GREEDY, "sampled": SAMPLED}
LENGTHS = (1, 3, 8)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@cache
def weights(dtype: torch.dtype, noise: float = 0.0) -> LlamaForCausalLM:
    """Heads of sixteen, so that the model is recognised; with noise, a draft that mostly agrees."""
    model = tiny_models.llama(hidden=64)
    return (tiny_models.perturb(model, noise) if noise else model).to(dtype)


@cache
def plain(dtype: torch.dtype) -> LLM:
    llm = LLM(weights(dtype), None, fused=True, is_debug=True, verify="match")
    assert llm.target.fused is not None
    return llm


@cache
def draft_lm(dtype: torch.dtype) -> HFModel:
    lm = HFModel.wrap_model(weights(dtype, 0.04), "draft", is_fused=True)
    assert lm.fused is not None
    return lm


def drafter(name: str, num_tokens: int, dtype: torch.dtype) -> Drafter:
    """Make the drafter as the invariants do; the draft model has this type, and its trees are wide at the root."""
    method, _, variant = name.partition(", ")
    if method != "draft_model" or name in CROSS_VOCAB_CASES:
        return METHOD_CASES[name].make(num_tokens, plain(dtype))
    context = DrafterContext(vocab_size=tiny_models.VOCAB, num_speculative_tokens=num_tokens, dtype=dtype)
    return DraftModel(
        draft_lm(dtype).with_new_kv(),
        context,
        TreeOptions(branching=VARIANT_BRANCHING[:num_tokens] if variant else None),
    )


def list_results(completions: list[Completion]) -> list[tuple[Any, ...]]:
    """List all that a user gets for a request."""
    return [(c.token_ids, c.finish_reason, c.logprobs, c.prompt_logprobs) for c in completions]


@cache
def generate_expected(mode: str, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    """Generate without a drafter, one prompt at a time."""
    return [list_results(plain(dtype).generate([prompt], MODES[mode]))[0] for prompt in PROMPTS]


def difference(name: str, mode: str, dtype: torch.dtype, make: Callable[[int], LLM]) -> str:
    """Find the first draft length with a result that differs from plain decoding, or None."""
    accepted = rejected = 0
    for num_tokens in LENGTHS:
        llm = make(num_tokens)
        done = llm.generate(PROMPTS, MODES[mode])
        if list_results(done) != generate_expected(mode, dtype):
            return f"{name}, {mode}, K={num_tokens}"
        assert llm.engine.drafter.num_failures == 0
        accepted += sum(c.stats.num_accepted for c in done)
        rejected += sum(c.stats.num_drafted - c.stats.num_accepted for c in done)
    assert accepted > 0, "no draft was ever accepted"
    assert rejected > 0, "no draft was ever rejected"
    return ""


def test_every_registered_method_is_covered() -> None:
    assert not list_missing_methods()
    assert {name.partition(",")[0] for name in METHOD_CASES} == set(load_methods())


@pytest.mark.parametrize(
    ("dtype", "mode"),
    [
        ("bf16", "greedy"),
        ("bf16", "sampled"),
        ("fp32", "sampled"),
        pytest.param("fp32", "greedy", marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("name", EACH_CASE)
def test_every_bit_is_that_of_plain_decoding(name: str, dtype: str, mode: str) -> None:
    """Every method, chains and trees, several draft lengths, in a batch of ragged prompts."""
    kind = DTYPES[dtype]
    found = difference(name, mode, kind, lambda k: plain(kind).with_drafter(drafter(name, k, kind), verify="match"))
    assert not found


@pytest.mark.parametrize(("name", "rule"), pair_cases_with_rules(["reject", "block", "spectr"]))
def test_greedy_decoding_has_the_same_bits_under_every_lossless_rule(name: str, rule: str) -> None:
    llm = plain(torch.bfloat16).with_drafter(drafter(name, 4, torch.bfloat16), verify=rule)
    assert list_results(llm.generate(PROMPTS, GREEDY)) == generate_expected("greedy", torch.bfloat16)
    assert llm.engine.drafter.num_failures == 0


@pytest.mark.parametrize("name", EACH_CASE)
def test_preemption_and_chunked_prompts_change_no_bit(name: str) -> None:
    """Requests decoded one by one are recomputed in chunks, on other pages. Every prompt comes three times."""
    order = [i for i in range(len(PROMPTS)) for _ in range(3)]
    limits = MemoryLimits(kv_tokens=132, page_size=4, max_batch=8, max_step_tokens=48)
    for mode, sampling in MODES.items():
        made = drafter(name, 4, torch.bfloat16)
        llm = tiny_models.limit_memory(plain(torch.bfloat16), made, limits, max_chunk=5)
        done = list_results(llm.generate([PROMPTS[i] for i in order], sampling))
        assert done == [generate_expected(mode, torch.bfloat16)[i] for i in order]
        assert llm.engine.scheduler.num_preempted > 0
        assert llm.engine.drafter.num_failures == 0


@EACH_SET
def test_on_every_instruction_set_and_two_threads(instruction_set: str) -> None:
    llm = plain(torch.bfloat16)
    for way in THREAD_SETUPS:
        with use_library(instruction_set, way):
            alone = list_results(llm.generate(PROMPTS[:4], GREEDY))
            tree = llm.with_drafter(drafter("draft_model, tree", 5, torch.bfloat16), verify="match")
            assert list_results(tree.generate(PROMPTS[:4], GREEDY)) == alone


def test_the_builtin_pair() -> None:
    """As it is loaded without a word, but for a length that does not go by the clock: bfloat16 weights, fused, drafted
    by the built-in draft."""
    pair = LLM(num_speculative_tokens=2)
    assert pair.target.fused is not None
    assert pair.target.fused.dtype == torch.bfloat16
    alone = pair.with_drafter(None)
    prompts = ["The river", "def add(a, b):", "Once upon a time there was a"]
    for sampling in (
        Sampling(max_tokens=24, temperature=0, logprobs=2),
        Sampling(max_tokens=24, temperature=0.8, seed=3, logprobs=2),
    ):
        done = pair.generate(prompts, sampling)
        assert list_results(done) == list_results(alone.generate(prompts, sampling))
        assert 0 < sum(c.stats.num_accepted for c in done) < sum(c.stats.num_drafted for c in done)


# the invariant can fail


@contextmanager
def depending_on_the_rows(lm: HFModel) -> Iterator[None]:
    """Patch in a kernel that sums in another order if there are more rows: the last bit of some logits differs."""
    own = lm.forward

    def forward(window: ForwardBatch, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        logits, features = own(window, taps)
        if window.num_rows > 1:
            logits[:, ::7] = torch.nextafter(logits[:, ::7], torch.tensor(torch.inf))
        return logits, features

    lm.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del lm.forward


@pytest.mark.parametrize("mode", MODES)
def test_the_invariant_sees_a_unit_in_the_last_place_that_depends_on_the_rows(mode: str) -> None:
    def broken(num_tokens: int) -> LLM:
        llm = plain(torch.bfloat16).with_drafter(drafter("draft_model", num_tokens, torch.bfloat16), verify="match")
        stack.append(depending_on_the_rows(llm.target))
        stack[-1].__enter__()
        return llm

    stack: list[Any] = []
    assert difference("draft_model", mode, torch.bfloat16, broken) == f"draft_model, {mode}, K=1"


def test_the_invariant_sees_the_plain_path_of_torch() -> None:
    """Products of torch round by the number of rows, which is why the package has its own kernels."""
    llm = LLM(weights(torch.bfloat16), None, fused=False, verify="match")
    alone = [list_results(llm.generate([prompt], GREEDY))[0] for prompt in PROMPTS]
    drafting = llm.with_drafter(drafter("draft_model", 8, torch.bfloat16), verify="match")
    assert list_results(drafting.generate(PROMPTS, GREEDY)) != alone
