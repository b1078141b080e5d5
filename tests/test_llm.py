"""The class LLM: its arguments, its results, and the errors for refused arguments."""

import pytest
import torch

from foredraft import LLM, ForedraftError, Sampling
from foredraft.draft_length.adaptive import AdaptiveLengthPolicy
from foredraft.draft_length.policy import FixedLengthPolicy
from foredraft.llm import MemoryLimits
from foredraft.sampling.distribution import distribution
from tests.support import tiny_models

GREEDY = Sampling(max_tokens=5, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def texting() -> LLM:
    """A model as large as the tokenizer's vocabulary, so that it takes and gives text."""
    tokenizer = tiny_models.tokenizer()
    return LLM(tiny_models.llama(len(tokenizer), seed=5), None, tokenizer=tokenizer, is_debug=True)


def test_a_prompt_is_text_or_ids_one_or_many(texting: LLM) -> None:
    """A list of integers is one prompt, not many."""
    ids = tiny_models.tokenizer()("the end").input_ids
    (from_text,) = texting.generate("the end", GREEDY)
    (from_ids,) = texting.generate(ids, GREEDY)
    assert from_text.token_ids == from_ids.token_ids
    assert (from_text.prompt, from_text.prompt_token_ids) == ("the end", ids)
    assert from_ids.prompt is None
    many = texting.generate(["the end", ids, "def"], GREEDY)
    assert [c.token_ids for c in many[:2]] == [from_text.token_ids] * 2
    assert many[2].prompt == "def"


def test_text_is_what_the_tokenizer_makes_of_the_ids(texting: LLM) -> None:
    (done,) = texting.generate("for word in", Sampling(max_tokens=30, temperature=0, ignore_eos=True))
    whole = tiny_models.tokenizer().decode(done.token_ids, skip_special_tokens=True)
    assert whole.startswith(done.text)
    assert len(whole) - len(done.text) <= 3
    assert done.finish_reason == "length"
    assert len(done.token_ids) == 30


def test_each_prompt_may_have_its_own_sampling(texting: LLM) -> None:
    params = [
        GREEDY,
        Sampling(max_tokens=2, seed=1, ignore_eos=True, n=3),
        Sampling(max_tokens=7, seed=2, ignore_eos=True),
    ]
    done = texting.generate(["a", "b", "c"], params)
    assert [len(c.token_ids) for c in done] == [5, 2, 2, 2, 7]
    assert [c.index for c in done] == [0, 0, 1, 2, 0]
    assert [c.prompt for c in done] == ["a", "b", "b", "b", "c"]
    assert len({tuple(c.token_ids) for c in done[1:4]}) == 3
    with pytest.raises(ForedraftError, match="2 prompts and 3 Samplings"):
        texting.generate(["a", "b"], params)


def test_a_stream_is_the_completion_in_pieces(texting: LLM) -> None:
    llm = texting.with_drafter("ngram", 3)
    sampling = Sampling(max_tokens=40, temperature=0.8, seed=4, n=2, ignore_eos=True)
    deltas = list(llm.stream("the end of the end of the", sampling))
    assert {delta.index for delta in deltas} == {0, 1}
    for n, completion in enumerate(llm.generate("the end of the end of the", sampling)):
        mine = [delta for delta in deltas if delta.index == n]
        assert "".join(delta.text for delta in mine) == completion.text
        assert [token for delta in mine for token in delta.token_ids] == completion.token_ids
        assert mine[-1].completion is not None
        assert mine[-1].completion.text == completion.text


def test_the_rule_follows_from_the_request(texting: LLM) -> None:
    """A seed promises the same text with and without speculation; without one `reject` accepts more."""
    auto = texting.with_drafter(None, verify="auto")
    params = [Sampling(max_tokens=1, seed=1), Sampling(max_tokens=1), Sampling(max_tokens=1, temperature=0)]
    assert [c.verification for c in auto.generate(["a"] * 3, params)] == ["match", "reject", "match"]
    lossy = texting.with_drafter(None, verify="typical")
    assert lossy.generate("a", Sampling(max_tokens=1))[0].verification == "typical"


def test_seeds_are_kept_and_their_absence_is_noise(texting: LLM) -> None:
    def text(seed: int | None) -> list[int]:
        return texting.generate("the", Sampling(max_tokens=12, seed=seed, ignore_eos=True))[0].token_ids

    assert text(1) == text(1)
    assert text(1) != text(2)
    assert text(None) != text(None)


def test_logprobs_are_those_of_a_direct_forward_pass() -> None:
    """The output has those of the sampled distribution, the prompt those of the model. Drafts are also rejected."""
    sampling = Sampling(max_tokens=12, temperature=0.7, top_k=9, seed=6, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    llm = tiny_models.plain().with_drafter(tiny_models.draft_model(4))
    prompt = [5, 6, 7, 8, 9]
    (done,) = llm.generate(prompt, sampling)
    assert 0 < done.stats.num_accepted < done.stats.num_drafted
    reference = tiny_models.llama().eval()
    reference.load_state_dict(tiny_models.target().state_dict())
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + done.token_ids])).logits[0]
    raw = logits.log_softmax(-1)
    log_probs = distribution(logits, sampling).log()
    assert done.prompt_logprobs is not None
    assert done.prompt_logprobs[0] is None
    assert len(done.prompt_logprobs) == len(prompt)
    for i, entry in enumerate(done.prompt_logprobs[1:]):
        assert entry is not None
        assert entry.token_id == prompt[i + 1]
        assert entry.raw_logprob == pytest.approx(float(raw[i, entry.token_id]), abs=1e-9)
        assert [token for token, _ in entry.raw_top] == raw[i].topk(2).indices.tolist()
    assert done.logprobs is not None
    assert [entry.token_id for entry in done.logprobs] == done.token_ids
    for i, entry in enumerate(done.logprobs, len(prompt) - 1):
        assert entry.logprob == pytest.approx(float(log_probs[i, entry.token_id]), abs=1e-9)
        assert entry.raw_logprob == pytest.approx(float(raw[i, entry.token_id]), abs=1e-9)
        assert [token for token, _ in entry.top] == log_probs[i].topk(3).indices.tolist()
        assert [value for _, value in entry.raw_top] == pytest.approx(raw[i].topk(3).values.tolist(), abs=1e-9)


