"""`--compare`: which methods run, how often, and the table of the results."""

import json
import time
from dataclasses import replace

import pytest

from tests.support.cli_fakes import EMPTY_HANDED, PIECES, TEXT, FakeBackend, FakeLLM

OTHER = (*PIECES[:3], (" x", "bonus"))  # one token short of plain decoding: differs at token 4


def test_plain_runs_first_and_every_method_in_turn_after_a_warm_up(run):
    backend = FakeBackend()
    assert run("generate", "p", "--compare", "--repeats", "2", "--max-tokens", "40", backend=backend).code == 0
    shown, warm, timed = backend.calls[:1], backend.calls[1:4], backend.calls[4:]
    assert shown == [("draft_model", 40)]
    assert warm == [("none", 16), ("draft_model", 16), ("ngram", 16)]
    assert timed == [("none", 40), ("draft_model", 40), ("ngram", 40)] * 2


def test_the_table_goes_to_standard_error_and_the_text_alone_to_the_pipe(run):
    outcome = run("generate", "p", "--compare")
    assert outcome.stdout == TEXT + "\n"
    assert "\x1b" not in outcome.stderr
    for word in ("method", "tokens/s", "speed-up", "identical", "plain", "draft_model", "ngram", "yes"):
        assert word in outcome.stderr
    assert "x plain decoding" in outcome.error_lines[-1]


def test_methods_by_comma_and_repetition_keep_their_order(run):
    backend = FakeBackend()
    args = ("--compare", "--repeats", "1", "--spec-method", "ngram,none", "--spec-method", "draft_model,ngram")
    run("generate", "p", *args, backend=backend)
    assert [name for name, _ in backend.calls[-3:]] == ["none", "ngram", "draft_model"]


def test_json_adds_the_rows(run):
    outcome = run("generate", "p", "--compare", "--json")
    result = json.loads(outcome.stdout)
    assert set(result) == {"completions", "compare"}
    assert [row["method"] for row in result["compare"]] == ["plain", "draft_model", "ngram"]
    for row in result["compare"]:
        assert row["identical"] is True
        assert row["tokens_per_second"] > 0
        assert row["speed_up"] > 0
        assert row["acceptance_length"] == 2.5
    assert outcome.stderr == ""


def test_a_method_that_cannot_be_had_is_skipped_by_default_and_a_failure_when_named(run):
    backend = FakeBackend(missing=frozenset({"draft_model"}))
    result = json.loads(run("generate", "p", "--compare", "--json", backend=backend).stdout)
    assert result["compare"][-1] == {"method": "draft_model", "skipped": EMPTY_HANDED}
    assert [row["method"] for row in result["compare"]] == ["plain", "ngram", "draft_model"]
    outcome = run("generate", "p", "--compare", "--spec-method", "draft_model", backend=backend)
    assert outcome.code == 1
    assert outcome.error_lines == [f"error: {EMPTY_HANDED}"]


def test_a_draft_model_given_to_no_method_by_name_goes_to_the_first_alone(run):
    backend = FakeBackend()
    run("generate", "p", "--compare", "--spec-model", "d", backend=backend)
    assert backend.specs == [None, {"method": "draft_model", "model": "d"}, {"method": "ngram"}]
    backend = FakeBackend()
    run("generate", "p", "--compare", "--spec-model", "d", "--spec-method", "ngram", backend=backend)
    assert backend.specs == [None, {"method": "ngram", "model": "d"}]


def test_a_difference_is_reported_with_its_position_and_is_an_error_if_greedy(run):
    backend = FakeBackend({"ngram": FakeLLM("x", pieces=OTHER)})
    rows = json.loads(run("generate", "p", "--compare", "--json", backend=backend).stdout)["compare"]
    assert [(row["identical"], row["excuse"]) for row in rows] == [(True, None), (True, None), (False, None)]
    shown = run("generate", "p", "--compare", backend=backend).stderr
    assert "no (token 4)" in shown
    assert "differs from plain decoding" in shown


def test_a_difference_is_expected_of_unseeded_sampling_and_of_lossy_rules(run):
    backend = FakeBackend({"ngram": FakeLLM("x", pieces=OTHER)})
    assert "no (sampled)" in run("generate", "p", "--compare", "--temperature", "1", backend=backend).stderr
    seeded = run("generate", "p", "--compare", "--temperature", "1", "--seed", "3", backend=backend).stderr
    assert "no (token 4)" in seeded
    lossy = FakeBackend({"ngram": FakeLLM("x", pieces=OTHER, verification="typical")})
    assert "lossy" in run("generate", "p", "--compare", "--verify", "typical", backend=lossy).stderr


def test_comparing_nothing_but_plain_decoding_still_works(run):
    outcome = run("generate", "p", "--compare", "--spec-method", "none", "--json")
    assert [row["method"] for row in json.loads(outcome.stdout)["compare"]] == ["plain"]


def test_a_draft_model_is_not_given_to_a_method_that_reads_none(run):
    backend = FakeBackend()
    run("generate", "p", "--compare", "--spec-model", "d", "--spec-method", "draft_model,ngram", backend=backend)
    assert {"method": "draft_model", "model": "d"} in backend.specs
    assert {"method": "ngram"} in backend.specs


def test_a_named_method_that_auto_does_not_draft_with_is_measured_with_fixed_drafts(run):
    """Fault: the first figure about a user's own head was acceptance length 1.00."""
    backend = FakeBackend({"ngram": IdleLLM("ngram")})
    outcome = run("generate", "p", "--compare", "--json", "--spec-method", "ngram", backend=backend)
    rows = {row["method"]: row for row in json.loads(outcome.stdout)["compare"]}
    assert list(rows) == ["plain", "ngram", "ngram:3"]
    assert backend.specs[-1] == {"method": "ngram", "num_speculative_tokens": 3}
    shown = run("generate", "p", "--compare", "--spec-method", "ngram", backend=backend).stderr
    assert "ngram: drafts do not pay here" in shown
    unnamed = run("generate", "p", "--compare", backend=backend).stderr
    assert "ngram:3" not in unnamed


def test_every_speed_up_is_the_ratio_of_two_rates_of_the_table(run):
    """Fault: the row of fixed drafts was divided by a second measurement of plain decoding that no row showed."""
    backend = FakeBackend({"ngram": IdleLLM("ngram"), "none": SlowAtFirstLLM("none")})
    outcome = run("generate", "p", "--compare", "--json", "--repeats", "1", "--spec-method", "ngram", backend=backend)
    plain, *others = json.loads(outcome.stdout)["compare"]
    assert [row["method"] for row in others] == ["ngram", "ngram:3"]
    for row in others:
        assert row["speed_up"] == pytest.approx(row["tokens_per_second"] / plain["tokens_per_second"])


def test_methods_left_out_take_one_line(run):
    outcome = run("generate", "p", "--compare", backend=FakeBackend(missing=frozenset({"draft_model", "ngram"})))
    lines = [line for line in outcome.error_lines if "left out" in line]
    assert lines == ["left out: draft_model, ngram; give one to --spec-method to see why"]


class IdleLLM(FakeLLM):
    """Decodes without a draft."""

    def _completion(self, prompts, sampling, index):
        completion = super()._completion(prompts, sampling, index)
        return replace(completion, stats=replace(completion.stats, num_drafts=0, num_drafted=0, target_passes=5))


class SlowAtFirstLLM(FakeLLM):
    """Plain decoding that is slow in its first two runs, as a cold processor is."""

    def generate(self, prompts, sampling):
        if [name for name, _ in self.calls].count(self.drafter_name) < 2:
            time.sleep(0.05)
        return super().generate(prompts, sampling)
