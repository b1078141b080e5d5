"""Targets and draft models with recurrent layers: rejected drafts, aborts and preemptions leave no trace in a state.

Guards against a state advanced by a rejected token, lost with a preemption, taken from another request, or found on a
page whose tokens differ; and against states that stay after their request.
"""

import random
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft import LLM, MemoryLimits, Sampling
from foredraft.engine.engine import Engine
from foredraft.models.hf import HFModel
from tests.support.engine_fakes import make_transcript
from tests.support.families import tokens
from tests.support.hybrids import (
    EXACT_HYBRIDS,
    HYBRIDS,
    generate_greedily,
    make_hybrid,
    make_model,
)
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

FAST = ("mamba2", "jamba", "qwen3_next", "lfm2")


@cache
def make_loaded(family: str) -> Any:
    return make_model(family)


@cache
def make_noisy(family: str) -> Any:
    model = make_model(family)
    generator = torch.Generator().manual_seed(5)
    for weight in model.parameters():
        weight.data += 0.03 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return model


@cache
def generate_expected(family: str) -> list[list[int]]:
    return [generate_greedily(make_model(family), prompt, LENGTH) for prompt in PROMPTS]


def make_llm(family: str, drafter: Any, limits: MemoryLimits = LIMITS) -> LLM:
    if isinstance(drafter, dict) and "model" not in drafter:
        drafter = drafter | {"model": make_noisy(family)}
    return LLM(make_loaded(family), drafter, num_speculative_tokens=3, limits=limits, is_debug=True)


def generate_and_count_hits(llm: LLM, prompt: list[int]) -> tuple[list[int], int]:
    """Return the output of a request, and how many of its tokens the prefix cache had."""
    before = llm.engine.scheduler.prefix_hits
    [completion] = llm.generate([prompt], GREEDY)
    return completion.token_ids, llm.engine.scheduler.prefix_hits - before


@pytest.mark.parametrize(
    ("family", "drafter"),
    [*((family, TREE) for family in FAST), ("qwen3_next", None), ("mamba2", "ngram"), ("qwen3_next", CHAIN)],
)
def test_the_output_is_that_of_transformers(family: str, drafter: Any) -> None:
    llm = make_llm(family, drafter)
    assert ids(llm.generate(PROMPTS, GREEDY)) == generate_expected(family)
    check_only_cached_states(llm)


@pytest.mark.soak
@pytest.mark.parametrize("drafter", [None, "ngram", "early_exit", CHAIN, TREE])
@pytest.mark.parametrize("family", HYBRIDS)
def test_the_output_of_every_family_is_that_of_transformers(family: str, drafter: Any) -> None:
    llm = make_llm(family, drafter)
    assert ids(llm.generate(PROMPTS, GREEDY)) == generate_expected(family)
    check_only_cached_states(llm)


@pytest.mark.parametrize("drafter", [CHAIN, TREE], ids=["chain", "tree"])
def test_every_draft_of_the_target_itself_is_accepted(drafter: dict[str, Any]) -> None:
    """A draft model whose states went wrong after an accepted or rejected path would draft other tokens."""
    llm = make_llm("qwen3_next", drafter | {"model": make_loaded("qwen3_next")}, ROOMY)
    for completion in llm.generate(PROMPTS, GREEDY):
        stats = completion.stats
        best_path = stats.num_drafts * 3  # tokens, but for the end of the output
        assert best_path - 3 <= stats.num_accepted <= best_path


def test_a_draft_model_that_lost_a_state_computes_its_tokens_again() -> None:
    llm = make_llm("lfm2", CHAIN | {"model": make_loaded("lfm2")}, ROOMY)
    draft_kv = llm.engine.drafter.draft_kv
    assert draft_kv is not None
    [pool] = draft_kv.pool.state_pools
    [first] = llm.generate([PROMPTS[1]], GREEDY)
    pool.get_table(4).trim(0)  # the pages of the hit have draft KV and no state
    [again] = llm.generate([PROMPTS[1]], GREEDY)
    assert llm.engine.scheduler.prefix_hits == 24
    assert (again.token_ids, again.stats.num_accepted) == (first.token_ids, first.stats.num_accepted)


