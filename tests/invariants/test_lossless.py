"""Speculation changes the speed and nothing else: every registered method against no drafter, token by token.

Guards against the whole catalogue of verification, rollback and batching bugs at once: a draft committed unverified,
stale KV after a rejection, wrong positions, noise that depends on the batch, penalties that count rejected tokens,
drafts that outlive a preemption.
"""

import os
from dataclasses import replace
from functools import cache

import pytest

from foredraft import Completion, Sampling
from foredraft.llm import LLM, MemoryLimits
from foredraft.verification.registry import RULES
from tests.support import tiny_models
from tests.support.method_cases import EACH_CASE, METHOD_CASES, list_missing_methods, pair_cases_with_rules

# ragged, with repetition for the methods that look text up; the last one ends near the context limit
PROMPTS: list[list[int]] = [
    [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6],
    [33],
    [11, 12, 11, 12, 11, 12, 11, 12, 11, 12, 11, 12, 11, 12, 11, 12, 11, 12, 11, 12, 11, 12, 11, 12],
    [44, 45],
    [50] * 5,
    [(7 * i) % 31 + 4 for i in range(70)],
    [61, 62, 63, 64, 61, 62],
    [(11 * i) % 23 + 60 for i in range(tiny_models.CONTEXT - 9)],
]
GREEDY = Sampling(max_tokens=16, temperature=0, ignore_eos=True)
SAMPLED = Sampling(
    max_tokens=16, temperature=0.6, top_p=0.9, repetition_penalty=1.05, frequency_penalty=0.05, presence_penalty=0.1,
    seed=11, min_tokens=6,
)  # fmt: skip
MODES = {"greedy": GREEDY, "sampled": SAMPLED}
LENGTHS = range(1, 9)
BATCHES = (1, 3, 8)
LOSSLESS = [name for name, rule in RULES.items() if rule.is_lossless]


def ids(completions: list[Completion]) -> list[tuple[list[int], str]]:
    return [(c.token_ids, c.finish_reason) for c in completions]


def tally(completions: list[Completion]) -> tuple[int, int]:
    """Drafts accepted, and drafts rejected."""
    accepted = sum(c.stats.num_accepted for c in completions)
    return accepted, sum(c.stats.num_drafted for c in completions) - accepted


@cache
def generate_expected(mode: str) -> list[tuple[list[int], str]]:
    """Generate without a drafter, one prompt at a time."""
    return [ids(tiny_models.plain().generate([prompt], MODES[mode]))[0] for prompt in PROMPTS]


def test_every_registered_method_is_covered() -> None:
    """A method that is missing from `method_cases.METHOD_CASES` would be lossless by assertion only."""
    assert not list_missing_methods()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", METHOD_CASES)
def test_text_is_the_same_with_and_without_a_drafter(name: str, mode: str) -> None:
    """`match`, at every draft length and batch size, the prompt that runs into the context limit included. A variant of
    a method has fewer lengths, and every size with some of them."""
    accepted = rejected = 0
    METHOD_CASES[name].prepare(PROMPTS)
    for num_tokens in LENGTHS if "," not in name else (1, 2, 3, 5, 8):
        llm = tiny_models.plain().with_drafter(METHOD_CASES[name].make(num_tokens), verify="match")
        for batch in BATCHES if "," not in name else BATCHES[num_tokens % 3 :][:1]:
            start = (3 * num_tokens) % (len(PROMPTS) - batch + 1)
            chosen = slice(start, start + batch)
            done = llm.generate(PROMPTS[chosen], MODES[mode])
            assert ids(done) == generate_expected(mode)[chosen], f"K={num_tokens}, batch {batch}"
            accepted, rejected = accepted + tally(done)[0], rejected + tally(done)[1]
        assert llm.engine.drafter.num_failures == 0
    assert accepted > 0, "no draft was accepted: the invariant was not tested"
    assert rejected > 0, "no draft was ever rejected: nothing was ever rolled back"


@pytest.mark.parametrize(("name", "rule"), pair_cases_with_rules([rule for rule in LOSSLESS if rule != "match"]))
def test_greedy_text_is_the_same_under_every_lossless_rule(name: str, rule: str) -> None:
    """A greedy distribution has one outcome, so no rule may differ from `match`; trees do not go under `block`."""
    accepted = rejected = 0
    for num_tokens in (1, 2, 5, 8):
        llm = tiny_models.plain().with_drafter(METHOD_CASES[name].make(num_tokens), verify=rule)
        done = llm.generate(PROMPTS, GREEDY)
        assert ids(done) == generate_expected("greedy"), f"K={num_tokens}"
        assert llm.engine.drafter.num_failures == 0
        accepted, rejected = accepted + tally(done)[0], rejected + tally(done)[1]
    assert accepted > 0
    assert rejected > 0


@pytest.mark.parametrize("name", EACH_CASE)
def test_samples_and_seeds_do_not_depend_on_a_drafter(name: str) -> None:
    """n samples of one prompt differ from each other, and each is the same with and without speculation."""
    sampling = replace(SAMPLED, n=4, max_tokens=12, ignore_eos=True)
    alone = tiny_models.plain().generate(PROMPTS[:3], sampling)
    assert len({tuple(c.token_ids) for c in alone[:4]}) == 4
    other_seed = tiny_models.plain().generate(PROMPTS[:1], replace(sampling, seed=12))
    assert ids(other_seed) != ids(alone[:4])
    for num_tokens in (1, 4):
        llm = tiny_models.plain().with_drafter(METHOD_CASES[name].make(num_tokens), verify="match")
        done = llm.generate(PROMPTS[:3], sampling)
        assert ids(done) == ids(alone)
        assert [c.index for c in done] == [0, 1, 2, 3] * 3


