"""Requests that end, are aborted or give way leave nothing behind: over every method, with more requests than slots.

Guards against state that stays with a slot whose request is gone: memory that grows with every text, and one tenant's
text in the drafts of the next one to sit there.
"""

import gc
import itertools
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from torch import Tensor, nn

from foredraft import LLM, Completion, MemoryLimits, Sampling
from foredraft.engine.transcript import Transcript
from foredraft.kv.allocator import PageAllocator
from tests.invariants.test_seq2seq import MADE as PAIRS
from tests.support import tiny_models, tiny_seq2seq
from tests.support.method_cases import EACH_CASE, METHOD_CASES

LIMITS = MemoryLimits(kv_tokens=36, page_size=4, max_batch=4)  # of which a request takes half at most
PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7, 8, 9], [33], [11, 12] * 6, [50] * 5, [61, 62, 63, 64, 61, 62], [44, 45], [9] * 14]
GREEDY = Sampling(max_tokens=12, temperature=0, ignore_eos=True)
SAMPLED = Sampling(max_tokens=12, temperature=0.7, seed=3, ignore_eos=True)
SAMPLINGS = [GREEDY, SAMPLED, GREEDY, SAMPLED, GREEDY, SAMPLED, GREEDY]
ABORTED = {0: 3, 3: 5, 5: 0}  # which -> after how many tokens

# state that may grow: it holds no sequence, or keeps sequences on purpose
SHARED = {
    "SuffixCache.": "past outputs, which were asked for, by tenant and bounded (test_output_cache.py)",
    "ValueEstimates._by_member": "numbers by part: how good its drafts are",
    "ValueEstimates._by_key": "numbers by part: how good its drafts are",
    "TliDrafter._shared_tokens": "the tokens of both vocabularies, made when they are first needed",
    "DraftLoop._inputs": "sizes of recordings, for all requests",
    "ReplayCache._replays": "recordings by size, for all requests",
    "StagingBlock.": "inputs of a recording, which the next request overwrites",
    "FixedShape.": "the shape of a recording",
    "DrafterSpec.": "what a part needs",
    "SpecUnion._specs": "what every part needs",
    "SpecUnion._columns": "boundaries of every part",
    "EnsembleDrafter._selected": "parts that were asked in the last step",
    "MemberStats.depth_by_nodes": "numbers by draft length",
    "EarlyExit._truncated_targets": "one per exit layer",
    "StaticTree._restricted_trees": "the shape of a fixed tree",
    "StaticTree._sorted_paths": "the shape of a fixed tree",
    "VocabMap": "of two vocabularies, made when it is first looked at",
    "TokenizerVocabulary": "of a vocabulary, made when it is first looked at",
}


class LostError(Exception):
    """Error of a device."""


