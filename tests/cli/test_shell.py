"""The rest of the command line: help without torch, version, zoo, the progress bar, the entry point."""

import io
import json
import subprocess
import sys
import time

import pytest
from rich.console import Console

from foredraft.cli.backend import CliBackend, CliGenerator, ZooTrainingOptions, choose_default_method
from foredraft.cli.options import ModelOptions
from foredraft.cli.progress import ProgressBar
from foredraft.kernels.cpu.features import read_cpu_features
from foredraft.outputs import Stats, sum_stats
from tests.support.cli_fakes import FakeBackend


def test_the_command_line_is_imported_without_torch():
    code = "import sys, foredraft.cli.commands; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_entry_point_works_in_a_process_of_its_own():
    command = [sys.executable, "-c", "from foredraft.cli import main; main()", "generate", "--file", "/no/such/file"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: prompt file '/no/such/file' does not exist; check the path given to --file\n"


def test_no_command_shows_the_help_and_is_a_usage_error(run):
    outcome = run()
    assert outcome.code == 2
    assert "generate" in outcome.stderr


def test_an_unknown_command_is_one_line(run):
    outcome = run("generat")
    assert outcome.code == 2
    [line] = outcome.error_lines
    assert "generate" in line


def test_version_as_text_and_as_json(run):
    assert run("--version").stdout.startswith("foredraft ")
    found = json.loads(run("version", "--json").stdout)
    assert {"foredraft", "torch", "transformers", "python", "cpu_features", "threads", "cuda"} <= set(found)
    assert f"python        {found['python']}" in run("version").stdout


def test_cpu_features_where_the_kernel_lists_none(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags : fpu avx2 avx512_bf16\n")
    assert read_cpu_features(tmp_path / "cpuinfo") == ["avx2", "avx512_bf16"]
    assert len(read_cpu_features(tmp_path / "none")) == 1


def test_zoo_lists_shows_and_locates_models(run, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("# The target\nheld-out loss\n")
    backend = FakeBackend(folders={"target": tmp_path})
    assert run("zoo", "path", "target", backend=backend).stdout == f"{tmp_path}\n"
    assert str(tmp_path) in run("zoo", "list", backend=backend).stdout
    assert run("zoo", backend=backend).stdout == run("zoo", "list", backend=backend).stdout
    assert "held-out loss" in run("zoo", "show", backend=backend).stdout
    assert "held-out loss" in run("zoo", "show", "target", backend=backend).stdout
    outcome = run("zoo", "path", "missing", backend=backend)
    assert (outcome.code, outcome.error_lines) == (2, ["error: unknown built-in model 'missing'; use one of: target"])


def test_zoo_without_models_says_how_to_make_them(run):
    outcome = run("zoo", "list")
    assert outcome.code == 1
    assert "foredraft zoo train" in outcome.error_lines[0]


def test_zoo_train_reports_sparsely_off_a_terminal_and_installs_when_asked(run, tmp_path):
    backend = FakeBackend()
    outcome = run("zoo", "train", "--out", str(tmp_path / "new"), backend=backend)
    assert outcome.code == 0
    assert backend.calls == [("train new cpu None", 40)]
    assert outcome.stdout == ""
    assert "target: step 40 of 40, loss 0.025" in outcome.error_lines
    assert 20 <= len(outcome.error_lines) <= 24
    assert "--install" in outcome.error_lines[-1]
    outcome = run("zoo", "train", "--out", str(tmp_path / "new"), "--install", backend=backend)
    assert backend.calls[-1] == ("install new", 0)
    assert "left as they are: seq2seq" in outcome.error_lines[-1]


def test_zoo_install_names_what_it_installs_and_what_is_missing(run, tmp_path):
    backend = FakeBackend()
    outcome = run("zoo", "install", str(tmp_path), backend=backend)
    assert backend.calls == [(f"install {tmp_path.name}", 0)]
    assert "target, draft" in outcome.error_lines[0]
    assert "left as they are: seq2seq" in outcome.error_lines[1]
    assert run("zoo", "install", str(tmp_path / "missing")).code == 2


def test_zoo_train_hands_its_options_on(run, tmp_path):
    backend = FakeBackend()
    options = "--device cuda --threads 1 --tokens 2000000 --batch-tokens 65536 --finish --compile --undistilled".split()
    assert run("zoo", "train", "--out", str(tmp_path / "new"), *options, backend=backend).code == 0
    assert backend.training == ZooTrainingOptions("cuda", None, 1, 2_000_000, 65536, True, True, True)
    assert run("zoo", "train", "--threads", "0").code == 2


def test_zoo_train_refuses_what_is_no_folder(run, tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("--out", "--sources"):
        outcome = run("zoo", "train", name, str(tmp_path / "file"))
        assert outcome.code == 2
        assert len(outcome.error_lines) == 1


def test_the_progress_bar_waits_and_leaves_nothing_behind():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=60)
    with ProgressBar(console, "loading", show_after=30):
        pass
    assert file.getvalue() == ""
    with ProgressBar(console, "measuring", total=4, show_after=0.01) as bar:
        time.sleep(0.2)
        bar.advance(2, "measuring ngram")
    assert "measuring ngram" in file.getvalue()


def test_no_progress_bar_off_a_terminal():
    file = io.StringIO()
    with ProgressBar(Console(file=file), "loading", show_after=0):
        time.sleep(0.05)
    assert file.getvalue() == ""


def test_figures_add_up_over_completions_of_different_draft_lengths():
    both = sum_stats([Stats(5, 2, 4, 3, (2, 1), 2, 0.5, 1.0), Stats(3, 1, 1, 1, (1,), 2, 0.5, 1.0)])
    assert (both.num_tokens, both.target_passes, both.accepted_at) == (8, 4, (3, 1))
    assert both.acceptance_length == 2.0
    assert both.acceptance_rate == 0.8


@pytest.mark.parametrize("name", ["generate", "stream", "with_drafter", "drafter_name"])
def test_the_library_has_what_the_commands_call(name):
    from foredraft import LLM

    assert hasattr(LLM, name)
    assert hasattr(CliGenerator, name)


def test_a_model_that_is_not_there_is_named():
    from foredraft import ForedraftError

    with pytest.raises(ForedraftError, match="/no/such/model"):
        CliBackend().load(ModelOptions(model="/no/such/model"), "none")


def test_the_choices_are_those_of_the_library():
    choices = CliBackend().list_choices()
    assert {"match", "reject"} <= set(choices.rules)
    assert not choices.rules["typical"].is_lossless
    assert "draft_model" in choices.methods


def test_every_target_has_a_default_method_and_the_help_names_that_of_others(run):
    choices = CliBackend().list_choices()
    assert choices.default_methods == {None: "ngram", "builtin": "draft_model", "builtin-seq2seq": "aggressive"}
    assert choices.is_token_only(choices.default_methods[None]), "there is no model for every target"
    assert choose_default_method("/some/folder", choices) == choices.default_methods[None]
    assert choose_default_method(None, choices) == choices.default_methods["builtin"]
    words = " ".join(run("generate", "--help").stdout.replace("│", " ").split())
    assert f"else {choices.default_methods[None]}." in words