def test_a_text_ends_at_the_context_limit() -> None:
    """A prompt of all but one token leaves room for one; drafts may not reach beyond."""
    llm = tiny_models.plain().with_drafter(tiny_models.draft_model(4))
    for room in range(1, 7):
        prompt = [7] * (tiny_models.CONTEXT - room)
        (done,) = llm.generate(prompt, Sampling(max_tokens=50, temperature=0, ignore_eos=True))
        assert (len(done.token_ids), done.finish_reason) == (room, "length")


WRONG_PROMPTS = {
    "empty text": ("", "the prompt is empty"),
    "no ids": ([[]], "the prompt is empty"),
    "no prompts": ([], "the prompt is empty"),
    "as long as the context": ([[5] * tiny_models.CONTEXT], "context is 256; shorten it"),
    "an id beyond the vocabulary": ([[1, 320]], "outside the vocabulary of 320"),
    "a negative id": ([[-1]], "outside the vocabulary of 320"),
    "messages": ([{"role": "user", "content": "hello"}], "give them to LLM.chat"),
    "several conversations": ([[{"role": "user", "content": "hello"}]], "give them to LLM.chat"),
    "no prompt at all": ([None], "a prompt is text or a list of token ids"),
    "words": ([["hello", "world"]], "a prompt is text or a list of token ids"),
}


@pytest.mark.parametrize("case", WRONG_PROMPTS)
def test_a_wrong_prompt_is_refused_in_one_line(texting: LLM, case: str) -> None:
    """And nothing of the call is left in the engine."""
    prompt, message = WRONG_PROMPTS[case]
    with pytest.raises(ForedraftError, match=message) as caught:
        texting.generate(prompt, GREEDY)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert not texting.engine.has_work


