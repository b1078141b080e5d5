"""`foredraft bench` on tiny models: what is printed, what is written, what is refused before anything is measured."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from foredraft.bench import subprocess_peer
from foredraft.bench.grow import ORIGIN_FIELD
from foredraft.errors import format_install_command
from tests.support import tiny_models

GROWN = "the target is a grown model: the text, and so the acceptance, of small"
FAKE_PEER = """
import sys
from serve import serve

def load(**job):
    return {"version": sys.argv[0].rpartition("peer_")[2]}

def generate(mode, prompt, max_tokens, **rest):
    return {"tokens": prompt[:1] * max_tokens, "seconds": 1.0, "passes": max_tokens}

def streams(prompts, max_tokens):
    return {"tokens": [], "seconds": 0.5}

def verify(rows, **rest):
    return {"seconds": {str(k): 0.5 * k for k in rows}}

serve({"load": load, "generate": generate, "verify": verify, "streams": streams})
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A tiny Llama with a tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "small"
    tiny_models.llama(vocab_size=320).float().save_pretrained(folder)
    tiny_models.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("questions") / "q.jsonl"
    file.write_text('{"turns": ["the end and the", "then"]}\n{"turns": ["def and"]}\n')
    return file


@pytest.fixture
def fake_peers(tmp_path, monkeypatch) -> Path:
    """Peers that need no program."""
    folder = tmp_path / "peers"
    folder.mkdir()
    shutil.copy(subprocess_peer.PEERS_FOLDER / "serve.py", folder)
    for script in subprocess_peer.PEERS_FOLDER.glob("peer_*.py"):
        (folder / script.name).write_text(FAKE_PEER)
    monkeypatch.setattr(subprocess_peer, "PEERS_FOLDER", folder)
    return folder


@pytest.fixture
def grown(run, small, tmp_path) -> Path:
    folder = tmp_path / "grown"
    outcome = run("bench", "grow", "--params", "1M", "--model", str(small), "--out", str(folder))
    assert outcome.code == 0, outcome.stderr
    assert "parameters" in outcome.stderr
    assert outcome.stdout == ""
    return folder


def latency(run, model, asked, *args):
    # the plain path of the model: what the native one computes is not tested here
    common = ("--model", str(model), "--questions", str(asked), "--max-tokens", "6", "--threads", "1", "--no-fused")
    return run("bench", "latency", *common, *args)


def compare(run, model, asked, *args):
    common = ("--model", str(model), "--questions", str(asked), "--max-tokens", "6", "--threads", "1")
    return run("bench", "compare", *common, *args)


def test_latency_of_a_grown_model_says_so_wherever_it_writes(run, grown, small, asked, tmp_path):
    draft = f"draft_model:2:model={small}"  # the model it was grown from: every draft is kept
    files = [tmp_path / name for name in ("f.json", "f.md", "f.png")]
    outputs = [word for pair in zip(("--json", "--markdown", "--plot"), map(str, files), strict=True) for word in pair]
    outcome = latency(run, grown, asked, "--methods", draft, "--verify-cost", "1,2", "--context", "16", *outputs)
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout == files[1].read_text()
    assert GROWN in outcome.stdout
    figures = json.loads(files[0].read_text())
    assert any(GROWN in note for note in figures["notes"])
    assert figures["model"]["grown_from"].startswith("small")
    assert [row["method"] for row in figures["methods"]] == ["plain", draft]
    assert [row["identical"] for row in figures["methods"]] == [3, 3]
    assert [row["acceptance_length"] for row in figures["methods"]] == [1.0, 3.0]
    assert [row["acceptance_rate"] for row in figures["methods"]] == [0.0, 1.0]
    assert [cost["rows"] for cost in figures["verify_cost"]["passes"]] == [1, 2]
    assert files[2].read_bytes().startswith(b"\x89PNG")
    for word in ("| plain |", f"| {draft} |", "3/3", "Drafts accepted up to each position", "Cost of verification"):
        assert word in outcome.stdout


