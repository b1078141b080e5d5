"""`foredraft train` on a tiny model: messages, written files, and refusals before a model is loaded."""

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from foredraft import LLM, Sampling
from foredraft.cli.progress import ProgressBar
from foredraft.cli.render import make_console
from foredraft.cli.shell import UsageError
from foredraft.cli.train import TrainOptions, TrainProgress
from foredraft.train.loop import TrainStatus
from foredraft.train.remote.vllm_export import make_vllm_command
from tests.support import tiny_models

FEW = ("--context", "16", "--batch-tokens", "32", "--eval-prompts", "2", "--eval-tokens", "8", "--device", "cpu")
DRAFT = ("--layers", "1", "--hidden", "16")
OUTPUT = Sampling(temperature=0.0, max_tokens=32, ignore_eos=True)  # a sampled output may end with its first token


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A tiny Llama with a tokenizer, and texts."""
    folder = tmp_path_factory.mktemp("models") / "small"
    tiny_models.llama(vocab_size=320).float().save_pretrained(folder)
    tiny_models.tokenizer().save_pretrained(folder)
    for i in range(3):
        (folder / f"{i}.txt").write_text(tiny_models.TEXT * 2, encoding="utf-8")
    return folder


def data(small: Path) -> list[str]:
    return [word for i in range(3) for word in ("--data", str(small / f"{i}.txt"))]


def test_a_drafter_is_trained_measured_and_used(run, small, tmp_path):
    out = tmp_path / "draft"
    asked = ["--model", str(small), *data(small), "-o", str(out), "--steps", "4", "--held-out-share", "0.4", *FEW]
    made = run("train", "draft_model", *asked, *DRAFT, "--loss", "tv")
    assert made.code == 0, made.stderr
    assert made.stdout == ""
    assert "4 steps of 2 rows" in made.stderr
    assert "step 4 of 4, loss" in made.stderr
    assert "greedy acceptance length" in made.stderr
    assert made.error_lines[-1] == f"done; use it with --spec-method draft_model --spec-model {out}"
    assert json.loads((out / "training.json").read_text())["settings"]["loss"] == "tv"
    assert LLM(str(small), {"method": "draft_model", "model": str(out)}).generate("the end", OUTPUT)[0].text


def test_earlier_draft_models_are_one_setting():
    options = TrainOptions("draft_model", boost=["a", "b"], layers=1)
    assert options.method_options == {"boost": "a,b", "layers": "1"}
    assert TrainOptions("draft_model").method_options == {}
    with pytest.raises(UsageError, match="--boost a and --set boost=b disagree"):
        _ = TrainOptions("draft_model", boost=["a"], option=["boost=b"]).method_options


def test_a_stopped_run_says_how_to_go_on_and_does(run, small, tmp_path):
    asked = ["train", "draft_model", "--model", str(small), *data(small), "-o", str(tmp_path / "o"), *FEW, *DRAFT]
    stopped = run(*asked, "--steps", "4", "--max-steps", "1")
    assert stopped.code == 130
    assert "stopped after step 1 of 4" in stopped.error_lines[-1]
    assert "the same command resumes the run" in stopped.error_lines[-1]
    resumed = run(*asked, "--steps", "4")
    assert (resumed.code, "resuming after step 1 of 4" in resumed.stderr) == (0, True)
    other = run(*asked, "--steps", "5")
    assert other.code == 1
    assert other.error_lines[-1].endswith("steps.steps was 4 and is 5; give another --out, or delete it to begin again")


def test_heads_trained_with_the_target_are_handed_over_with_it(run, small, tmp_path):
    out = tmp_path / "heads"
    asked = ["train", "medusa", "--model", str(small), *data(small), "-o", str(out), "--held-out-share", "0.4", *FEW]
    asked += ["--heads", "2", "--steps", "4", "--set", "backbone=0.5", "--set", "heads_weight=0.5"]
    stopped = run(*asked, "--max-steps", "1")
    assert stopped.code == 130
    assert f"the drafter in {out} is usable with the target in {out}/target, and the same" in stopped.error_lines[-1]
    made = run(*asked)
    assert made.code == 0, made.stderr
    assert "target moved by KL" in made.stderr
    words = f"--model {out}/target --spec-method medusa --spec-model {out}"
    assert made.error_lines[-1] == f"done; use it with {words}"
    llm = LLM(f"{out}/target", {"method": "medusa", "model": str(out)})
    assert llm.generate("the end", OUTPUT)[0].stats.num_drafted > 0
    exported = run("export", str(out), "--format", "vllm", "--out", str(tmp_path / "exported"))
    assert exported.stdout.startswith(f"vllm serve {out}/target ")


def test_a_chat_model_writes_its_own_texts_by_default(run, small, tmp_path):
    chatty = tmp_path / "chatty"
    shutil.copytree(small, chatty)
    tokenizer = copy.deepcopy(tiny_models.tokenizer())
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(chatty)
    chats = [
        {"messages": [{"role": "user", "content": f"the {i}"}, {"role": "assistant", "content": "end"}]}
        for i in range(4)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    asked = ["train", "draft_model", "--model", str(chatty), "-d", str(tmp_path / "chats.jsonl"), *FEW, *DRAFT]
    own = run(*asked, "-o", str(tmp_path / "own"), "--steps", "2", "--written", "20")
    assert own.code == 0, own.stderr
    assert "answers 4 prompts into" in own.stderr
    assert len((tmp_path / "own" / "generated.jsonl").read_text().splitlines()) == 4
    given = run(*asked, "-o", str(tmp_path / "given"), "--steps", "2", "--no-generate")
    assert given.code == 0, given.stderr
    assert not (tmp_path / "given" / "generated.jsonl").exists()


def test_the_command_of_a_vllm_is_printed_and_nothing_is_trained(run, small, tmp_path):
    asked = ["--model", str(small), *data(small), "-o", str(tmp_path / "o"), "--print-server-command"]
    made = run("train", "eagle3", "--set", "taps=1", *asked, str(tmp_path))
    assert (made.code, made.stdout) == (0, make_vllm_command(str(small), (1, 2), str(tmp_path)) + "\n")
    assert (
        run("train", "ngram_lm", *asked, str(tmp_path)).stdout
        == make_vllm_command(str(small), (2,), str(tmp_path)) + "\n"
    )
    assert not (tmp_path / "o").exists()
    joint = run("train", "medusa", "--set", "backbone=0.1", *asked, str(tmp_path))
    assert joint.error_lines[-1].endswith("must be here, not on a server; leave backbone out")


def test_a_table_is_counted(run, small, tmp_path):
    asked = ["--model", str(small), *data(small), "-o", str(tmp_path / "o"), "--held-out-share", "0.4", *FEW]
    made = run("train", "ngram_lm", *asked, "--set", "order=3")
    assert made.code == 0, made.stderr
    assert "sampled acceptance length" in made.stderr


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["guesswork", "-d", "x"], "error: 'guesswork' cannot be trained; use one of blockwise, chimera, dflash,"),
        (["ngram", "-d", "x"], "error: 'ngram' cannot be trained"),
        ([], "error: no data; give files with --data, or --data builtin"),
        (["-d", "x"], "error: no method; use one of blockwise, chimera, dflash,"),
        (["ngram_lm"], "error: no data; give files with --data, or --data builtin"),
        (["ngram_lm", "-d", "x", "--set", "order"], "error: --set takes key=value, got 'order'"),
        (["ngram_lm", "-d", "x", "--set", "size=3"], "error: unknown training option 'size'; this method takes: max"),
        (["ngram_lm", "-d", "x", "--set", "order=two"], "error: the training option order takes int, got 'two'"),
        (["ngram_lm", "-d", "x", "--heads", "3"], "error: unknown training option 'heads'"),
        (["draft_model", "-d", "x", "--loss", "mse"], "error: unknown loss 'mse'; use one of ce, kl"),
        (["draft_model", "-d", "x", "--loss", "kl", "--set", "loss=ce"], "error: --loss kl and --set loss=ce disagree"),
        (
            ["medusa", "-d", "x", "--set", "heads_weight=2"],
            "error: heads_weight has no effect on a frozen target; give",
        ),
        (["medusa", "-d", "x", "--set", "backbone=-1"], "error: backbone must be positive, got -1"),
        (["medusa", "-d", "x", "--set", "lora_modules=q,"], "error: the training option lora_modules takes names with"),
        (["draft_model", "-d", "x", "--steps", "0"], "error: --steps must be at least 1, got 0"),
        (["draft_model", "-d", "x", "--batch-tokens", "9"], "error: a step of 9 tokens holds no row of 256;"),
        (["medusa", "-d", "x", "--target-key", "k"], "error: --target-key goes with --target-url"),
        (["medusa", "-d", "x", "--target-url", "host:8000"], "error: --target-url takes an address such as"),
        (["draft_model", "-d", "x", "--optimizer", "sgd"], "error: unknown value 'sgd'; use one of adamw, muon"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_no_model(run, asked, message):
    found = run("train", *asked)
    assert found.code == 2
    [line] = found.error_lines
    assert line.startswith(message)


def test_bad_data_is_one_line(run, small, tmp_path):
    found = run("train", "ngram_lm", "--model", str(small), "-d", str(tmp_path / "none.txt"), "-o", str(tmp_path / "o"))
    assert found.code == 1
    assert found.error_lines[-1].endswith(
        "none.txt does not exist; --data takes text, .jsonl, .npy or a dataset folder"
    )
    assert not (tmp_path / "o").exists()


def test_help_names_every_option_and_imports_no_torch():
    code = "import sys, foredraft.cli.commands, foredraft.cli.train; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_progress_is_a_line_for_every_twentieth_where_there_is_no_terminal(capsys):
    with ProgressBar(make_console(sys.stderr, no_color=True), "reading", total=1) as bar:
        watch = TrainProgress(bar, prints_lines=True)
        for step in range(1, 101):
            measured = {"loss": 1.5, "greedy": {"length": 2.345, "positions": [0.5]}}
            watch(TrainStatus(step, 100, 2 / step, 1234.5, 65.0, measured))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 21
    assert lines[0] == (
        "step 1 of 100, loss 2.0000, 1,234 tokens/s, 1:05 left, held-out loss 1.500, greedy acceptance length 2.35"
    )