def make_crowded_llm(name: str, rule: str = "match") -> LLM:
    """Make an LLM with memory for little more than the longest request, which reads prompts four tokens at a time."""
    limits = MemoryLimits(kv_tokens=100, page_size=4, max_batch=8, max_step_tokens=48)
    return tiny_models.limit_memory(tiny_models.plain(), METHOD_CASES[name].make(4), limits, rule, max_chunk=5)


@pytest.mark.parametrize("name", EACH_CASE)
def test_preemption_and_chunked_prompts_change_no_text(name: str) -> None:
    """A preempted request is recomputed from its tokens, or from pages that it or another filled with them: drafts, KV
    and noise of before must not show. Every prompt comes three times."""
    chosen = [i for i, prompt in enumerate(PROMPTS) if len(prompt) < 100 for _ in range(3)]
    accepted = rejected = 0
    for mode, sampling in MODES.items():
        llm = make_crowded_llm(name)
        done = llm.generate([PROMPTS[i] for i in chosen], sampling)
        assert llm.engine.scheduler.num_preempted > 0
        assert llm.engine.scheduler.prefix_hits > 0
        assert ids(done) == [generate_expected(mode)[i] for i in chosen]
        assert llm.engine.drafter.num_failures == 0
        assert llm.engine.scheduler.allocator.num_used == 0
        accepted, rejected = accepted + tally(done)[0], rejected + tally(done)[1]
    assert accepted > 0
    assert rejected > 0


MIXED = [
    GREEDY,
    replace(SAMPLED, seed=None, max_tokens=17),
    SAMPLED,
    replace(SAMPLED, seed=None, n=2),
    replace(SAMPLED, temperature=1.3, top_p=1.0, top_k=20, min_p=0.02, seed=5),
    replace(GREEDY, repetition_penalty=1.3, logit_bias={7: 2.0}),
    replace(SAMPLED, seed=None, frequency_penalty=0.0),
    GREEDY,
]


@cache
def each_alone() -> list[list[Completion]]:
    """Generate one by one, without a drafter."""
    return [tiny_models.plain().generate([p], s) for p, s in zip(PROMPTS, MIXED, strict=True)]


@pytest.mark.parametrize("name", EACH_CASE)
def test_a_mixed_batch_leaks_nothing_between_its_requests(name: str) -> None:
    """Seeded and unseeded, greedy and sampled, under the rules of `auto`, side by side: the unseeded ones may not
    disturb the others (an index copied and not written back once gave token 0 for every mixed batch)."""
    llm = tiny_models.plain().with_drafter(METHOD_CASES[name].make(4), verify="auto")
    sampled_rule = "block" if llm.drafter.spec.is_chain else "reject"
    for _ in range(2):
        done = llm.generate(PROMPTS, MIXED)
        assert {c.verification for c in done} == {"match", sampled_rule}
        at = 0
        for s, alone in zip(MIXED, each_alone(), strict=True):
            mine, at = done[at : at + s.n], at + s.n
            if s.seed is not None or s.is_greedy:
                assert ids(mine) == ids(alone)
            assert all(0 < len(c.token_ids) <= s.max_tokens for c in mine)
    assert llm.engine.drafter.num_failures == 0


@pytest.mark.parametrize("rule", ["reject", "block", "spectr"])
def test_unseeded_requests_differ(rule: str) -> None:
    """With one random stream for all requests, each of them would get the same text."""
    llm = tiny_models.plain().with_drafter(tiny_models.draft_model(3), verify=rule)
    texts = {tuple(c.token_ids) for c in llm.generate([[5, 6]] * 24, Sampling(max_tokens=8, ignore_eos=True))}
    assert len(texts) == 24


@cache
def decode_many() -> tuple[list[list[int]], Sampling, list[list[int]]]:
    """Return 100 ragged prompts (LOSSLESS_PROMPTS sets the number), their sampling, and their plain greedy output."""
    count = int(os.environ.get("LOSSLESS_PROMPTS", "100"))
    sampling = Sampling(max_tokens=128, temperature=0, ignore_eos=True)
    prompts = [[(i * j * j + 3 * j + i) % 90 + 4 for j in range(1 + i % 60)] for i in range(count)]
    return prompts, sampling, ids(tiny_models.plain().generate(prompts, sampling))


@pytest.mark.soak
@pytest.mark.parametrize("name", EACH_CASE)
def test_greedy_text_is_the_same_over_a_thousand_prompts(name: str) -> None:
    """100 ragged prompts, 128 output tokens each, at every draft length, in batches of 32."""
    prompts, sampling, alone = decode_many()
    accepted = rejected = 0
    for num_tokens in LENGTHS:
        llm = tiny_models.plain().with_drafter(METHOD_CASES[name].make(num_tokens), verify="match")
        done = llm.generate(prompts, sampling)
        assert ids(done) == alone
        accepted, rejected = accepted + tally(done)[0], rejected + tally(done)[1]
    assert accepted > 0
    assert rejected > 0
