"""`--spec-simulate`: which options it takes with it, and what every command says about its text."""

import json

import pytest

from foredraft import simulation as library
from foredraft.cli import simulation
from foredraft.cli.backend import build_drafter_spec, resolve_single_method
from foredraft.cli.serve import ServeOptions, describe_drafts
from foredraft.cli.shell import UsageError
from foredraft.cli.simulation import read_drafter_options
from tests.support.cli_fakes import FakeBackend, FakeLLM

SPEC = {"method": library.METHOD_PATH, "acceptance_rate": 0.8}


def test_the_method_has_the_name_of_the_library():
    assert (simulation.METHOD_PATH, simulation.RATE_OPTION) == (library.METHOD_PATH, library.RATE_OPTION)


def test_it_is_a_drafter_with_a_rate_and_takes_a_length_and_a_cost():
    options = ServeOptions(spec_simulate=0.8, spec_tokens="4", spec_option=["cost_ms=2.5"])
    resolved = read_drafter_options(options)
    method = resolve_single_method(resolved, FakeBackend(), "a server")
    assert build_drafter_spec(resolved, method) == SPEC | {"num_speculative_tokens": 4, "cost_ms": 2.5}
    assert "--spec-simulate 0.8 (acceptance simulated at 0.8: the text is simulated" in describe_drafts(
        resolved, method
    )
    assert describe_drafts(ServeOptions(), "ngram") == "--spec-method ngram"


@pytest.mark.parametrize("rate", ["-0.1", "1.5", "nan", "inf"])
@pytest.mark.parametrize("command", ["serve", "generate"])
def test_a_rate_that_cannot_be_is_one_line(run, command: str, rate: str):
    done = run(command, "--spec-simulate", rate, *(["text"] if command == "generate" else []))
    assert (done.code, len(done.error_lines)) == (2, 1)
    assert "--spec-simulate takes an acceptance rate from 0 to 1, such as 0.8" in done.stderr


@pytest.mark.parametrize(
    "given",
    [
        {"spec_method": ["ngram"]},
        {"spec_model": ["a"]},
        {"spec_quantization": "int8"},
        {"spec_dtype": "float32"},
        {"spec_revision": "v1"},
        {"spec_max_model_len": 9},
        {"spec_vocab": "tli"},
        {"speculative_config": "{}"},
        {"verify": "match"},
        {"posterior_alpha": 0.3},
        {"spec_option": ["acceptance_rate=0.5"]},
    ],
    ids=lambda given: next(iter(given)),
)
def test_an_option_of_a_real_drafter_is_refused_by_name(given: dict):
    [name] = given
    with pytest.raises(UsageError, match=f"leave --{name.replace('_', '-')} .*out"):
        read_drafter_options(ServeOptions(spec_simulate=0.8, **given))


def test_generate_says_that_the_text_is_simulated(run):
    backend = FakeBackend(models={library.METHOD_PATH: FakeLLM("simulated", verification="simulated")})
    done = run("generate", "--spec-simulate", "0.8", "text", backend=backend)
    assert done.code == 0, done.stderr
    assert backend.specs == [SPEC]
    assert "acceptance simulated at 0.8: the text is simulated, not the model's" in done.stderr
    done = run("generate", "--spec-simulate", "0.8", "--json", "--compare", "text", backend=backend)
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["completions"][0]["verification"] == "simulated"


def test_the_doctor_measures_no_simulation(run):
    done = run("doctor", "--spec-simulate", "0.8")
    assert (done.code, len(done.error_lines)) == (2, 1)
    assert "foredraft doctor measures drafters" in done.stderr
