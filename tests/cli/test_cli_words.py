"""Words of other programs: vLLM's and llama.cpp's options, and what an unknown option is answered with."""

import pytest
from cli_fakes import FakeBackend

from foredraft.cli.backend import drafter_spec
from foredraft.cli.options import GenerateOptions
from foredraft.cli.serve import ServeOptions, _with_positional
from foredraft.cli.shell import UsageError
from foredraft.cli.speculative_config import read_speculative_config
from foredraft.cli.suggest import ELSEWHERE, suggest_option


@pytest.mark.parametrize(
    "args",
    [
        ("-p", "text", "-m", "org/model", "-md", "draft", "--draft-max", "4"),
        ("--prompt", "text", "--model", "org/model", "--model-draft", "draft", "--num-speculative-tokens", "4"),
        ("text", "--model", "org/model", "--speculative-config", '{"model": "draft", "num_speculative_tokens": 4}'),
    ],
)
def test_the_words_of_llama_cpp_and_vllm_mean_ours(run, args):
    backend = FakeBackend()
    outcome = run("generate", *args, backend=backend)
    assert outcome.code == 0, outcome.stderr
    assert backend.options.model == "org/model"
    assert backend.specs == [{"method": "draft_model", "model": "draft", "num_speculative_tokens": 4}]


def test_further_keys_of_a_speculative_config_are_settings_of_the_method():
    options = GenerateOptions(speculative_config='{"method": "ngram", "branches": 2}')
    assert drafter_spec(read_speculative_config(options), "ngram") == {"method": "ngram", "branches": 2}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (GenerateOptions(speculative_config="{"), "is not JSON"),
        (GenerateOptions(speculative_config="3"), "takes a JSON object"),
        (GenerateOptions(speculative_config='{"method": "ngram"}', spec_method=["suffix"]), "give it once"),
    ],
)
def test_a_wrong_speculative_config_is_one_line(options, words):
    with pytest.raises(UsageError, match=words):
        read_speculative_config(options)


def test_serve_takes_the_model_as_an_argument():
    assert _with_positional(ServeOptions(model_argument="org/model")).model == "org/model"
    with pytest.raises(UsageError, match="give it once"):
        _with_positional(ServeOptions(model_argument="a", model="b"))


def test_a_prompt_given_twice_is_refused(run):
    outcome = run("generate", "a", "-p", "b")
    assert (outcome.code, "give it once" in outcome.stderr) == (2, True)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("--gpu-memory-utilization", "--kv-memory"),
        ("--ctx-size", "--max-model-len"),
        ("--spec-tokns", "--spec-tokens"),
    ],
)
def test_an_unknown_option_is_answered_with_the_one_that_was_meant(run, wrong, right):
    """Fault: --gpu-memory-utilization was answered with "Possible options: --spec-quantization"."""
    outcome = run("serve", wrong, "1")
    assert outcome.code == 2
    assert f"unknown option {wrong}; use " in outcome.error_lines[-1]
    assert right in outcome.error_lines[-1]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [("--tensor-parallel-size", "one process"), ("--lora", "merge the adapter"), ("--draft-min", "from above")],
)
def test_an_option_that_has_no_counterpart_is_answered_with_the_reason(run, wrong, reason):
    """Fault: "use no option: one process ..." for the first; --lora was answered with --no-color."""
    complaint = run("serve", wrong, "1").error_lines[-1]
    assert f"unknown option {wrong}; there is none here: " in complaint
    assert reason in complaint


def test_an_option_that_resembles_nothing_gets_no_guess(run):
    assert "; use" not in run("serve", "--xyzzy", "1").error_lines[-1]


def test_no_word_of_others_shadows_one_of_ours():
    ours = ["--kv-memory", "--max-batch", "--spec-tokens"]
    assert not set(ELSEWHERE) & set(ours)
    assert suggest_option("--parallel", ours) == "--max-batch"
    assert suggest_option("--parallel", ["--other"]) is None
