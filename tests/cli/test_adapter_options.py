"""`--lora` and `--adapter` of generate, chat and batch."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from foredraft import LLM, RequestOptions, Sampling, zoo
from foredraft.cli.backend import CliBackend
from foredraft.cli.generate_options import GenerateOptions
from foredraft.cli.shell import UsageError, repeat_options
from tests.support.cli_fakes import FakeBackend
from tests.support.lora_folders import write_adapter

PROMPT = "def fibonacci(n):"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    model = AutoModelForCausalLM.from_pretrained(Path(str(zoo.find_target_folder(zoo.DEFAULT_TARGET))))
    return write_adapter(tmp_path_factory.mktemp("adapter"), model, ["v_proj"], std=0.1)


@pytest.fixture(scope="module")
def expected(folder) -> dict[str | None, str]:
    sampling = Sampling(temperature=0, max_tokens=12)
    with LLM(adapters={"x": folder}) as llm:
        options = {name: RequestOptions(adapter=name) for name in (None, "x")}
        return {name: llm.generate(PROMPT, sampling, options=option)[0].text for name, option in options.items()}


def test_generate_uses_the_only_adapter(run, folder, expected):
    assert expected["x"] != expected[None]
    outcome = run("generate", PROMPT, "--max-tokens", "12", "--lora", f"x={folder}", "--json", backend=CliBackend())
    assert outcome.code == 0, outcome.stderr
    assert json.loads(outcome.stdout)["completions"][0]["text"] == expected["x"]


def test_chat_uses_the_chosen_adapter(run):
    backend = FakeBackend()
    outcome = run("chat", "--lora", "x=folder", "--lora", "y=other", "--adapter", "y", backend=backend, stdin="hello\n")
    assert outcome.code == 0, outcome.stderr
    assert backend.options.adapter_folders == {"x": "folder", "y": "other"}
    assert [options.adapter for options in backend.request_options[-1]] == ["y"]


def test_lines_of_a_batch_name_the_base_or_an_adapter(run, folder, expected, tmp_path):
    rows = [{"prompt": PROMPT}, {"prompt": PROMPT, "model": "builtin"}, {"prompt": PROMPT, "model": "x"}]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcome = run("batch", str(source), str(out), "--max-tokens", "12", "--lora", f"x={folder}")
    assert outcome.code == 0, outcome.stderr
    bodies = [json.loads(row)["response"]["body"] for row in out.read_text().splitlines()]
    assert [body["choices"][0]["text"] for body in bodies] == [expected["x"], expected[None], expected["x"]]
    assert [body["model"] for body in bodies] == ["x", "builtin", "x"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lora": ["x"]}, "--lora takes NAME=FOLDER, got 'x'"),
        ({"lora": ["=x"]}, "--lora takes NAME=FOLDER"),
        ({"lora": ["x=a", "x=b"]}, "gives the name 'x' twice"),
        ({"lora": ["x=a", "y=b"]}, "choose one with --adapter: x, y"),
        ({"lora": ["x=a"], "adapter": "z"}, "add --lora z=FOLDER"),
        ({"adapter": "z"}, "add --lora z=FOLDER"),
    ],
)
def test_wrong_options_are_refused_in_one_line(options, words):
    with pytest.raises(UsageError, match=words):
        GenerateOptions(**options).build_request_options()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("generate", "a", "--lora", "x=/nowhere"), "/nowhere is no folder; give the folder of a LoRA adapter"),
        (("generate", "a", "--lora", "x=/nowhere", "--compare"), "leave --lora out"),
        (("batch", "in.txt", "out", "--lora", "builtin=/nowhere"), "--lora gives the name of the model, builtin"),
    ],
)
def test_mistakes_are_one_line(run, args, words):
    outcome = run(*args, backend=CliBackend())
    assert outcome.code in (1, 2)
    assert words in outcome.stderr


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--lora-modules", "a=/x", "b=/y", "--port", "1"], "--lora-modules a=/x --lora-modules b=/y --port 1"),
        (["--lora-modules", "a=/x", "--lora-modules", "b=/y"], "--lora-modules a=/x --lora-modules b=/y"),
        (["--lora-modules", "a=/x", "model"], "--lora-modules a=/x model"),
        (["--lora", "a=/x", "b=/y"], "--lora a=/x b=/y"),
        (["--lora-modules"], "--lora-modules"),
    ],
)
def test_one_option_may_have_several_adapters(args: list[str], expected: str) -> None:
    assert repeat_options(args, {"--lora-modules"}) == expected.split()


def test_chat_takes_several_adapters_after_one_option(run) -> None:
    backend = FakeBackend()
    run("chat", "--lora-modules", "x=folder", "y=other", "--adapter", "y", backend=backend, stdin="hello\n")
    assert backend.options.adapter_folders == {"x": "folder", "y": "other"}