WRONG_SAMPLINGS = {
    "stop id": (Sampling(stop_token_ids=(320,)), "stop_token_ids holds 320"),
    "bias": (Sampling(logit_bias={999: 1.0}), "logit_bias holds 999"),
    "allowed ids": (Sampling(allowed_token_ids=(5, 320)), "allowed_token_ids holds 320"),
}


@pytest.mark.parametrize("case", WRONG_SAMPLINGS)
def test_a_sampling_outside_the_vocabulary_is_refused(texting: LLM, case: str) -> None:
    sampling, message = WRONG_SAMPLINGS[case]
    with pytest.raises(ForedraftError, match=message):
        texting.generate("a", sampling)


WRONG_DRAFTERS = {
    "unknown method": ("telepathy", "unknown method 'telepathy'; use none or one of .*draft_model"),
    "a list of methods": ({"method": ["ngram"]}, "unknown method"),
    "an option of another type": ({"method": "ngram", "branches": 2.5}, "branches takes a whole number, got 2.5"),
    "no method": ({"num_speculative_tokens": 3}, "names no method"),
    "unknown option": ({"method": "ngram", "colour": 1}, "unknown drafter option 'colour'"),
    "impossible option": ({"method": "ngram", "prompt_lookup_min": 0}, "prompt_lookup_min"),
    "no tokens": ({"method": "ngram", "num_speculative_tokens": 0}, "at least 1, got 0"),
    "no draft": ({"method": "draft_model"}, "needs a draft"),
    "no such folder": ({"method": "draft_model", "model": "./nowhere"}, "does not exist"),
}


@pytest.mark.parametrize("case", WRONG_DRAFTERS)
def test_a_wrong_drafter_is_refused_in_one_line(case: str) -> None:
    spec, message = WRONG_DRAFTERS[case]
    with pytest.raises(ForedraftError, match=message) as caught:
        tiny_models.plain().with_drafter(spec)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": "64"}, "max_model_len must be an integer or None, got '64'"),
        ({"tokenizer": 3}, "tokenizer takes a tokenizer, its folder or hub id, or None; got 3"),
    ],
)
def test_an_argument_of_another_type_is_refused_in_one_line(options: dict, message: str) -> None:
    """Fault: these ended in a TypeError and an AttributeError."""
    with pytest.raises(ForedraftError, match=message):
        LLM(tiny_models.target(), None, **options)


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ForedraftError, match="unknown verification rule 'guess'; use one of auto, match, reject"):
        LLM(tiny_models.target(), None, verify="guess")


def test_a_model_without_a_tokenizer_takes_ids_alone() -> None:
    """Text, stop strings and bad words given as text are refused; ids work, and the text is empty."""
    llm = tiny_models.plain()
    for prompt, sampling in (
        ("text", GREEDY),
        ([5], Sampling(stop="x")),
        ([5], Sampling(bad_words=("x",))),
    ):
        with pytest.raises(ForedraftError, match="has no tokenizer"):
            llm.generate(prompt, sampling)  # type: ignore[arg-type]
    (done,) = llm.generate([5], GREEDY)
    assert (done.text, len(done.token_ids)) == ("", 5)


def test_a_request_larger_than_the_memory_is_refused() -> None:
    llm = tiny_models.limit_memory(tiny_models.plain(), None, MemoryLimits(kv_tokens=32, page_size=4))
    with pytest.raises(ForedraftError, match="kv_tokens"):
        llm.generate([5] * 20, Sampling(max_tokens=13))
    assert len(llm.generate([5] * 20, Sampling(max_tokens=12, ignore_eos=True))[0].token_ids) == 12


