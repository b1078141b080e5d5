"""`foredraft export` from the command line: a folder, notes and the command that serves it, or an error of one line."""

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from foredraft.drafters.checkpoint_folders import read
from tests.support.checkpoints import published_folders
from tests.support.checkpoints.published_folders import LAYERS, TARGET, H, V


@pytest.fixture
def target(tmp_path: Path) -> str:
    LlamaConfig(
        hidden_size=H, vocab_size=V, num_hidden_layers=LAYERS, architectures=["LlamaForCausalLM"]
    ).save_pretrained(tmp_path / "target")
    return str(tmp_path / "target")


def test_a_drafter_is_written_and_its_command_shown(run, tmp_path, target):
    folder, out = published_folders.eagle3(tmp_path / "head"), tmp_path / "out"
    done = run("export", str(folder), "--format", "vllm", "--out", str(out), "--model", target)
    assert done.code == 0
    assert done.stdout.startswith(f"vllm serve {target} --speculative-config")
    assert json.loads(done.stdout.split("'")[1]) == {"method": "eagle3", "model": str(out), "num_speculative_tokens": 3}
    assert "boundaries [2, 6, 9]" in done.stderr
    assert read(out, TARGET).method == "eagle3"
    again = run("export", str(folder), "--format", "vllm", "--out", str(out), "--model", target)
    assert (again.code, len(again.error_lines)) == (1, 1)
    assert "is not empty" in again.stderr
    assert run("export", str(folder), "--format", "vllm", "--out", str(out), "--model", target, "--force").code == 0


def test_the_target_is_the_one_the_drafter_names(run, tmp_path, target):
    folder = published_folders.medusa(tmp_path / "head", base_model_name_or_path=target)
    done = run("export", str(folder), "--format", "medusa", "--out", str(tmp_path / "out"))
    assert (done.code, done.error_lines[-1]) == (0, f"{folder} is in {tmp_path / 'out'}, for {target}")


def test_a_named_target_that_is_not_there(run, tmp_path):
    folder = published_folders.medusa(tmp_path / "head", base_model_name_or_path="/gone")
    done = run("export", str(folder), "--format", "medusa", "--out", str(tmp_path / "out"))
    assert (done.code, len(done.error_lines)) == (1, 1)
    assert "/gone does not exist" in done.stderr
    assert "give --model" in done.stderr


def test_a_drafter_for_another_target(run, tmp_path):
    folder = published_folders.eagle3(tmp_path / "head")  # names no target, so the built-in one is used
    done = run("export", str(folder), "--format", "eagle3", "--out", str(tmp_path / "out"))
    assert (done.code, len(done.error_lines)) == (1, 1)
    assert "use a drafter for this target" in done.stderr


def test_what_cannot_be_carried_is_one_line_and_nothing_is_written(run, tmp_path, target):
    folder = published_folders.medusa(tmp_path / "head")
    done = run("export", str(folder), "--format", "sglang", "--out", str(tmp_path / "out"), "--model", target)
    assert (done.code, len(done.error_lines)) == (1, 1)
    assert "SGLang loads no Medusa heads; use --format medusa or vllm" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_whole_model_needs_no_export(run, tmp_path, target):
    from foredraft import zoo

    done = run(
        "export", str(zoo.find_folder("draft")), "--format", "vllm", "--out", str(tmp_path / "out"), "--model", target
    )
    assert (done.code, len(done.error_lines)) == (1, 1)
    assert "load the folder as it is" in done.stderr


def test_an_n_gram_table_is_for_no_other_engine(run, tmp_path, target):
    """It was called a whole language model that other engines load."""
    done = run("export", "ngram", "--format", "vllm", "--out", str(tmp_path / "out"), "--model", target)
    assert (done.code, len(done.error_lines)) == (1, 1)
    assert "an n-gram table, which no other engine loads" in done.stderr


@pytest.mark.parametrize("args", [("--format", "gguf"), ("--format", "medusa", "--out", ".")])
def test_a_wrong_command_line(run, tmp_path, monkeypatch, args):
    monkeypatch.chdir(published_folders.medusa(tmp_path))
    done = run("export", ".", *args, *(() if "--out" in args else ("--out", "out")))
    assert (done.code, len(done.error_lines)) == (2, 1)


def test_a_wrong_format_lists_those_that_the_methods_declare(run, tmp_path):
    done = run("export", str(tmp_path), "--format", "gguf", "--out", str(tmp_path / "out"))
    assert (done.code, len(done.error_lines)) == (2, 1)
    assert "use one of: eagle3, hydra, medusa, mlp_speculator, sglang, speculators, target, vllm" in done.stderr