def test_an_ordinary_model_is_not_called_grown(run, small, asked):
    outcome = latency(run, small, asked, "--methods", "ngram", "--prompts", "1")
    assert outcome.code == 0, outcome.stderr
    assert "grown" not in outcome.stdout


def test_on_a_terminal_there_is_a_table(run_on_terminal, small, asked):
    outcome = latency(run_on_terminal, small, asked, "--methods", "ngram:3")
    assert "│ ngram:3" in outcome.stdout
    assert "· target small" in outcome.stdout


def test_methods_that_cannot_be_had_are_left_out_by_default_and_refused_by_name(run, small, asked):
    outcome = latency(run, small, asked, "--prompts", "1")
    assert outcome.code == 0, outcome.stderr
    assert "draft_model was left out: the method draft_model needs a draft" in outcome.stdout
    outcome = latency(run, small, asked, "--methods", "draft_model:2")
    assert (outcome.code, len(outcome.error_lines)) == (1, 1)


def test_sampling_with_a_seed_is_compared_and_without_is_not(run, small, asked):
    args = ("--methods", "ngram:2,draft_model:2", "--spec-model", str(small), "--temperature", "1", "--top-p", "0.9")
    outcome = latency(run, small, asked, *args)
    assert "| sampled |" in outcome.stdout
    assert "verification: reject (ngram:2); block (draft_model:2)" in outcome.stdout
    outcome = latency(run, small, asked, *args, "--seed", "3")
    assert "temperature 1.0, top-p 0.9, seed 3" in outcome.stdout
    assert "verification:" not in outcome.stdout
    assert outcome.stdout.count("3/3") == 3


