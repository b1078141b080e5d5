"""The proposer in a simulation of vLLM's runner: rows that move, sit out and end."""

import json
import random

import numpy as np
import pytest

from foredraft.errors import ForedraftError
from foredraft.vllm import Proposer
from foredraft.vllm.settings import SETTINGS_VARIABLE
from tests.support.fake_vllm import FakeVllm, continue_text, make_config

METHODS = ["ngram", "suffix", "ngram_lm", "ngram+suffix", "suffix+ngram_lm"]


def make_prompts(count, seed=3):
    rng = random.Random(seed)
    return [[rng.randrange(2, 19) for _ in range(rng.randrange(2, 12))] for _ in range(count)]


def decode_plainly(prompt, num_tokens):
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(continue_text(tokens))
    return tokens[len(prompt) :]


def make_proposer(monkeypatch, num_tokens=4, **settings):
    monkeypatch.setenv(SETTINGS_VARIABLE, json.dumps(settings))
    return Proposer(make_config(num_tokens))


@pytest.mark.parametrize("absence", [0.0, 0.3])
@pytest.mark.parametrize("method", METHODS)
def test_the_output_is_that_of_plain_decoding_and_drafts_are_accepted(monkeypatch, method, absence):
    engine = FakeVllm(make_proposer(monkeypatch, method=method), absence=absence)
    prompts = make_prompts(5)
    assert engine.generate(prompts, 60) == [decode_plainly(prompt, 60) for prompt in prompts]
    assert engine.num_accepted > engine.num_drafts > 20


def test_a_prediction_in_the_prompt_is_copied(monkeypatch):
    """An edit: the prompt holds a text that the output repeats, with one other token."""
    text = make_prompts(1, seed=5)[0] * 4
    prompt, edited = [*text, 45], [*text[:20], 46, *text[21:], *[47] * 9]
    engine = FakeVllm(
        make_proposer(monkeypatch, num_tokens=8, method="aggressive"),
        target=lambda tokens: edited[len(tokens) - len(prompt)],
    )
    assert engine.generate([prompt], len(text)) == [edited[: len(text)]]
    assert engine.num_steps < len(text) / 4


def test_a_preempted_request_keeps_its_state(monkeypatch):
    """Seeded fault: a row that came back was a new request, and its ensemble had learnt nothing."""
    proposer = make_proposer(monkeypatch, method="ngram")
    made = []
    tracker = proposer._chains.tracker
    add = tracker.add
    monkeypatch.setattr(tracker, "add", lambda row: made.append(row) or add(row))
    FakeVllm(proposer, absence=0.3).generate(make_prompts(5), 60)
    assert len(made) == 5


def test_a_proposer_accepts_as_much_as_without_moving_rows(monkeypatch):
    counts = []
    for absence in (0.0, 0.3):
        engine = FakeVllm(make_proposer(monkeypatch, method="suffix"), absence=absence)
        engine.generate(make_prompts(6), 80)
        counts.append((engine.num_drafts, engine.num_accepted))
    assert counts[0] == counts[1]


def test_past_outputs_are_drafted_from(monkeypatch):
    """A second call with the same prompts accepts more only if the outputs of the first are in the store."""
    accepted = {}
    for store in (0, 100):
        proposer = make_proposer(monkeypatch, num_tokens=8, method="suffix", store_outputs=store)
        engine = FakeVllm(proposer)
        engine.generate(make_prompts(4), 40)
        engine.generate([[30, 31, 32]], 30)  # the first requests are gone meanwhile
        engine.num_accepted = engine.num_steps = 0
        engine.generate(make_prompts(4), 40)
        accepted[store] = engine.num_accepted / engine.num_steps
    assert accepted[100] > 1.3 * accepted[0]


def test_drafts_fit_the_context_and_the_length(monkeypatch):
    proposer = make_proposer(monkeypatch, num_tokens=3, method="ngram", branches=1)
    engine = FakeVllm(proposer)
    [output] = engine.generate([[2, 3, 4]], 240)
    assert output == decode_plainly([2, 3, 4], 240)
    rows = np.tile(np.array([2, 3], dtype=np.int32), (1, 128))
    assert proposer.propose([[3]], np.array([256]), rows) == [[]]  # no room for a token
    assert [len(draft) for draft in proposer.propose([[2]], np.array([253]), rows)] == [2]


def test_a_prompt_that_is_not_computed_has_no_draft(monkeypatch):
    proposer = make_proposer(monkeypatch, method="ngram")
    rows = np.tile(np.array([2, 3], dtype=np.int32), (2, 128))
    drafts = proposer.propose([[], [3]], np.array([8, 8]), rows)
    assert drafts[0] == []
    assert drafts[1] == [2, 3, 2, 3]
    assert proposer.propose([], np.array([]), rows) == []


def test_drafts_end_at_an_end_token(monkeypatch):
    proposer = make_proposer(monkeypatch, method="suffix", min_confidence=0.0)
    tokens = [5, 6, 7, 0, 9, 5, 6, 7, 0, 9, 5, 6]  # 0 is an end token of the configuration
    rows = np.zeros((1, 256), dtype=np.int32)
    rows[0, : len(tokens)] = tokens
    assert proposer.propose([[6]], np.array([len(tokens)]), rows) == [[7, 0]]


def test_a_drafter_that_raises_costs_drafts_alone(monkeypatch):
    proposer = make_proposer(monkeypatch, method="ngram")
    sandbox = proposer._chains.drafter
    monkeypatch.setattr(sandbox.drafter, "draft_tokens", lambda *_: 1 / 0)
    engine = FakeVllm(proposer)
    prompts = make_prompts(3)
    assert engine.generate(prompts, 20) == [decode_plainly(prompt, 20) for prompt in prompts]
    assert (engine.num_drafts, sandbox.num_failures > 0) == (0, True)


def test_load_model_is_called_without_asking(monkeypatch):
    assert make_proposer(monkeypatch, method="ngram").load_model(object()) is None


def test_a_wrong_method_is_an_error_at_the_start(monkeypatch):
    with pytest.raises(ForedraftError, match="unknown method 'ngrm'"):
        make_proposer(monkeypatch, method="ngrm")
