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

from foredraft import LLM, Completion, MemoryLimits, Sampling
from foredraft.drafters.draft import Draft, to_token_tree
from foredraft.engine.engine import Engine
from foredraft.kv.state_pool import StatePool
from foredraft.models.forward_batch import ForwardBatch, Span
from foredraft.models.hf import HFModel
from foredraft.request import Batch, Request
from foredraft.tree import TokenTree
from tests.support import engine_fakes
from tests.support.engine_fakes import ScriptedDrafter, make_transcript
from tests.support.families import VOCAB, tokens
from tests.support.hybrids import (
    EXACT_HYBRIDS,
    HYBRIDS,
    NATIVE_HYBRIDS,
    generate_greedily,
    make_hybrid,
    make_model,
    make_native_hybrid,
    make_native_model,
)
from tests.support.library_setups import NATIVE

LENGTH = 14
PROMPTS = [[5, 9, 7, 11, 5, 9, 7, 11, 5, 9], tokens(27, seed=1), tokens(3, seed=2), [5, 9] * 6, tokens(27, seed=1)[:20]]
GREEDY = Sampling(temperature=0, max_tokens=LENGTH, ignore_eos=True)
LIMITS = MemoryLimits(kv_tokens=96, page_size=4, max_batch=3, max_step_tokens=24)  # with preemptions and chunks
ROOMY = MemoryLimits(kv_tokens=400, page_size=4)
FAST = ("mamba2", "jamba", "qwen3_next", "lfm2")
CHAIN, TREE = {"method": "draft_model"}, {"method": "draft_model", "branching": [2, 2, 1]}


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


