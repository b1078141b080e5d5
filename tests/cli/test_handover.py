"""`foredraft handover` from the command line."""

import json
import shlex

import pytest

from foredraft import zoo
from foredraft.cli.backend import CliBackend
from foredraft.cli.handover import drop_program


@pytest.fixture
def hand_over(run):
    """Run the command with the methods of the library."""
    return lambda *args, **env: run("handover", *args, backend=CliBackend(), **env)


def test_a_command_line_of_serve_is_handed_over_as_it_is(hand_over):
    done = hand_over(
        *(
            "--engine",
            "vllm",
            "--",
            "foredraft",
            "serve",
            "org/model",
            "--spec-method",
            "suffix",
            "--spec-tokens",
            "16",
        ),
        *("--max-num-seqs", "8", "--port", "9001"),
    )
    assert done.code == 0
    assert done.stderr == ""
    words = shlex.split(done.stdout, comments=True)
    words = [word for word in words if word != "\n"]
    assert words[words.index("vllm") :][:3] == ["vllm", "serve", "org/model"]
    assert words[words.index("--max-num-seqs") + 1] == "8"
    assert words[words.index("--port") + 1] == "9001"
    assert json.loads(words[words.index("--speculative-config") + 1])["num_speculative_tokens"] == 16
    assert "--served-model-name" not in words  # vLLM's default is the same


def test_options_without_the_separator_are_the_same(hand_over):
    args = ("--engine", "sglang", "--spec-method", "ngram", "--spec-tokens", "4")
    assert hand_over(*args, "org/model").stdout == hand_over(*args[:2], "--", "serve", "org/model", *args[2:]).stdout


@pytest.mark.parametrize(
    ("args", "rest"),
    [
        (["--engine", "vllm", "--", "foredraft", "serve", "m"], ["--engine", "vllm", "m"]),
        (["--engine", "vllm", "--", "serve", "m"], ["--engine", "vllm", "m"]),
        (["--engine", "vllm", "--", "--model", "m"], ["--engine", "vllm", "--model", "m"]),
        (["--engine", "vllm", "m"], ["--engine", "vllm", "m"]),
    ],
)
def test_the_words_of_the_program_are_dropped(args, rest):
    assert drop_program(args) == rest


def test_the_api_key_is_never_written(hand_over, tmp_path):
    for fmt in ("command", "compose", "kubernetes", "ray"):
        done = hand_over(
            *("--engine", "vllm", "--format", fmt, "--spec-method", "ngram", "--api-key", "sk-secret", "org/model")
        )
        assert done.code == 0
        assert "sk-secret" not in done.stdout + done.stderr


def test_out_gets_the_exported_head_and_the_file(hand_over, tmp_path):
    head, out = str(zoo.find_folder("eagle3")), tmp_path / "out"
    done = hand_over("--engine", "vllm", "--format", "compose", "--spec-model", head, "--out", str(out))
    assert done.code == 0
    assert (out / "compose.yaml").read_text() == done.stdout
    assert (out / "drafter" / "config.json").exists()
    assert str(out / "drafter") in done.stdout
    again = hand_over("--engine", "vllm", "--format", "compose", "--spec-model", head, "--out", str(out))
    assert (again.code, len(again.error_lines)) == (1, 1)
    assert "--force" in again.stderr
    forced = ("--engine", "vllm", "--format", "compose", "--spec-model", head, "--out", str(out), "--force")
    assert hand_over(*forced).code == 0


def test_the_built_in_deployment_is_handed_over_with_its_own_drafter(hand_over):
    done = hand_over("--engine", "sglang", "--spec-method", "draft_model")
    assert done.code == 0
    assert f"--model-path {zoo.find_folder('target')}" in done.stdout
    assert f"--speculative-draft-model-path {zoo.find_folder('draft')}" in done.stdout
    assert "--served-model-name builtin" in done.stdout


def test_vllms_own_configuration_is_read_too(hand_over):
    config = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 2}'
    done = hand_over("--engine", "trtllm", "--speculative-config", config, "org/model")
    assert "max_draft_len: 5" in done.stdout
    assert "max_matching_ngram_size: 2" in done.stdout


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ((), 2, "name the engine with --engine; one of: llama.cpp, sglang, trtllm, vllm"),
        (("--engine", "vlm"), 1, "did you mean 'vllm'"),
        (("--engine", "vllm", "--format", "helm"), 1, "unknown format 'helm'"),
        (("--engine", "sglang", "--format", "ray", "--spec-method", "ngram"), 1, "use --engine vllm"),
        (("--engine", "vllm", "--spec-method", "hydra"), 1, "the nearest is an EAGLE-3 head"),
        (("--engine", "vllm", "--spec-model", "a", "--spec-model", "b"), 2, "one --spec-model"),
        (("--engine", "vllm", "--pipeline-parallel-size", "2"), 2, "unknown option --pipeline-parallel-size"),
        (("--engine", "vllm", "--max-modellen", "2"), 2, "use --max-model-len"),
    ],
)
def test_errors_are_one_line(run, args, code, message):
    backend = CliBackend() if "a" not in args else None
    done = run("handover", *args, backend=backend)
    assert (done.code, len(done.error_lines)) == (code, 1)
    assert message in done.stderr
