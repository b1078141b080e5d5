"""`foredraft certify`: its options, its page, its file and its exit code."""

import io
import json

import pytest
from rich.console import Console

from foredraft.certify.certificate import Certificate
from foredraft.certify.result import CheckResult
from foredraft.cli import certify as command
from foredraft.cli.certify import CertifyOptions, print_certificate

PASSED = CheckResult("first 3 tokens (reject)", True, "4,000 outputs", {"detectable_bias": 0.08})
FAILED = CheckResult("steps (reject)", False, "9 draft trees", {"bias": 0.02, "limit": 0.001})
PROVED = CheckResult("steps (reject)", True, "9 draft trees", {"bias": 0.0002, "limit": 0.001})


def make(*results: CheckResult) -> Certificate:
    return Certificate({"model": "M", "drafter": "ngram"}, results, 12.3)


def test_the_verdict_names_failures_or_the_bias_that_would_have_been_found():
    assert make(PASSED, FAILED).verdict == "FAILED: steps (reject)"
    assert make(PASSED, PROVED).verdict == (
        "PASSED: a bias of 0.10% in a step would have been found, "
        "a bias of 8.0% in whole outputs would have been found with 99 %"
    )


def test_the_json_form_has_every_check():
    values = json.loads(make(PASSED, FAILED).json)
    assert (values["passed"], values["model"], values["seconds"]) == (False, "M", 12.3)
    assert values["checks"][1] == {
        "name": "steps (reject)", "passed": False, "evidence": "9 draft trees",
        "figures": {"bias": 0.02, "limit": 0.001},
    }  # fmt: skip


def test_the_page_has_every_check_with_its_evidence():
    file = io.StringIO()
    print_certificate(make(PASSED, FAILED), Console(file=file, width=60))
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert lines[0].split() == ["model", "M"]
    assert "passed  first 3 tokens (reject)" in lines
    assert "        9 draft trees" in lines
    assert lines[-1] == "FAILED: steps (reject) (12 s)"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--spec-method", "none"], "name a drafter"),
        (["--spec-tokens", "0"], "name a drafter"),
        (["--spec-method", "ngram,draft_model"], "one method"),
        (["--samples", "5"], "samples"),
        (["--spec-method", "ngrm"], "unknown method"),
    ],
)
def test_wrong_options_are_refused_in_one_line(run, args, message):
    outcome = run("certify", *args)
    assert outcome.code == 2
    assert message in outcome.error_lines[-1]


@pytest.mark.parametrize(("result", "code"), [(PROVED, 0), (FAILED, 1)])
def test_the_exit_code_is_the_verdict_and_the_file_is_written(run, monkeypatch, tmp_path, result, code):
    monkeypatch.setattr(command, "_run", lambda options, method, bar: make(PASSED, result))
    outcome = run("certify", "--spec-method", "ngram", "--json", str(tmp_path / "c.json"))
    assert outcome.code == code
    assert json.loads((tmp_path / "c.json").read_text())["passed"] == (code == 0)
    assert outcome.stdout.splitlines()[-1].endswith("(12 s)")


def test_a_file_that_cannot_be_written_ends_the_command_first(run, tmp_path):
    outcome = run("certify", "--spec-method", "ngram", "--json", str(tmp_path / "no" / "c.json"))
    assert outcome.code == 1
    assert "there is no folder" in outcome.error_lines[-1]


def test_default_prompts_fit_the_kind_of_model():
    decoder = command._load_prompts(CertifyOptions(prompts=3), has_encoder=False)
    assert len(decoder) == 3
    assert len(command._load_prompts(CertifyOptions(prompts=1), has_encoder=False)) == 1
    assert len(command._load_prompts(CertifyOptions(prompts=4), has_encoder=True)) == 4
