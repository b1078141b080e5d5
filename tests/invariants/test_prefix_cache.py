"""Finding a prefix changes nothing: texts, and with memory on the pages also what is accepted, are those without it.

Guards against draft KV that is not right where a text goes on (acceptance collapses and no text shows it), a head that
never drafts again after a hit, and pages that hold another text. In float64, so that no rounding decides.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from foredraft import LLM, Completion, ForedraftError, Sampling
from foredraft.draft_length.policy import DraftCandidate, FixedLengthPolicy
from foredraft.llm import MemoryLimits
from foredraft.request_options import RequestOptions
from tests.support import tiny_models
from tests.support.method_cases import EACH_CASE, METHOD_CASES
from tests.support.tiny_vocabularies import CROSS_VOCAB_CASES

BASE = [61, 62, 63, 64, 61, 62, 50, 50, 5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 33, 44]
PROMPTS = [
    BASE,
    [*BASE, 45],
    BASE[:16],  # ends with a page
    [*BASE[:16], 70],  # parts from the first where a page ends
    [*BASE[:12], 71, 72, 73],
    [33],
    [*BASE, 80, 81, 82, 83, 84, 85],
]
SAMPLINGS = {
    "greedy": Sampling(max_tokens=14, temperature=0, ignore_eos=True),
    "sampled": Sampling(max_tokens=14, temperature=0.6, top_p=0.9, seed=11, ignore_eos=True, n=2),
}
METHODS_ON_PAGES = ("draft_model", "eagle", "eagle3", "dflash", "chimera")
METHODS_EARLY_AFTER_HITS = ("dflash",)  # their draft reads pages alone, and no output that a step before has left
ON_PAGES = [
    name
    for name in METHOD_CASES
    if (name.split(",")[0] in METHODS_ON_PAGES or name.startswith("hydra, prefix")) and name not in CROSS_VOCAB_CASES
]
LIMITS = MemoryLimits(kv_tokens=4000, page_size=4)
APART = replace(LIMITS, prefix_cache=False)


def make_llm(name: str, limits: MemoryLimits) -> LLM:
    return tiny_models.limit_memory(tiny_models.plain(), METHOD_CASES[name].make(4), limits)


def ids(done: list[Completion]) -> list[list[int]]:
    return [c.token_ids for c in done]


def figures(done: list[Completion]) -> list[tuple[int, int, int, tuple[int, ...]]]:
    stats = [c.stats for c in done]
    return [(s.target_passes, s.num_drafted, s.num_accepted, s.accepted_at) for s in stats]


def compare_figures(name: str, found: list[Completion], expected: list[Completion]) -> None:
    """Assert equal figures. After a hit on all tokens but the last, some methods draft one step earlier."""
    is_early = name.split(",")[0] in METHODS_EARLY_AFTER_HITS
    for one, other in zip(found, expected, strict=True):
        if is_early and len(one.prompt_token_ids) % LIMITS.page_size == 1:
            assert one.stats.target_passes <= other.stats.target_passes
            assert one.stats.num_drafted >= other.stats.num_drafted
        else:
            assert figures([one]) == figures([other])


@pytest.mark.parametrize("mode", SAMPLINGS)
@pytest.mark.parametrize("name", EACH_CASE)
def test_texts_after_hits_are_those_without(name: str, mode: str) -> None:
    """All prompts at once, then again one by one, then a text that goes on from one that was generated."""
    llm, apart, sampling = make_llm(name, LIMITS), make_llm(name, APART), SAMPLINGS[mode]
    first = llm.generate(PROMPTS, sampling)
    expected = apart.generate(PROMPTS, sampling)
    assert ids(first) == ids(expected)
    hits = llm.engine.scheduler.prefix_hits
    again = [done for prompt in PROMPTS for done in llm.generate([prompt], sampling)]
    assert ids(again) == ids(expected)
    assert llm.engine.scheduler.prefix_hits > hits + 40
    longer = [PROMPTS[0] + expected[0].token_ids[:9]]
    after, plain = llm.generate(longer, sampling), apart.generate(longer, sampling)
    assert ids(after) == ids(plain)
    if name in ON_PAGES:
        compare_figures(name, again, expected)
        compare_figures(name, after, plain)
        assert sum(s.stats.num_accepted for s in again) > 0
    assert llm.engine.drafter.num_failures == 0
    assert apart.engine.scheduler.allocator.num_cached == 0
    if sampling.n == 1:
        assert apart.engine.scheduler.prefix_hits == 0


@pytest.mark.parametrize("name", ON_PAGES)
def test_pages_without_draft_memory_are_found_and_drafted_for_all_the_same(name: str) -> None:
    """The drafter is off for one request and on for the next: its memory was deferred, and is computed on demand."""
    llm, apart = make_llm(name, LIMITS), make_llm(name, APART)
    sampling = replace(SAMPLINGS["greedy"], max_tokens=30)
    [silent] = llm.prepare(BASE, sampling, RequestOptions(num_speculative_tokens=0))
    llm.engine.add(silent)
    while llm.engine.has_work:
        llm.engine.step()
    longer = [[*BASE, *silent.request.output[:20]]]
    hits = llm.engine.scheduler.prefix_hits
    after, plain = llm.generate(longer, sampling), apart.generate(longer, sampling)
    assert llm.engine.scheduler.prefix_hits == hits + 36
    assert ids(after) == ids(plain)
    assert figures(after) == figures(plain)
    assert sum(s.stats.num_drafted for s in after) > 0


class RestPolicy(FixedLengthPolicy):
    """Every request drafts, or none while the test lets drafting rest."""

    rests = True

    @property
    def is_resting(self) -> bool:
        return self.rests

    def allocate(
        self, candidates: Sequence[DraftCandidate], num_pass_tokens: int, attended_tokens: int = 0
    ) -> list[int]:
        return [0 if self.rests else candidate.max_nodes for candidate in candidates]


@pytest.mark.parametrize("name", ON_PAGES)
def test_drafting_that_rests_shortens_no_hit_and_goes_on_without_a_fault(name: str) -> None:
    """One text is written at rest, one found at rest while drafting goes on, and one found by a drafter at work."""
    llm, apart, sampling = make_llm(name, LIMITS), make_llm(name, APART), SAMPLINGS["greedy"]
    llm.engine.length_policy = policy = RestPolicy()
    expected = apart.generate([BASE], sampling)
    assert ids(llm.generate([BASE], sampling)) == ids(expected)
    hits = llm.engine.scheduler.prefix_hits
    [found] = llm.prepare(BASE, sampling)
    llm.engine.add(found)
    llm.engine.step()
    assert llm.engine.scheduler.prefix_hits == hits + 16
    policy.rests = False
    while llm.engine.has_work:
        llm.engine.step()
    again = llm.generate([BASE], sampling)
    assert list(found.request.output) == again[0].token_ids == expected[0].token_ids
    assert figures(again) == figures(expected) or name.split(",")[0] in METHODS_EARLY_AFTER_HITS
    assert again[0].stats.num_drafted > 0
    assert llm.engine.drafter.num_failures == 0


@pytest.mark.parametrize("name", METHODS_EARLY_AFTER_HITS)
def test_the_first_step_drafts_if_a_hit_leaves_the_last_token_alone(name: str) -> None:
    """Fault that it guards: rows of pages that are found and not counted, so that the first draft waits for a step."""
    for limits, is_drafted in ((LIMITS, True), (APART, False)):
        llm = make_llm(name, limits)
        llm.generate([BASE], SAMPLINGS["greedy"])
        [transcript] = llm.prepare([*BASE, 45], SAMPLINGS["greedy"])
        llm.engine.add(transcript)
        llm.engine.step()
        assert (transcript.build_stats().num_drafted > 0) is is_drafted


@pytest.mark.parametrize("name", ON_PAGES)
def test_a_text_that_joins_one_that_runs_finds_what_it_has_put_off(name: str) -> None:
    llm, apart, sampling = make_llm(name, LIMITS), make_llm(name, APART), SAMPLINGS["greedy"]
    [running] = llm.prepare(BASE, sampling, RequestOptions(num_speculative_tokens=0))
    llm.engine.add(running)
    llm.engine.step()
    llm.engine.step()
    [joining] = llm.prepare(PROMPTS[1], sampling)
    llm.engine.add(joining)
    while llm.engine.has_work:
        llm.engine.step()
    is_own = llm.drafter.spec.draft_kv.token_lookahead == 0  # type: ignore[union-attr]
    # the two differ from the end of the fifth page: a pair of states with the next token is valid for one of them only
    assert joining.request.num_cached_tokens == (20 if is_own else 16)
    assert joining.request.output == apart.generate(PROMPTS[1:2], sampling)[0].token_ids
    assert joining.build_stats().num_drafted > 0


@pytest.mark.parametrize("name", ["draft_model", "eagle"])
def test_tokens_after_a_stop_are_never_found(name: str) -> None:
    """A step accepts beyond the stop; what is kept ends with it."""
    llm = make_llm(name, LIMITS)
    [whole] = make_llm(name, LIMITS).generate([BASE], SAMPLINGS["greedy"])
    for stop in set(whole.token_ids):
        sampling = replace(SAMPLINGS["greedy"], stop_token_ids=(stop,))
        [done] = llm.generate([BASE], sampling)
        assert done.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    [again] = llm.generate([BASE], SAMPLINGS["greedy"])
    assert again.token_ids == whole.token_ids
    llm.engine.scheduler.check_integrity()


def test_tenants_do_not_find_each_others_prompts() -> None:
    llm, sampling = make_llm("draft_model", LIMITS), SAMPLINGS["greedy"]
    for salt, hits in ((b"one", 0), (b"two", 0), (b"one", 16), (b"", 0)):
        [transcript] = llm.prepare(BASE, sampling, RequestOptions(salt=salt))
        llm.engine.add(transcript)
        while llm.engine.has_work:
            llm.engine.step()
        assert transcript.request.num_cached_tokens == hits


@pytest.mark.parametrize("name", ON_PAGES)
def test_memory_is_counted_for_target_and_drafter_together(name: str) -> None:
    """The pools end with the last page."""
    target = tiny_models.plain().target.bytes_per_token()
    llm = make_llm(name, MemoryLimits(kv_memory=100_000, page_size=4))
    own = llm.drafter.spec.draft_kv.bytes_per_token  # type: ignore[union-attr]
    assert own > 0
    num_pages = 100_000 // (target + own) // 4 + 1
    assert llm.engine.scheduler.allocator.num_pages == num_pages
    for _ in range(2):
        llm.generate([[*range(4, 60)]] * 2, replace(SAMPLINGS["greedy"], max_tokens=40))
    for pool in (llm.target.pool, llm.drafter.spec.draft_kv.pool):  # type: ignore[union-attr]
        sizes = [(len(k), k[0].nbytes + v[0].nbytes) for k, v in pool.layers.values()]
        assert all(slots <= num_pages * 4 for slots, _ in sizes)
        expected = target if pool is llm.target.pool else own
        assert sum(size for _, size in sizes) == expected


def test_too_little_memory_for_a_page_is_refused() -> None:
    target = tiny_models.plain().target.bytes_per_token()
    with pytest.raises(ForedraftError, match=f"give at least {4 * target} "):
        tiny_models.limit_memory(tiny_models.plain(), None, MemoryLimits(kv_memory=100, page_size=4))