def ids(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def generate_and_count_hits(llm: LLM, prompt: list[int]) -> tuple[list[int], int]:
    """Return the output of a request, and how many of its tokens the prefix cache had."""
    before = llm.engine.scheduler.prefix_hits
    [completion] = llm.generate([prompt], GREEDY)
    return completion.token_ids, llm.engine.scheduler.prefix_hits - before


def check_only_cached_states(llm: LLM) -> None:
    """An idle engine has states after the ends of cached pages alone."""
    for pool in llm.target.pool.state_pools:
        table = pool.get_table(LIMITS.page_size)
        assert table.num_used == table.num_page_ends <= pool.max_page_ends
        assert all(llm.engine.scheduler.allocator.is_cacheable(page) for page in table.list_pages())


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


def make_engine_with_drafts(lm: HFModel, rng: random.Random) -> tuple[Engine, HFModel]:
    predictor = Predictor(lm)
    drafter = ScriptedDrafter(lambda batch: draft_at_random(predictor, batch, rng), max_nodes=6)
    engine = engine_fakes.make_engine(lm, drafter, num_pages=26, max_batch=4, max_step_tokens=40)
    return engine, lm


class Predictor:
    """Greedy tokens of a model, from passes over all tokens."""

    def __init__(self, lm: HFModel) -> None:
        self.lm = lm
        self.next_tokens: dict[tuple[int, ...], int] = {}

    def predict(self, prefix: tuple[int, ...]) -> int:
        if prefix not in self.next_tokens:
            self.next_tokens[prefix] = int(compute_fresh_state(self.lm, prefix)[1].argmax())
        return self.next_tokens[prefix]


def draft_at_random(predictor: Predictor, batch: Batch, rng: random.Random) -> TokenTree:
    """Draft trees in which a random node of every level is the right token, until a random depth."""
    drafts = {}
    for b in batch.find_drafting():
        request = batch.requests[b]
        known = list(request.tokens)
        nodes: list[int] = []
        parents: list[int] = []
        parent = 0
        while len(nodes) < min(batch.granted_nodes[b], 5) and rng.random() < 0.75:
            right = predictor.predict(tuple(known))
            level = [right, (right + 1 + rng.randrange(VOCAB - 2)) % VOCAB][: rng.choice((1, 1, 2))]
            rng.shuffle(level)
            level = level[: batch.granted_nodes[b] - len(nodes)]
            if right not in level:
                break
            first = len(nodes) + 1
            nodes += level
            parents += [parent] * len(level)
            parent = first + level.index(right)
            known.append(right)
        if nodes:
            drafts[b] = Draft(tuple(nodes), tuple(parents))
    return to_token_tree(batch, drafts)


def compute_fresh_state(lm: HFModel, prefix: tuple[int, ...]) -> tuple[StatePool, Tensor]:
    """The states and logits after a prefix, computed at once in empty memory. The state has the last id."""
    fresh = lm.with_new_kv()
    pages = range(1, 2 + len(prefix) // 4)
    span = Span(pages, 0, list(prefix), range(len(prefix)), num_settled=len(prefix) - 1)
    logits, _ = fresh.forward(ForwardBatch.from_spans([span], 4, "cpu", last_only=True))
    assert fresh.pool.states is not None
    return fresh.pool.states, logits[0]


def check_states(lm: HFModel, request: Request) -> None:
    """The state of a request is that of a fresh pass over its computed tokens, bit by bit in native code."""
    computed = tuple(request.get_tokens(0, request.num_computed))
    if not computed:
        return
    assert lm.pool.states is not None
    state = lm.pool.states.get_table(4).find(request.pages, len(computed))
    fresh, _ = compute_fresh_state(lm, computed)
    last = fresh.get_table(4).find(range(1, 2 + len(computed) // 4), len(computed))
    for key, tensor in lm.pool.states.tensors.items():
        max_error = 0.0 if lm.runs_native else 1e-12
        assert (tensor[state] - fresh.tensors[key][last]).abs().max() <= max_error, (key, len(computed))


@torch.inference_mode()
def run_random_steps(family: str, num_steps: int, check_every: int, is_native: bool = False) -> None:
    rng = random.Random(family)
    shared = make_native_hybrid(family) if is_native else make_hybrid(family)[1]
    engine, lm = make_engine_with_drafts(shared.with_new_kv(), rng)
    made, num_aborted, num_accepted = 0, 0, 0
    for step in range(num_steps):
        while len(engine.transcripts) < 6:
            prompt = PROMPTS[made % len(PROMPTS)] + ([] if made % 3 else tokens(1 + made % 5, seed=made))
            sampling = Sampling(temperature=0, max_tokens=rng.randint(4, 30), ignore_eos=True)
            engine.add(make_transcript(prompt, sampling, made))
            made += 1
        report = engine.step().report
        num_accepted += sum(len(outcome.accepted_nodes) for outcome in report.outcomes) if report else 0
        if rng.random() < 0.05:
            engine.abort(rng.choice(list(engine.transcripts)))
            num_aborted += 1
        if step % check_every == 0:
            for request in engine.scheduler.running:
                check_states(lm, request)
    assert engine.scheduler.num_preempted >= num_steps // 50, "the pool was too large to preempt"
    assert num_aborted >= num_steps // 100
    assert num_accepted > num_steps // 2
    for request in list(engine.transcripts):
        engine.abort(request)
    engine.memory.states.check_integrity([])
    assert engine.scheduler.prefix_hits > 0


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


# -- models that run as one native call, in float32


@cache
def generate_native_expected(family: str) -> list[list[int]]:
    return [generate_greedily(make_native_model(family), prompt, LENGTH) for prompt in PROMPTS]


@NATIVE
@pytest.mark.parametrize("drafter", [None, "ngram", "early_exit", CHAIN, TREE], ids=str)
@pytest.mark.parametrize("family", NATIVE_HYBRIDS)
def test_the_output_of_native_code_is_that_of_transformers(family: str, drafter: Any) -> None:
    if isinstance(drafter, dict):
        drafter = drafter | {"model": make_native_model(family)}
    llm = LLM(make_native_model(family), drafter, num_speculative_tokens=3, limits=LIMITS, is_debug=True, fused=True)
    assert llm.target.runs_native
    assert ids(llm.generate(PROMPTS, GREEDY)) == generate_native_expected(family)
    check_only_cached_states(llm)


@NATIVE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", NATIVE_HYBRIDS)
def test_native_log_probabilities_do_not_depend_on_drafts_chunks_or_the_batch(family: str, dtype: torch.dtype) -> None:
    """To the last bit, with preemptions and prompts in chunks beside a roomy engine without drafts."""
    sampling = Sampling(temperature=0.8, seed=5, max_tokens=LENGTH, ignore_eos=True, logprobs=2)
    model = make_native_model(family, dtype)
    plain = LLM(model, None, limits=ROOMY, fused=True).generate(PROMPTS, sampling)
    drafter = TREE | {"model": make_native_model(family, dtype)}
    speculative = LLM(model, drafter, num_speculative_tokens=3, limits=LIMITS, fused=True).generate(PROMPTS, sampling)
    assert [c.logprobs for c in speculative] == [c.logprobs for c in plain]


@NATIVE
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


@NATIVE
@pytest.mark.parametrize("family", NATIVE_HYBRIDS)
def test_native_states_after_random_steps_are_those_of_a_fresh_pass(family: str) -> None:
    run_random_steps(family, 200, 5, is_native=True)


@NATIVE
@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", NATIVE_HYBRIDS)
def test_native_states_after_many_random_steps(family: str) -> None:
    run_random_steps(family, 2000, 10, is_native=True)


@NATIVE
def test_a_native_hybrid_takes_no_adapters_and_int8_keys() -> None:
    lm = make_native_hybrid("qwen3_5")
    assert lm.adapter_obstacle is not None
    llm = LLM(make_native_model("qwen3_5"), None, limits=ROOMY, fused=True, kv_dtype="int8")
    assert [len(output) for output in ids(llm.generate(PROMPTS, GREEDY))] == [LENGTH] * len(PROMPTS)


@NATIVE
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
