"""A store of past outputs is one per tenant: what another tenant's texts were changes no draft, not by a token.

Guards against a store that is looked up without a tenant, and against what a composition learns from one tenant showing
another's text.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from foredraft import LLM, RequestOptions, Sampling
from foredraft.drafters.ensemble.drafter import EnsembleDrafter
from foredraft.drafters.ensemble.members import EnsembleMember
from foredraft.drafters.ensemble.selector import SelectionMode
from foredraft.drafters.interface import Drafter
from foredraft.drafters.method import DrafterContext
from foredraft.drafters.registry import load_methods
from foredraft.drafters.suffix import method as suffix
from foredraft.engine.sandbox import SandboxedDrafter
from foredraft.engine.transcript import Transcript
from foredraft.outputs import StepTree
from tests.support import tiny_models, tiny_seq2seq

SAMPLING = Sampling(max_tokens=24, temperature=0, ignore_eos=True)
OURS, THEIRS = b"ours", b"theirs"
TARGETS: dict[str, tuple[Callable[[], LLM], list[int]]] = {
    "decoder": (tiny_models.plain, [44, 45]),
    "encoder-decoder": (tiny_seq2seq.plain, [7, 9, 12]),
}


def drafting(llm: LLM, method: str) -> LLM:
    """Make an LLM with `suffix` and a store, alone or with `ngram`, on an engine of its own."""
    context = DrafterContext(llm.target.vocab_size, llm.target, 6, dtype=llm.target.model.dtype)
    made: Drafter = suffix.create(suffix.Config(min_confidence=0.01, store_tokens=1024), context)
    if method != "suffix":
        ngram = load_methods()["ngram"]
        other: Drafter = ngram.create(ngram.config(prompt_lookup_min=1), context)
        mode: SelectionMode = "merge" if method == "merged" else "auto"
        ticks = itertools.count()
        parts = [
            EnsembleMember(type(one).__name__, one, SandboxedDrafter(one, context.vocab_size)) for one in (made, other)
        ]
        made = EnsembleDrafter(parts, mode, method, clock=lambda: 1e-3 * next(ticks))
    return llm.with_drafter(made, verify="match")


def text_of(llm: LLM, prompt: list[int], salt: bytes, abort_at: int | None = None) -> Transcript:
    [transcript] = llm.prepare(prompt, SAMPLING, RequestOptions(salt=salt, is_traced=True))
    llm.engine.add(transcript)
    while not transcript.is_finished:
        llm.engine.step()
        if abort_at is not None and transcript.num_tokens >= abort_at:
            llm.engine.abort(transcript.request)
    return transcript


def collect_drafts(transcript: Transcript) -> tuple[Any, list[StepTree]]:
    """Collect every number of a request's drafts, and every tree."""
    stats = transcript.deltas[-1].completion.stats
    numbers = stats.num_drafts, stats.num_drafted, stats.num_accepted, stats.per_position, stats.target_passes
    return numbers, [step for delta in transcript.deltas for step in delta.steps]


def count_accepted(transcript: Transcript) -> int:
    return transcript.deltas[-1].completion.stats.num_accepted


@pytest.mark.parametrize("method", ["suffix", "merged", "auto"])
@pytest.mark.parametrize("target", TARGETS)
def test_drafts_are_what_they_would_be_if_the_other_had_never_been(target: str, method: str) -> None:
    """Another tenant generates the very output of this one, to its end or to an abort."""
    make, prompt = TARGETS[target]
    alone = text_of(drafting(make(), method), prompt, OURS)
    for abort_at in (None, 12):
        llm = drafting(make(), method)
        secret = text_of(llm, prompt, THEIRS, abort_at).request.output
        assert secret == alone.request.output[: len(secret)]
        mine = text_of(llm, prompt, OURS)
        assert mine.request.output == alone.request.output
        assert collect_drafts(mine) == collect_drafts(alone)
        again = text_of(llm, prompt, OURS)  # with our own text there the drafts are others: the test can fail
        assert count_accepted(again) > count_accepted(mine)
        assert llm.engine.drafter.num_failures == 0
