"""Comparison of whole outputs: near ties apart from faults, and checks without drafts."""

from dataclasses import replace

import pytest

from foredraft import LLM
from foredraft.certify import CertifyPlan, certify
from foredraft.certify.outputs import OutputRun, check_outputs
from foredraft.certify.subject import Subject, extend_prompt
from foredraft.errors import ForedraftError
from foredraft.outputs import Completion
from foredraft.sampling.params import Sampling
from foredraft.source import EncoderSource, PreparedPrompt
from tests.support import tiny_models

PROMPT = [5, 9, 14, 9, 5]


@pytest.fixture
def subject() -> Subject:
    llm = LLM(tiny_models.target(), tiny_models.draft_model(2), tokenizer=tiny_models.tokenizer())
    return replace(Subject.make(llm, ()), prompts=(PROMPT,))


def change_token(completion: Completion, index: int) -> Completion:
    tokens = list(completion.token_ids)
    tokens[index] = (tokens[index] + 1) % tiny_models.VOCAB
    return replace(completion, token_ids=tokens)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(seed=3)], ids=["greedy", "seeded"])
def test_the_margin_is_measured_where_the_outputs_part(subject, sampling):
    run_sampling = replace(sampling, max_tokens=6, logprobs=0, ignore_eos=True)
    expected = subject.plain.generate([PROMPT], run_sampling)[0]
    run = OutputRun(PROMPT, run_sampling, expected)
    assert run.compare(run.draft(subject), subject).margin is None
    comparison = run.compare(change_token(expected, 3), subject)
    assert comparison.num_equal == 3
    assert comparison.margin is not None
    assert comparison.margin > 0


def test_an_output_that_ends_early_is_a_fault(subject):
    sampling = Sampling(temperature=0.0, max_tokens=6, logprobs=0, ignore_eos=True)
    expected = subject.plain.generate([PROMPT], sampling)[0]
    shorter = replace(expected, token_ids=expected.token_ids[:4])
    assert OutputRun(PROMPT, sampling, expected).compare(shorter, subject).margin == float("inf")


def test_no_drafts_are_no_evidence():
    silent = LLM(tiny_models.target(), "ngram", tokenizer=tiny_models.tokenizer())
    results = check_outputs(replace(Subject.make(silent, ()), prompts=([5, 9, 14, 22],)), 2)
    assert not results[0].is_passed
    assert "no drafts were made" in results[0].evidence


def test_a_rounding_beyond_the_dtype_fails(subject, monkeypatch):
    calls = []

    def add_noise(logits, p, token, count):
        result = original(logits, p, token, count)
        calls.append(token)
        return replace(result, raw_logprob=result.raw_logprob + 1e-6 * len(calls))

    from foredraft.engine import target_output

    original = target_output.compute_token_logprob
    monkeypatch.setattr(target_output, "compute_token_logprob", add_noise)
    (result,) = [r for r in check_outputs(subject, 6) if r.name == "log-probabilities"]
    assert not result.is_passed


def test_prompts_are_extended_behind_their_tokens():
    source = EncoderSource(tokens=(1, 2))
    assert extend_prompt([1, 2], [3]) == [1, 2, 3]
    extended = extend_prompt(PreparedPrompt(source, [0]), [3])
    assert isinstance(extended, PreparedPrompt)
    assert (extended.source, extended.tokens) == (source, [0, 3])


def test_a_target_without_a_drafter_is_refused():
    with pytest.raises(ForedraftError, match="name a drafter"):
        certify(tiny_models.plain(), CertifyPlan(("a",)))
    llm = LLM(tiny_models.target(), tiny_models.draft_model(2))
    with pytest.raises(ForedraftError, match="at least one prompt"):
        certify(llm, CertifyPlan(()))