def test_a_draft_model_is_loaded_from_its_folder(tmp_path) -> None:
    """With the target's dtype; one of another vocabulary is refused with both sizes."""
    tiny_models.draft().save_pretrained(tmp_path / "draft")
    llm = tiny_models.plain().with_drafter(
        {"method": "draft_model", "model": str(tmp_path / "draft"), "num_speculative_tokens": 3}
    )
    (done,) = llm.generate([5, 6, 7], Sampling(max_tokens=20, temperature=0, ignore_eos=True))
    assert done.stats.num_accepted > 0
    assert llm.drafter_name == "draft_model"
    tiny_models.llama(50).save_pretrained(tmp_path / "other")
    with pytest.raises(ForedraftError, match="has 50 tokens and LlamaForCausalLM 97"):
        tiny_models.plain().with_drafter({"method": "draft_model", "model": str(tmp_path / "other")})


def test_a_bad_word_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ForedraftError, match="bad_words"):
        tiny_models.plain().generate([5], Sampling(bad_words=((1, 200),)))


def test_a_stream_that_is_never_read_leaves_nothing_behind() -> None:
    llm = tiny_models.plain().with_drafter(None)
    llm.stream([5], GREEDY).close()
    assert not llm.engine.has_work


def test_a_call_that_is_refused_leaves_nothing_behind() -> None:
    llm = tiny_models.limit_memory(tiny_models.plain(), None, MemoryLimits(kv_tokens=32, page_size=4))
    with pytest.raises(ForedraftError):
        llm.generate([[5], [5] * 30], GREEDY)
    assert not llm.engine.has_work


def test_memory_too_small_for_a_page_is_refused() -> None:
    with pytest.raises(ForedraftError, match="kv_tokens"):
        tiny_models.limit_memory(tiny_models.plain(), None, MemoryLimits(kv_tokens=3, page_size=4))


def test_draft_lengths_are_measured_unless_one_is_named() -> None:
    llm = tiny_models.plain()
    for spec, length in [
        ("ngram", "auto"),
        ("ngram", None),
        ({"method": "ngram", "num_speculative_tokens": "auto"}, None),
    ]:
        other = llm.with_drafter(spec, length)
        assert other.is_adaptive
        assert isinstance(other.engine.length_policy, AdaptiveLengthPolicy)
    for spec, length in [("ngram", 3), ({"method": "ngram", "num_speculative_tokens": 3}, None)]:
        other = llm.with_drafter(spec, length)
        assert isinstance(other.engine.length_policy, FixedLengthPolicy)
        assert other.drafter.spec.max_nodes == 3
    assert not llm.is_adaptive, "without a drafter there is no length to choose, and recording steps takes time"
    assert isinstance(llm.engine.length_policy, FixedLengthPolicy)
    with pytest.raises(ForedraftError, match="takes a number, a range such as 2-6, auto"):
        llm.with_drafter("ngram", "many")


def test_the_text_is_that_of_plain_decoding_whatever_lengths_are_found() -> None:
    llm = tiny_models.plain()
    prompts = [[1, 2, 3, 1, 2, 3, 1], [5, 6, 5, 6, 5], [9]]
    for sampling in (Sampling(max_tokens=60, temperature=0), Sampling(max_tokens=60, seed=5)):
        plain = [c.token_ids for c in llm.with_drafter(None).generate(prompts, sampling)]
        adaptive = llm.with_drafter("ngram")
        found = adaptive.generate(prompts, sampling)
        assert [c.token_ids for c in found] == plain
    assert sum(adaptive.engine.length_policy.counts.values()) > 0, "no length was requested"


def test_calibration_measures_an_idle_engine() -> None:
    llm = tiny_models.plain().with_drafter("ngram")
    points = llm.calibrate(0.05)
    assert points
    assert llm.engine.length_policy.curve.is_measured
    stream = llm.stream([1, 2, 3], Sampling(max_tokens=60, ignore_eos=True))
    next(stream)
    with pytest.raises(ForedraftError, match="idle engine"):
        llm.calibrate()
    stream.close()