def contents(root: object) -> dict[str, int]:
    """Path -> entries, of every container that a drafter keeps, however deep; of models and tensors none."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    left = deque([("", root)])
    while left:
        path, thing = left.popleft()
        is_own = type(thing).__module__.startswith("foredraft.") and not isinstance(thing, nn.Module | PageAllocator)
        if id(thing) in seen or isinstance(thing, Tensor):
            continue
        seen.add(id(thing))
        if isinstance(thing, dict | list | set | deque):
            found[path] = found.get(path, 0) + len(thing)
            values = thing.values() if isinstance(thing, dict) else thing
            left += [(path + "[]", value) for value in values]
        elif isinstance(thing, tuple):
            left += [(path + "[]", value) for value in thing]
        elif is_own and not type(thing).__module__.startswith(("foredraft.models", "foredraft.kv.pool")):
            name = type(thing).__name__
            left += [(f"{name}.{key}", value) for key, value in attributes(thing)]
    return found


def attributes(thing: object) -> Iterator[tuple[str, Any]]:
    yield from getattr(thing, "__dict__", {}).items()
    for kind in type(thing).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(thing, name):
                yield name, getattr(thing, name)


def allocators(root: object) -> list[PageAllocator]:
    return [value for part in parts(root) for _, value in attributes(part) if isinstance(value, PageAllocator)]


def parts(drafter: object) -> Iterator[Any]:
    """List a drafter and the drafters inside it."""
    yield drafter
    inner = [getattr(drafter, name, None) for name in ("drafter", "primary", "fallback")]
    for part in (*inner, *getattr(drafter, "members", ())):
        if part is not None:
            yield from parts(part)


def left_behind(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    grown = {path: size for path, size in after.items() if size > before.get(path, 0)}
    return {path: size for path, size in grown.items() if not path.startswith(tuple(SHARED))}


def run(llm: LLM, prompts: Sequence[Any], samplings: Sequence[Sampling], aborted: dict[int, int]) -> list[Completion]:
    """Run all requests to their end, except those that are aborted on the way."""
    transcripts: list[Transcript] = []
    for prompt, sampling in zip(prompts, samplings, strict=True):
        transcripts += llm.prepare(prompt, sampling, first_index=len(transcripts))
    for transcript in transcripts:
        llm.engine.add(transcript)
    while llm.engine.has_work:
        try:
            llm.engine.step()
        except LostError:
            llm.engine.recover()
        for i, least in aborted.items():
            if transcripts[i].num_tokens >= least:
                llm.engine.abort(transcripts[i].request)
    return [transcript.deltas[-1].completion for transcript in transcripts]  # type: ignore[misc]


def watch_requests(llm: LLM) -> list["weakref.ref[Any]"]:
    """Record a weak reference to every request that is prepared from now on."""
    found: list[weakref.ref[Any]] = []
    prepare = llm.prepare

    def noting(*given: Any, **options: Any) -> list[Transcript]:
        made = prepare(*given, **options)
        found.extend(weakref.ref(transcript.request) for transcript in made)
        return made

    llm.prepare = noting  # type: ignore[method-assign]
    return found


def losing(llm: LLM, nth: int) -> None:
    """Have its target lose one pass, once that is computed and its drafts are made."""
    forward, passes = llm.target.forward, itertools.count(1)

    def failing(*given: Any) -> Any:
        made = forward(*given)
        if next(passes) == nth:
            raise LostError
        return made

    llm.target.forward = failing  # type: ignore[method-assign]


def check(llm: LLM, before: dict[str, int], requests: Sequence["weakref.ref[Any]"]) -> None:
    engine = llm.engine
    engine.drafter.forget(())  # a store sees the end of a request with the next call of any kind
    assert left_behind(before, contents(engine.drafter)) == {}
    assert [a.num_used for a in allocators(engine.drafter)] == [0] * len(allocators(engine.drafter))
    assert engine.scheduler.allocator.num_used == 0
    gc.collect()
    assert [reference for reference in requests if reference() is not None] == []


@cache
def generate_expected() -> list[list[int]]:
    return [c.token_ids for c in tiny_models.plain().generate(PROMPTS, SAMPLINGS)]


@pytest.mark.parametrize("name", EACH_CASE)
def test_nothing_of_a_request_is_kept(name: str) -> None:
    llm = tiny_models.limit_memory(tiny_models.plain(), METHOD_CASES[name].make(3), LIMITS)
    before, requests = contents(llm.engine.drafter), watch_requests(llm)
    for _ in range(2):  # the second finds what the first left, and loses a pass
        done = run(llm, PROMPTS, SAMPLINGS, ABORTED)
        for i, (completion, wanted) in enumerate(zip(done, generate_expected(), strict=True)):
            assert completion.token_ids == wanted[: len(completion.token_ids)]
            assert (completion.finish_reason == "abort") == (i in ABORTED)
            assert i in ABORTED or completion.token_ids == wanted
        del done, completion
        losing(llm, 9)
    assert llm.engine.scheduler.num_preempted > 0
    assert llm.engine.drafter.num_failures == 0
    check(llm, before, requests)


@pytest.mark.parametrize("name", ["suffix, store", "draft_model, tli", "eagle"])
def test_a_drafter_that_forgets_nothing_is_seen(name: str) -> None:
    made = METHOD_CASES[name].make(3)
    made.forget = lambda slots: None  # type: ignore[method-assign]
    llm = tiny_models.limit_memory(tiny_models.plain(), made, LIMITS)
    before, requests = contents(llm.engine.drafter), watch_requests(llm)
    run(llm, PROMPTS[:2], SAMPLINGS[:2], {})
    with pytest.raises(AssertionError):
        check(llm, before, requests)


PAIR_PROMPTS = tiny_seq2seq.sources("t5", (5, 11, 1, 20, 9, 13, 30))


@cache
def generate_again() -> list[list[int]]:
    return [c.token_ids for c in tiny_seq2seq.plain().generate(PAIR_PROMPTS, SAMPLINGS)]


@pytest.mark.parametrize("name", ["aggressive", "chimera", "draft_model, tree", "eagle", "lookahead", "suffix"])
def test_nothing_of_a_request_with_a_source_is_kept(name: str) -> None:
    """The keys and values of sources return too, the draft's own among them."""
    llm = LLM(tiny_seq2seq.t5(), None, limits=replace(LIMITS, kv_tokens=24), is_debug=True)
    llm = llm.with_drafter(PAIRS[name](llm, 3), verify="match")
    before, requests = contents(llm.engine.drafter), watch_requests(llm)
    for _ in range(2):
        done = run(llm, PAIR_PROMPTS, SAMPLINGS, ABORTED)
        assert all(c.token_ids == wanted[: len(c.token_ids)] for c, wanted in zip(done, generate_again(), strict=True))
        assert [i for i, c in enumerate(done) if c.finish_reason == "abort"] == sorted(ABORTED)
        del done
        losing(llm, 9)
    assert llm.engine.scheduler.num_preempted > 0
    check(llm, before, requests)
    memories = [lm.pool.cross_kv for lm in models(llm)]
    assert [memory.num_sources for memory in memories] == [0] * len(memories)


def models(llm: LLM) -> list[Any]:
    """Those with an encoder: the target, and its draft."""
    drafts = [part.lm for part in parts(llm.engine.drafter) if hasattr(part, "lm")]
    return [lm for lm in (llm.target, *drafts) if getattr(lm, "has_encoder", False)]