def test_only_the_cost_of_verification(run, small, asked):
    outcome = latency(run, small, asked, "--prompts", "0", "--verify-cost", "2", "--context", "8")
    assert outcome.code == 0, outcome.stderr
    assert "Speed" not in outcome.stdout
    assert "| tokens in one pass | ms | over one token |" in outcome.stdout


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (("--methods", "nope"), "unknown method 'nope'"),
        (("--methods", "ngram:x"), "'x' is no draft length"),
        (("--methods", "ngram:branches=0"), "branches"),
        (("--methods", "ngram:sizes=4"), "sizes"),
        (("--quantization", "int3"), "int3"),
        (("--dtype", "float8"), "unknown dtype 'float8'"),
        (("--verify", "never"), "unknown verification rule 'never'"),
        (("--temperature", "-1"), "--temperature"),
        (("--prompts", "0"), "--prompts 0 leaves nothing to measure"),
        (("--verify-cost", "a"), "--verify-cost takes numbers"),
        (("--verify-cost", "8", "--context", "300", "--prompts", "0"), "do not fit the model's context"),
        (("--max-tokens", "500"), "no prompt fits the model's context"),
        (("--json", "/nowhere/f.json"), "there is no folder '/nowhere'"),
        (("--json", "/proc/f.json"), "cannot be written"),
        (("--plot", "/tmp/f.svg"), "plots are PNG"),
        (("--markdown", "/tmp"), "is a folder"),
        (("--questions", "/nowhere.jsonl"), "does not exist"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_makes_no_sense_is_one_line(run, small, asked, args, complaint):
    outcome = latency(run, small, asked, *args)
    assert outcome.code in (1, 2)
    assert len(outcome.error_lines) == 1
    assert complaint in outcome.stderr
    assert outcome.stdout == ""


def test_a_plot_without_matplotlib_is_refused_with_the_command(run, small, asked, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    outcome = latency(run, small, asked, "--plot", str(tmp_path / "f.png"))
    assert (outcome.code, outcome.stderr) == (
        1,
        f"error: plots need matplotlib; run {format_install_command('bench')}\n",
    )


def test_a_comparison_by_streams_alone_loads_what_decodes_plainly(run, fake_peers, grown, asked, tmp_path):
    args = ("--methods", "ngram:3", "--llama-cpp", sys.executable, "--prompts", "0", "--streams", "1,3")
    outcome = compare(run, grown, asked, *args, "--max-tokens", "8", "--json", str(tmp_path / "f.json"))
    assert outcome.code == 0, outcome.stderr
    figures = json.loads((tmp_path / "f.json").read_text())
    assert [(s["program"], s["streams"]) for s in figures["streams"]] == [
        (program, count) for count in (1, 3) for program in ("foredraft", "llama.cpp", "transformers")
    ]  # fmt: skip
    assert "| program | weights | 1 | 3 |" in outcome.stdout
    assert "vllm | ngram" not in outcome.stdout


def test_a_comparison_writes_what_it_says(run, fake_peers, grown, asked, tmp_path):
    files = [tmp_path / name for name in ("f.json", "f.md", "f.png")]
    outputs = [word for pair in zip(("--json", "--markdown", "--plot"), map(str, files), strict=True) for word in pair]
    args = ("--methods", "ngram:3", "--llama-cpp", sys.executable, "--quantization", "int8", "--verify-cost", "1,4")
    outcome = compare(run, grown, asked, *args, "--context", "16", *outputs)
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout == files[1].read_text()
    assert GROWN in outcome.stdout
    figures = json.loads(files[0].read_text())
    assert any(GROWN in note for note in figures["notes"])
    assert figures["model"]["grown_from"].startswith("small")
    status = {(r["program"], r["mode"], r["weights"]): r["status"] for r in figures["results"]}
    assert status["foredraft", "ngram:3", "bfloat16"] == "ok"
    assert status["foredraft", "plain", "int8"] == "ok"
    assert status["llama.cpp", "plain", "Q8_0"] == "ok"
    assert status["transformers", "assisted", "bfloat16"] == "ok"
    assert status["vllm", "ngram", "bfloat16"] == "absent"
    assert figures["verify_cost"]["passes"]["llama.cpp (Q8_0)"][1]["ratio"] == 4.0
    assert {(lead["program"], lead["weights"]) for lead in figures["leads"]} == {
        ("llama.cpp", "bfloat16"), ("transformers", "bfloat16"), ("llama.cpp", "int8"),
    }  # fmt: skip
    assert "| vllm | plain | bfloat16 | absent: not given |" in outcome.stdout
    assert files[2].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (("--quantization", "int3"), "unknown quantization 'int3'; use one of: int8, int4"),
        (("--dtype", "float16"), "takes --dtype bfloat16 or float32"),
        (("--model", "org/name"), "is no model folder; a comparison takes a local --model"),
        (("--spec-model", "org/name"), "is no model folder; a comparison takes a local --spec-model"),
        (("--max-tokens", "256"), "does not fit the 256 tokens"),
        (("--verify-cost", "16", "--context", "250"), "--context 250 does not fit"),
        (("--prompts", "0"), "leaves nothing to measure"),
        (("--streams", "0,8"), "--streams takes numbers from 1 to 256, as 8,16,32,64; got '0,8'"),
    ],
)
def test_a_comparison_that_makes_no_sense_is_one_line(run, fake_peers, small, asked, args, complaint):
    outcome = compare(run, small, asked, *args)
    assert outcome.code in (1, 2)
    assert len(outcome.error_lines) == 1
    assert complaint in outcome.stderr


def test_grow_refuses_before_it_loads(run, small, tmp_path):
    for args, complaint in (
        (("--params", "lots", "--out", str(tmp_path / "a")), "is no number of parameters"),
        (("--params", "1M", "--out", str(small)), "is not an empty folder"),
        (("--params", "1k", "--out", str(tmp_path / "a"), "--model", str(small)), "cannot be grown to 0.0M"),
    ):
        outcome = run("bench", "grow", *args)
        assert outcome.code in (1, 2)
        assert complaint in outcome.error_lines[-1]
    assert not (tmp_path / "a").exists()


def test_a_grown_model_carries_its_origin(grown):
    assert json.loads((grown / "config.json").read_text())[ORIGIN_FIELD].startswith("small (0.0M parameters)")
