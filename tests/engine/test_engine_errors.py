"""Errors of one request stay with it, and a request that ends frees all its memory.

Guards against NaN logits ending every stream or turning into the last id of the vocabulary, a request that can never
fit being preempted for ever, and pages, slots and drafter memory that an abandoned stream leaves behind.
"""

import itertools
from dataclasses import replace

import pytest

from foredraft import ForedraftError, Sampling
from foredraft.llm import LLM
from tests.support import engine_fakes, tiny_models
from tests.support.engine_fakes import TableLM

V = 150
LM = TableLM.from_seed(V, seed=7)
PROMPTS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]
GREEDY = Sampling(max_tokens=12, temperature=0)


def make_poisoned_model(victim: int) -> TableLM:
    """Make a model that gives NaN after one token that only the victim's sequence has."""
    plain = [c.token_ids for c, _ in engine_fakes.run(engine_fakes.make_engine(LM, None), transcripts("match"))]
    own = next(
        token
        for token in plain[victim][2:-1]
        if not any(token in text[:-1] for i, text in enumerate(plain) if i != victim)
        and not any(token in prompt for prompt in PROMPTS)
    )
    return replace(LM, poison=frozenset({own}))


def transcripts(rule: str) -> list:
    return [engine_fakes.make_transcript(prompt, GREEDY, n, verify=rule) for n, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("rule", ["match", "reject", "block", "spectr"])
@pytest.mark.parametrize("is_drafted", [False, True])
def test_logits_that_are_no_distribution_fail_one_request_alone(rule: str, is_drafted: bool) -> None:
    """It keeps the text of the passes before and reports the reason; the others are unchanged."""
    plain = [c.token_ids for c, _ in engine_fakes.run(engine_fakes.make_engine(LM, None), transcripts(rule))]
    lm = make_poisoned_model(victim=1)
    drafter = engine_fakes.make_drafter(LM.perturb(0.3), 3) if is_drafted else None
    engine = engine_fakes.make_engine(lm, drafter)
    done = [completion for completion, _ in engine_fakes.run(engine, transcripts(rule))]
    assert [c.finish_reason for c in done] == ["length", "error", "length", "length"]
    failed = done.pop(1)
    expected = plain.pop(1)
    assert [c.token_ids for c in done] == plain
    assert failed.error is not None
    assert "NaN" in failed.error
    assert 0 < len(failed.token_ids) < len(expected)
    assert failed.token_ids == expected[: len(failed.token_ids)]
    assert is_drafted or failed.token_ids[-1] in lm.poison
    assert (engine.drafter.num_failures, len(engine.scheduler.running)) == (0, 0)


@pytest.mark.parametrize("rule", ["match", "reject", "block", "spectr"])
def test_a_draft_token_before_invalid_logits_counts_as_accepted(rule: str) -> None:
    """The statistics agree with the origins of the deltas, which show this token as accepted."""
    [(plain, _)] = engine_fakes.run(engine_fakes.make_engine(LM, None), transcripts(rule)[:1])
    last = plain.token_ids[3]
    assert last not in plain.token_ids[:3]
    engine = engine_fakes.make_engine(replace(LM, poison=frozenset({last})), engine_fakes.make_drafter(LM, 6))
    [(failed, deltas)] = engine_fakes.run(engine, transcripts(rule)[:1])
    assert (failed.finish_reason, failed.token_ids) == ("error", plain.token_ids[:4])
    origins = [origin for delta in deltas for origin in delta.origins]
    assert failed.stats.num_accepted == origins.count("accepted") == 4


def test_a_sampling_that_leaves_nothing_to_draw_fails_alone() -> None:
    """The only token allowed is one that min_tokens forbids."""
    bad = Sampling(max_tokens=5, min_tokens=5, allowed_token_ids=(3,), stop_token_ids=(3,))
    engine = engine_fakes.make_engine(LM, None)
    done = engine_fakes.run(
        engine, [engine_fakes.make_transcript([1], GREEDY), engine_fakes.make_transcript([1], bad, 1)]
    )
    assert [completion.finish_reason for completion, _ in done] == ["length", "error"]


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    """It would be preempted for ever; one token less just fits, and runs to its end."""
    engine = engine_fakes.make_engine(LM, engine_fakes.make_drafter(LM, 4), num_pages=6)
    with pytest.raises(ForedraftError, match="raise kv_tokens or lower max_tokens"):
        engine.add(engine_fakes.make_transcript([1] * 5, Sampling(max_tokens=16)))
    assert not engine.has_work
    ((done, _),) = engine_fakes.run(engine, [engine_fakes.make_transcript([1] * 5, Sampling(max_tokens=15))])
    assert len(done.token_ids) == 15


def test_an_abort_frees_everything_wherever_the_request_is() -> None:
    """Requests are aborted after 0 to 3 steps, one of them twice; the others are unchanged."""
    plain = [c.token_ids for c, _ in engine_fakes.run(engine_fakes.make_engine(LM, None), transcripts("match"))]
    for steps in range(4):
        drafter = engine_fakes.make_drafter(LM.perturb(0.3), 3)
        engine = engine_fakes.make_engine(LM, drafter, max_batch=3, max_chunk=2)
        made = transcripts("match")
        for transcript in made:
            engine.add(transcript)
        for _ in range(steps):
            engine.step()
        for transcript in (made[0], made[3], made[0]):
            engine.abort(transcript.request)
        engine.scheduler.check_integrity()
        while engine.has_work:
            engine.step()
        assert engine.scheduler.allocator.num_used == 0
        assert not engine.transcripts
        assert not drafter.num_valid
        for n, transcript in enumerate(made):
            completion = transcript.deltas[-1].completion
            assert completion is not None
            if n in (0, 3):
                assert completion.finish_reason == "abort"
                assert completion.token_ids == plain[n][: len(completion.token_ids)]
            else:
                assert completion.token_ids == plain[n]


def make_drafting_llm() -> LLM:
    return tiny_models.plain().with_drafter(tiny_models.draft_model(3))


def assert_idle(llm: LLM) -> None:
    engine = llm.engine
    assert not engine.has_work
    assert not engine.transcripts
    assert engine.scheduler.allocator.num_used == 0
    assert not llm.drafter.num_valid  # type: ignore[union-attr]
    engine.scheduler.check_integrity()


def test_leaving_a_stream_early_aborts_what_is_left() -> None:
    """A client that hangs up may not hold pages for good; the next call is as if it had never been."""
    llm = make_drafting_llm()
    sampling = Sampling(max_tokens=30, temperature=0, ignore_eos=True)
    for delta in llm.stream([[5, 6], [7]], sampling):
        assert delta.completion is None
        break
    assert_idle(llm)
    stream = llm.stream([[5, 6], [7]], sampling)
    next(stream)
    assert llm.engine.has_work
    stream.close()
    assert_idle(llm)
    assert llm.generate([5, 6], sampling)[0].token_ids == tiny_models.plain().generate([5, 6], sampling)[0].token_ids


def test_two_streams_of_one_model_do_not_disturb_each_other() -> None:
    """Each stream steps the engine for both, and gets all its deltas in any order of reading."""
    llm, plain = make_drafting_llm(), tiny_models.plain()
    first, second = (
        Sampling(max_tokens=20, temperature=0, ignore_eos=True),
        Sampling(max_tokens=9, seed=3, ignore_eos=True),
    )
    a, b = llm.stream([[5, 6], [33]], first), llm.stream([[7, 8, 9]], second)
    taken: list[list] = [[], []]
    for one, two in itertools.zip_longest(a, b):
        taken[0] += [one] if one else []
        taken[1] += [two] if two else []
    for deltas, prompts, sampling in ((taken[0], [[5, 6], [33]], first), (taken[1], [[7, 8, 9]], second)):
        for n, expected in enumerate(plain.generate(prompts, sampling)):
            mine = [delta for delta in deltas if delta.index == n]
            assert [token for delta in mine for token in delta.token_ids] == expected.token_ids
            assert mine[-1].completion is not None
    assert_idle(llm)


def test_one_stream_left_early_leaves_the_other_alone() -> None:
    llm = make_drafting_llm()
    sampling = Sampling(max_tokens=16, temperature=0, ignore_eos=True)
    a, b = llm.stream([[5, 6]], sampling), llm.stream([[33]], sampling)
    next(a)
    next(b)
    a.close()
    rest = list(b)
    assert rest[-1].completion is not None
    assert rest[-1].completion.token_ids == tiny_models.plain().generate([33], sampling)[0].token_ids
    assert_idle(llm)


def test_a_model_that_raises_leaves_the_engine_usable() -> None:
    """The call fails with the model's own error; nothing is left behind, and the next call works."""

    class Flaky(TableLM):
        def forward(self, forward_batch, hidden_layers=()):
            if self.num_passes == 3:
                self.num_passes += 1
                raise RuntimeError("out of memory")
            return super().forward(forward_batch, hidden_layers)

    engine = engine_fakes.make_engine(Flaky(LM.table), None)
    made = transcripts("match")
    for transcript in made:
        engine.add(transcript)
    engine.step()
    engine.step()
    engine.step()
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    for transcript in made:
        engine.abort(transcript.request)
    engine.scheduler.check_integrity()
    assert engine.scheduler.allocator.num_used == 0
    plain = [c.token_ids for c, _ in engine_fakes.run(engine_fakes.make_engine(LM, None), transcripts("match"))]
    assert [c.token_ids for c, _ in engine_fakes.run(engine, transcripts("match"))] == plain
