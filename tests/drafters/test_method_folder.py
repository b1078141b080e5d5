"""A method outside the package: the files of docs/how-to/write-a-drafter.md, in a folder that nothing here lists.

The page is the test: its files are written into an empty folder, and its commands run on a tiny target.
"""

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

import foredraft
from foredraft import LLM, Sampling
from foredraft.bench import methods
from foredraft.checkpoints.target import read_target
from foredraft.cli.commands import app
from foredraft.drafters.checkpoint_folders import list_export_formats, read, recognise
from foredraft.drafters.registry import find_method, import_method, load_methods
from foredraft.errors import ForedraftError
from tests.support import tiny_models
from tests.support.server.live_server import run_server

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "write-a-drafter.md"
PACKAGE = Path(foredraft.__file__).parent
FILE = re.compile(r"<!-- file: (\S+) -->\n```python\n(.*?)```", re.DOTALL)
COMMANDS = re.compile(r"<!-- commands -->\n```bash\n(.*?)```", re.DOTALL)
METHOD = "linear_heads:METHOD"
SMALL = ("--context", "16", "--batch-tokens", "32", "--eval-prompts", "2", "--eval-tokens", "8", "--device", "cpu")
PROMPTS = ["the end", "and then the"]


def digest_package() -> dict[str, str]:
    return {
        str(path.relative_to(PACKAGE)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The files of the page in an empty folder, beside a tiny target with a tokenizer, and a text."""
    folder, before = tmp_path_factory.mktemp("place"), digest_package()
    for name, code in FILE.findall(PAGE.read_text("utf-8")):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code, encoding="utf-8")
    tokenizer = tiny_models.tokenizer()
    tiny_models.llama(len(tokenizer)).float().save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    (folder / "text.txt").write_text(tiny_models.TEXT * 6, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "linear_heads"]:
        del sys.modules[name]
    assert digest_package() == before, "a file of the package changed"


@pytest.fixture(scope="module")
def run(place: Path) -> Callable[..., Result]:
    def invoke(*args: str) -> Result:
        result = CliRunner().invoke(app, list(args))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


def train(run: Callable[..., Result], place: Path, out: str, *more: str) -> Result:
    return run(
        "train", METHOD, "--model", str(place / "target"), "--data", str(place / "text.txt"), "--out", str(place / out),
        "--held-out-share", "0.3", "--steps", "30", "--lr", "0.01", *SMALL, *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def heads(run: Callable[..., Result], place: Path) -> Path:
    made = train(run, place, "heads")
    assert made.exit_code == 0, made.stderr
    assert "acceptance length" in made.stderr
    return place / "heads"


@pytest.fixture(scope="module")
def llm(place: Path, heads: Path) -> LLM:
    spec = {"method": METHOD, "model": str(heads)}
    return LLM(str(place / "target"), spec, num_speculative_tokens=2, dtype="float32")


def test_it_learns(heads: Path) -> None:
    rows = [json.loads(line) for line in (heads / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0]


def test_a_stopped_run_resumes_with_the_same_bits(run: Callable[..., Result], place: Path, heads: Path) -> None:
    assert train(run, place, "halves", "--max-steps", "11").exit_code == 130
    resumed = train(run, place, "halves")
    assert resumed.exit_code == 0
    assert "resuming after step 11 of 30" in resumed.stderr
    whole, halves = (load_file(folder / "model.safetensors") for folder in (heads, place / "halves"))
    assert whole.keys() == halves.keys() == {"linear_heads.0.weight", "linear_heads.1.weight"}
    assert all(torch.equal(tensor, halves[name]) for name, tensor in whole.items())


def test_it_starts_from_its_own_heads(run: Callable[..., Result], place: Path, heads: Path) -> None:
    again = train(run, place, "again", "--start", str(heads), "--max-steps", "1")
    assert again.exit_code == 130, again.stderr
    wrong = train(run, place, "wrong", "--start", str(heads), "--heads", "3")
    assert "has heads=2, not 3" in wrong.stderr


def test_its_folder_is_recognised_and_read(place: Path, heads: Path) -> None:
    method, info = import_method(METHOD), read_target(str(place / "target")).info
    assert recognise(heads, method) == ("linear", "linear")
    checkpoint = read(heads, info, method)
    assert (checkpoint.method, checkpoint.shape.num_heads, set(checkpoint.tensors)) == (
        "linear", 2, {"0.weight", "1.weight"},
    )  # fmt: skip
    with pytest.raises(ForedraftError, match="those of no drafter that is supported"):
        recognise(heads)  # it is not registered


@pytest.mark.parametrize("verify", ["match", "reject", "block"])
@pytest.mark.parametrize("temperature", [0, 0.9])
def test_it_drafts_and_the_output_is_that_of_plain_decoding(llm: LLM, verify: str, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, max_tokens=40, seed=3, ignore_eos=True)
    drafting = llm.with_drafter(llm.drafter, verify=verify)
    done, plain = (
        drafting.generate(PROMPTS, sampling),
        llm.with_drafter(None, verify=verify).generate(PROMPTS, sampling),
    )
    assert sum(completion.stats.num_drafted for completion in done) > 0
    assert sum(completion.stats.num_accepted for completion in done) > 0
    if temperature == 0 or drafting.rule.is_reproducible:
        assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    assert drafting.engine.drafter.num_failures == 0, "the sandbox hid a fault of the drafter"


def test_it_drafts_trees_and_in_an_ensemble(place: Path, heads: Path, llm: LLM) -> None:
    sampling = Sampling(temperature=0, max_tokens=30, ignore_eos=True)
    plain = llm.with_drafter(None).generate(PROMPTS, sampling)
    for spec in (
        {"method": METHOD, "model": str(heads), "tree_nodes": 6, "top_k": 3},
        {"method": f"ngram+{METHOD}", "model": str(heads)},
    ):
        drafting = llm.with_drafter(spec)
        assert [one.token_ids for one in drafting.generate(PROMPTS, sampling)] == [one.token_ids for one in plain]
        assert drafting.engine.drafter.num_failures == 0
    assert llm.with_drafter(spec).drafter_name == "ngram+linear"


def test_the_command_line_drafts_with_it(run: Callable[..., Result], place: Path, heads: Path) -> None:
    asked = ["generate", "--model", str(place / "target"), "--dtype", "float32", "--max-tokens", "12", "the end"]
    done = run(*asked, "--spec-method", METHOD, "--spec-model", str(heads))
    assert done.exit_code == 0, done.stderr
    assert "acceptance rate" in done.stderr
    assert done.stdout == run(*asked, "--spec-method", "none").stdout


def test_it_serves(llm: LLM) -> None:
    with run_server(llm.with_drafter(llm.drafter)) as server:
        body = {"max_tokens": 20, "ignore_eos": True, "temperature": 0}
        served = server.complete(PROMPTS[0], **body)["choices"][0]["text"]
        drafted = server.metrics()["vllm:spec_decode_num_draft_tokens_total"]
    sampling = Sampling(temperature=0, max_tokens=20, ignore_eos=True)
    assert served == llm.with_drafter(None).generate(PROMPTS[0], sampling)[0].text
    assert drafted > 0


def test_it_is_exported(run: Callable[..., Result], place: Path, heads: Path) -> None:
    out = place / "exported"
    asked = ["export", str(heads), "--spec-method", METHOD, "--out", str(out), "--model", str(place / "target")]
    done = run(*asked, "--format", "linear")
    assert done.exit_code == 0, done.stderr
    assert "only Foredraft loads linear heads" in done.stderr
    assert load_file(out / "model.safetensors").keys() == load_file(heads / "model.safetensors").keys()
    assert "linear" not in list_export_formats()
    wrong = run(*asked, "--format", "gguf")
    assert (wrong.exit_code, len(wrong.stderr.splitlines())) == (2, 1)
    assert "eagle3, hydra, linear, medusa" in wrong.stderr


def test_the_commands_of_the_page_exist(run: Callable[..., Result]) -> None:
    [block] = COMMANDS.findall(PAGE.read_text("utf-8"))
    commands = [line.split() for line in block.splitlines() if line.startswith("foredraft ")]
    assert [words[1] for words in commands] == ["train", "generate", "serve", "export"]
    for words in commands:
        shown = re.sub(r"\x1b\[[0-9;]*m", "", run(words[1], "--help").stdout)
        assert all(word in shown for word in words if word.startswith("--"))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_package.module:METHOD", "'no_such_package.module' .* cannot be imported .*PYTHONPATH"),
        ("linear_heads:METHODS", "'METHODS' does not exist"),
        ("linear_heads:TrainConfig", "'TrainConfig' is type"),
        ("linear_heads.network:LinearHeads", "it must be a foredraft.drafters.method.Method"),
    ],
)
def test_a_wrong_path_is_one_line(place: Path, llm: LLM, path: str, message: str) -> None:
    with pytest.raises(ForedraftError, match=message) as caught:
        llm.with_drafter({"method": path})
    assert "\n" not in str(caught.value)


def test_a_module_that_raises_is_one_line(place: Path, llm: LLM) -> None:
    (place / "broken_method.py").write_text("raise RuntimeError('first\\nsecond')\n")
    with pytest.raises(ForedraftError, match=r"cannot be imported \(RuntimeError: first\)") as caught:
        llm.with_drafter("broken_method:METHOD")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("command", ["generate", "train", "bench", "export"])
def test_the_command_line_reports_a_wrong_path_in_one_line(
    run: Callable[..., Result], place: Path, command: str
) -> None:
    path = "no_such_package:METHOD"
    args = {
        "generate": ["generate", "--model", str(place / "target"), "--spec-method", path, "the end"],
        "train": ["train", path, "--model", str(place / "target"), "--data", str(place / "text.txt")],
        "bench": ["bench", "latency", "--methods", path, "--prompts", "1"],
        "export": ["export", str(place), "--spec-method", path, "--format", "linear", "--out", str(place / "none")],
    }[command]
    done = run(*args)
    assert done.exit_code != 0
    assert "'no_such_package'" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        (METHOD, {"method": METHOD}),
        (f"{METHOD}:8", {"method": METHOD, "num_speculative_tokens": 8}),
        (f"{METHOD}:top_k=3:8", {"method": METHOD, "top_k": 3, "num_speculative_tokens": 8}),
        (f"ngram+{METHOD}:8", {"method": f"ngram+{METHOD}", "num_speculative_tokens": 8}),
        (f"{METHOD}+ngram:8", {"method": f"{METHOD}+ngram", "num_speculative_tokens": 8}),
        ("a.b:METHOD", {"method": "a.b:METHOD"}),
        ("ngram:8", {"method": "ngram", "num_speculative_tokens": 8}),
    ],
)
def test_the_colon_of_a_path_separates_no_setting_of_the_bench(text: str, spec: dict[str, object]) -> None:
    assert methods.parse(text, sorted(load_methods())).spec == spec


def test_nothing_of_it_is_registered() -> None:
    assert "linear" not in load_methods()
    assert find_method("linear") is None


ENTRY_POINTS = """
[foredraft.drafters]
linear = linear_heads:METHOD
broken = no_such_package:METHOD
ngram = linear_heads:SECOND
"""
SECOND = """
from dataclasses import replace

SECOND = replace(METHOD, name="ngram")
"""
USE = """
import logging
logging.basicConfig(format="%(message)s")
from foredraft.drafters.checkpoint_folders import recognise
from foredraft.drafters.registry import load_methods
methods = load_methods()
print(methods["linear"].name, methods["ngram"].uses_model, recognise({heads!r}))
"""


def test_an_installed_package_registers_its_method(place: Path, heads: Path, tmp_path: Path) -> None:
    """Its entry point gives the short name. A broken one, or one with the name of another, is left out."""
    (tmp_path / "linear_heads").mkdir()
    for file in (place / "linear_heads").glob("*.py"):
        (tmp_path / "linear_heads" / file.name).write_text(file.read_text())
    with (tmp_path / "linear_heads" / "__init__.py").open("a") as init:
        init.write(SECOND)
    info = tmp_path / "linear_heads-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: linear-heads\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    done = subprocess.run(
        [sys.executable, "-c", USE.format(heads=str(heads))],
        env={"PYTHONPATH": f"{tmp_path}:{PACKAGE.parent}"}, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.stdout.split("\n")[0] == "linear False ('linear', 'linear')", done.stderr
    assert "the installed method broken is left out: the module 'no_such_package'" in done.stderr
    assert "the installed method linear_heads:SECOND is left out: there is a method ngram" in done.stderr
