"""The output side of one request, token by token: stop strings held back and found, figures, logprobs of the prompt."""

import pytest

from foredraft import Sampling
from foredraft.engine.transcript import Transcript
from foredraft.request_options import RequestOptions
from foredraft.sampling.distribution import distribution
from tests.support import engine_fakes, tiny_models
from tests.support.engine_fakes import TableLM

V = 23
LM = TableLM.from_seed(V, seed=2)


def transcript(text: str, **sampling: object) -> tuple[Transcript, list[int]]:
    """Make a new transcript and the ids of a text."""
    tokenizer = tiny_models.tokenizer()
    made = engine_fakes.make_transcript([5], Sampling(max_tokens=200, **sampling), tokenizer=tokenizer)  # type: ignore[arg-type]
    return made, tokenizer(text).input_ids


def push_tokens(made: Transcript, ids: list[int]) -> list[str]:
    """Push tokens until the end; the texts of the deltas, one a token."""
    texts = []
    for token in ids:
        is_end = made.push(token)
        made.request.output.append(token)
        made.emit(["plain"])
        texts.append(made.deltas[-1].text)
        if is_end:
            break
    return texts


def test_text_that_may_begin_a_stop_string_waits() -> None:
    """A client must never see the first half of a stop string."""
    made, ids = transcript("def the", stop=("theX",))
    texts = push_tokens(made, ids)
    assert "the" not in "".join(texts)
    assert made.text + made._output_text.pending == "def the"
    more, _ = transcript("")
    assert more.text == ""


def test_text_that_waited_comes_when_it_turns_out_otherwise() -> None:
    made, ids = transcript("the end, then", stop=("there", "end!"))
    push_tokens(made, ids)
    made.fail("abort")
    assert made.text == "the end, then"
    assert "".join(delta.text for delta in made.deltas) == made.text


def test_a_stop_string_ends_the_text_before_it() -> None:
    made, ids = transcript("for word in the end of it", stop=("the end",))
    texts = push_tokens(made, ids)
    assert (made.text, made.finish_reason, made.stop_reason) == ("for word in ", "stop", "the end")
    assert "".join(texts) == made.text


def test_of_two_stop_strings_the_first_to_begin_counts() -> None:
    """The longer of two stop strings that begin together wins, in one token or in several."""
    for stops in (("b", "abc"), ("abc", "b")):
        made, _ = transcript("", stop=stops)
        tokenizer = tiny_models.tokenizer()
        push_tokens(made, [tokenizer.convert_tokens_to_ids(c) for c in "xab"])
        assert (made.text, made.stop_reason) == ("xa", "b"), "b is complete before abc is"
    word = transcript(" the")[1]
    assert len(word) == 1, "one token"
    made, _ = transcript("", stop=("e", "h", "he"))
    push_tokens(made, word)
    assert (made.text, made.stop_reason) == (" t", "he")


def test_what_ended_before_min_tokens_is_no_stop() -> None:
    """It was found after all, later, if another stop string happened to hold its text back."""
    tokenizer = tiny_models.tokenizer()
    ids = [tokenizer.convert_tokens_to_ids(c) for c in "abxyb."]
    made, _ = transcript("", stop=("b", "abc"), min_tokens=3)
    push_tokens(made, ids)
    assert (made.text, made.stop_reason, made.num_tokens) == ("abxy", "b", 5)


def test_an_end_id_is_counted_and_has_no_text() -> None:
    made, ids = transcript("the", stop_token_ids=(70,))
    push_tokens(made, [*ids, 70])
    assert (made.text, made.stop_reason) == ("the", 70)
    assert made.build_completion().token_ids == [*ids, 70]
    assert made.build_completion().stats.num_tokens == len(ids) + 1


def test_an_end_comes_before_the_length() -> None:
    """Stop string, then cap, on the same token: the cap used to win elsewhere, and the stop string leaked."""
    tokenizer = tiny_models.tokenizer()
    ids = tokenizer("the end").input_ids
    made = engine_fakes.make_transcript([5], Sampling(max_tokens=len(ids), stop=("end",)), tokenizer=tokenizer)
    push_tokens(made, ids)
    assert (made.finish_reason, made.stop_reason, made.text) == ("stop", "end", "the ")


def test_figures_count_what_was_kept() -> None:
    made, _ = transcript("")
    made.stats_recorder.record_step(num_drafted=4, num_accepted=2, draft_time=0.5)
    made.stats_recorder.record_step(num_drafted=0, num_accepted=0, draft_time=0.25)
    made.stats_recorder.record_step(num_drafted=4, num_accepted=4, draft_time=0.25)
    stats = made.build_stats()
    assert (stats.target_passes, stats.num_drafts, stats.num_drafted, stats.num_accepted) == (3, 2, 8, 6)
    assert stats.accepted_at == (2, 2, 1, 1)
    assert stats.per_position == (1.0, 1.0, 0.5, 0.5)
    assert stats.acceptance_rate == 0.75
    assert stats.draft_time == 1.0