def test_a_hit_of_the_prefix_cache_ends_where_a_state_is() -> None:
    llm = make_llm("qwen3_next", "ngram", ROOMY)
    first, num_hit = generate_and_count_hits(llm, PROMPTS[1])
    assert num_hit == 0
    again, num_hit = generate_and_count_hits(llm, PROMPTS[1])
    assert again == first
    assert num_hit == 24  # of 27 tokens, in pages of 4
    further, num_hit = generate_and_count_hits(llm, PROMPTS[1] + first[:10])
    assert further[:4] == first[10:]
    assert num_hit == 36  # of 37 tokens: pages filled while decoding have states too
    branch = [*PROMPTS[1][:18], 50, 51]
    other, num_hit = generate_and_count_hits(llm, branch)
    assert other == generate_greedily(make_model("qwen3_next"), branch, LENGTH)
    assert num_hit == 0  # pages of the first 16 tokens are cached, but no state was kept after them
    assert generate_and_count_hits(llm, branch) == (other, 16)  # pages with a state have replaced them


def test_the_samples_of_a_prompt_share_its_states() -> None:
    llm = make_llm("lfm2", "ngram", MemoryLimits(page_size=4, kv_tokens=400, max_batch=4))
    seeded = Sampling(temperature=0.8, seed=3, max_tokens=LENGTH, ignore_eos=True, n=3)
    together = llm.generate([PROMPTS[1]], seeded)
    assert llm.engine.scheduler.prefix_hits == 2 * 24
    apart = make_llm("lfm2", None, MemoryLimits(page_size=4, kv_tokens=400, max_batch=1, prefix_cache=False))
    assert ids(together) == ids(apart.generate([PROMPTS[1]], seeded))


def test_states_for_the_prefix_cache_are_bounded() -> None:
    llm = make_llm("lfm2", None, MemoryLimits(page_size=4, kv_tokens=2000, max_batch=2))
    [pool] = llm.target.pool.state_pools
    pool.max_page_ends = 5
    prompts = [tokens(30, seed=40 + i) for i in range(8)]
    first = ids(llm.generate(prompts, GREEDY))
    assert pool.get_table(4).num_page_ends <= 5 + 2 * 2  # the last step of each of two requests added some
    assert ids(llm.generate(prompts, GREEDY)) == first


def test_large_states_limit_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    llm = make_llm("lfm2", "ngram", MemoryLimits(page_size=4, kv_memory=30_000, max_batch=4))
    assert "limit the batch to 2 of 4 requests" in caplog.text
    [pool] = llm.target.pool.state_pools
    assert pool.capacity is not None
    assert pool.capacity * pool.bytes_per_state <= 15_000 + pool.bytes_per_state  # half, and the null state
    expected = generate_expected("lfm2")
    chosen = [0, 2, 3]  # those that fit
    assert ids(llm.generate([PROMPTS[i] for i in chosen], GREEDY)) == [expected[i] for i in chosen]
    assert len(pool.tensors[next(iter(pool.shapes))]) <= pool.capacity


def test_a_failed_step_and_an_abort_leave_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, lm = make_scripted_engine("lfm2", random.Random(1))
    transcripts = [make_transcript(prompt, GREEDY, i) for i, prompt in enumerate(PROMPTS[:3])]
    for transcript in transcripts:
        engine.add(transcript)
    engine.step()
    [pool] = lm.pool.state_pools
    table = pool.get_table(4)
    engine.abort(transcripts[0].request)
    engine.memory.states.check_integrity(engine.scheduler.running)
    monkeypatch.setattr(engine, "_verify", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.recover()
    monkeypatch.undo()
    assert table.num_used == 0
    while engine.has_work:
        engine.step()
    expected = [generate_greedily(make_model("lfm2"), prompt, LENGTH) for prompt in PROMPTS[:3]]
    assert [t.request.output for t in transcripts[1:]] == expected[1:]


# -- random steps


def make_scripted_engine(family: str, rng: random.Random) -> tuple[Engine, HFModel]:
    """Make an engine whose drafts are partly right: trees of right tokens and others."""
    return make_engine_with_drafts(make_hybrid(family)[1].with_new_kv(), rng)


@pytest.mark.parametrize(("family", "num_steps"), [("lfm2", 70), ("mamba2", 35)])
def test_states_after_random_steps_are_those_of_a_fresh_pass(
    family: str, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tensor, "float", Tensor.double)  # modules cast to float32, which would hide a fault
    run_random_steps(family, num_steps, 7)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", EXACT_HYBRIDS)
def test_states_after_many_random_steps(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    run_random_steps(family, 2000, 20)
