"""`foredraft doctor`: its options, the drafters that they name, the page, the command to copy and the exit code."""

import json
from dataclasses import replace

import pytest
from rich.console import Console

from foredraft.cli.backend import CliBackend
from foredraft.cli.doctor import recommend_command
from foredraft.cli.doctor_options import DoctorOptions, build_candidates, build_command
from foredraft.cli.doctor_page import build_page, print_page
from foredraft.cli.shell import UNFIT, UsageError
from foredraft.doctor.findings import Finding
from tests.doctor.test_findings import make_diagnosis, make_result
from tests.support.cli_fakes import FakeBackend


def label(**options) -> list[tuple[str, object]]:
    return [(c.label, c.spec.get("model")) for c in build_candidates(DoctorOptions(**options), FakeBackend())]


def test_methods_and_models_become_candidates():
    assert label() == []
    assert label(spec_method=["ngram,draft_model"]) == [("ngram", None), ("draft_model", None)]
    assert label(spec_method=["ngram", "draft_model"], spec_model=["D"]) == [("ngram", None), ("draft_model D", "D")]
    both = label(spec_method=["draft_model"], spec_model=["D", "E"])
    assert both == [("draft_model D", "D"), ("draft_model E", "E")]
    assert label(spec_method=["draft_model+draft_model"], spec_model=["D", "E"]) == [
        ("draft_model+draft_model D E", ["D", "E"])
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spec_method": ["none"]}, "leave --spec-method none"),
        ({"spec_tokens": "0"}, "leave --spec-method none"),
        ({"spec_method": ["ngram"], "spec_model": ["D"]}, "leave --spec-model out"),
        ({"spec_option": ["a=1"]}, "give its --spec-method"),
        ({"spec_method": ["ngrm"]}, "unknown method"),
    ],
)
def test_options_that_name_no_drafter_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        build_candidates(DoctorOptions(**options), FakeBackend())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--streams", "1,x"], "must be numbers"),
        (["--n", "2"], "one output per prompt"),
        (["--max-tokens", "1"], "two tokens or more"),
        (["--prompts", "missing.txt"], "does not exist"),
        (["--temperature", "-1"], "--temperature"),
    ],
)
def test_wrong_values_are_one_line_and_exit_code_2(run, args, message):
    outcome = run("doctor", *args)
    assert outcome.code == 2
    assert message in outcome.stderr
    assert len(outcome.error_lines) == 1


def test_the_command_repeats_what_the_measurement_used():
    options = DoctorOptions(model="org/model", dtype="float32", no_fused=True, spec_option=["min_ngram=3"], seed=1)
    command = build_command(options, {"method": "medusa", "model": "a head"}, "3", is_server=False)
    assert command == (
        "foredraft generate --model org/model --spec-option min_ngram=3 --dtype float32 --no-fused --seed 1 "
        "--spec-method medusa --spec-model 'a head' --spec-tokens 3 'Once upon a time'"
    )


def test_the_command_of_plain_decoding_has_no_option_of_a_drafter():
    options = DoctorOptions(spec_model=["a head"], spec_option=["tree_nodes=4"], spec_dtype="float32", seed=1)
    assert build_command(options, {}, "0", is_server=True) == "foredraft serve --spec-method none"


def test_several_streams_recommend_a_server_and_a_loss_plain_decoding():
    several, single = DoctorOptions(streams="1,4"), DoctorOptions(streams="1")
    assert recommend_command(several, make_diagnosis(make_result(1.5, 0.7))) == (
        "foredraft serve --spec-method ngram --spec-tokens auto"
    )
    assert recommend_command(single, make_diagnosis(make_result(0.9))) == (
        "foredraft generate --spec-method none 'Once upon a time'"
    )


def print_text(diagnosis, width: int = 120) -> str:
    console = Console(width=width, record=True, color_system=None)
    with console.capture() as capture:
        print_page(build_page(diagnosis, "foredraft serve"), console)
    return capture.get()


def test_the_page_has_its_sections_in_order():
    machine = replace(make_diagnosis().machine, description={
        "threads": 1, "cores": 2, "foredraft": "1", "torch": "2", "transformers": "3", "cpu": "x",
    })  # fmt: skip
    finding = Finding("mismatch", "the first token of 0 in 50 drafts was accepted", "give another", "d0")
    diagnosis = replace(make_diagnosis(unfit={"head": "it is of another width"}), machine=machine, findings=(finding,))
    text = print_text(diagnosis)
    titles = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert [t for t in titles if t[0].isalpha()] == ["Machine", "Model", "Drafters", "Costs", "Verdict", "Warnings"]
    assert "1 thread on 2 cores" in text
    assert "native code, exact" in text
    assert "head cannot be used: it is of another width" in text
    assert "mismatch: d0: the first token of 0 in 50 drafts was accepted. Remedy: give another" in text


def test_a_built_in_target_is_examined_from_end_to_end(run, tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n", encoding="utf-8")
    args = ["--prompts", str(prompt), "--seconds", "1", "--streams", "1", "--max-tokens", "16", "--check"]
    outcome = run("doctor", "--spec-method", "ngram,medusa", *args, "--json", backend=CliBackend())
    report = json.loads(outcome.stdout)
    assert [drafter["label"] for drafter in report["drafters"]] == ["ngram", "medusa"]
    assert outcome.code == (UNFIT if report["verdict"]["has_unfit_drafter"] else 0)
    for drafter in report["drafters"]:
        (one,) = drafter["streams"]
        assert one["speed_up"] == pytest.approx(one["tokens_per_second"] / one["plain_tokens_per_second"])
        assert one["error"] == pytest.approx(one["speed_up"] / one["measured_speed_up"] - 1)
    assert report["command"].startswith("foredraft generate --max-tokens 16 --spec-method")
    medusa = report["drafters"][1]
    assert medusa["parameters"] > 100_000
    assert medusa["is_native"] in (True, False)