@pytest.mark.parametrize("max_chunk", [1, 3, 100])
@pytest.mark.parametrize("is_drafted", [False, True])
def test_prompt_logprobs_are_those_of_the_raw_distribution(max_chunk: int, is_drafted: bool) -> None:
    """Every prompt token but the first, for any prompt chunks and any other requests in the batch."""
    prompts = [[1, 2, 3, 4, 5, 6, 7], [8], [9, 10], [3, 1, 4, 1, 5]]
    sampling = Sampling(max_tokens=4, temperature=0.5, seed=1, prompt_logprobs=2, logprobs=1)
    drafter = engine_fakes.make_drafter(LM.perturb(0.5), 3) if is_drafted else None
    engine = engine_fakes.make_engine(LM, drafter, max_chunk=max_chunk)
    quiet = engine_fakes.make_transcript([2, 2, 2, 2], Sampling(max_tokens=4), 9)
    loud = [engine_fakes.make_transcript(p, sampling, n) for n, p in enumerate(prompts)]
    done = engine_fakes.run(engine, [loud[0], quiet, *loud[1:]])
    check_prompts([done[0][0], *[completion for completion, _ in done[2:]]], prompts)


def check_prompts(completions: list, prompts: list[list[int]]) -> None:
    for completion, prompt in zip(completions, prompts, strict=True):
        found = completion.prompt_logprobs
        assert found[0] is None
        assert [entry.token_id for entry in found[1:]] == prompt[1:]
        for i, entry in enumerate(found[1:], 1):
            raw = LM.compute_logits(prompt[:i]).log_softmax(-1)
            assert entry.raw_logprob == entry.logprob == pytest.approx(float(raw[prompt[i]]), abs=1e-9)
            assert [token for token, _ in entry.raw_top] == raw.topk(2).indices.tolist()


def test_prompt_logprobs_survive_a_preemption_in_the_middle_of_the_prompt() -> None:
    """They continued from the position of the computation. Recomputed in chunks with other ends, they stopped for
    good."""
    sampling = Sampling(max_tokens=12, temperature=0, prompt_logprobs=2)
    prompts = [[1, 2, 3], list(range(20))]
    engine = engine_fakes.make_engine(LM, None, num_pages=9, max_chunk=5)
    transcripts = [engine_fakes.make_transcript(p, sampling, n) for n, p in enumerate(prompts)]
    for t in transcripts:
        engine.add(t)
    engine.step()
    engine.step()
    young = transcripts[1].request
    assert 0 < young.num_computed < len(young.spec.prompt)
    engine.scheduler.preempt([young])
    engine.scheduler.limits = type(engine.scheduler.limits)(max_chunk=3)
    while engine.has_work:
        engine.step()
    check_prompts([t.deltas[-1].completion for t in transcripts], prompts)


def test_logprobs_are_of_the_distribution_drawn_from() -> None:
    """Temperature, filters and penalties in `logprob`, the model's own distribution in `raw_logprob`."""
    sampling = Sampling(max_tokens=5, temperature=0.5, top_k=3, seed=1, logprobs=4)
    ((done, _),) = engine_fakes.run(
        engine_fakes.make_engine(LM, None), [engine_fakes.make_transcript([1, 2], sampling)]
    )
    assert done.logprobs is not None
    tokens = [1, 2]
    for entry in done.logprobs:
        logits = LM.compute_logits(tokens)
        probs = distribution(logits[None], sampling)[0]
        assert entry.logprob == pytest.approx(float(probs[entry.token_id].log()), abs=1e-12)
        assert entry.raw_logprob == pytest.approx(float(logits.log_softmax(-1)[entry.token_id]), abs=1e-12)
        assert len(entry.top) == 3, "only three tokens are possible"
        assert len(entry.raw_top) == 4
        tokens.append(entry.token_id)


def test_a_traced_request_shows_the_drafted_part_of_its_trees() -> None:
    llm = tiny_models.plain().with_drafter("ngram", 3)
    options = RequestOptions(is_traced=True)
    (transcript,) = llm.prepare([1, 2, 3, 1, 2, 3, 1, 2], Sampling(max_tokens=12, temperature=0), options)
    for delta in llm._shared.read([transcript]):
        (step,) = delta.steps
        assert step.emitted == delta.token_ids
        assert step.parents[0] == -1
        assert len(step.tokens) == len(step.parents) == len(step.pieces)
        assert step.accepted[0] == 0
        follows = [step.tokens[node] for node in step.accepted[1:]]
        assert list(step.emitted[: len(follows)]) == follows, "an accepted node is the token put out before it"
    assert transcript.build_stats().num_drafted > 0
