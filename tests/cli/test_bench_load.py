"""`foredraft bench load` on a tiny model: what is printed and written, and what is refused before it is loaded."""

import json
from pathlib import Path

import pytest

from tests.support import tiny_models


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A tiny Llama with a tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "small"
    tiny_models.llama(vocab_size=320).float().save_pretrained(folder)
    tiny_models.tokenizer().save_pretrained(folder)
    return folder


def load(run, model, *args):
    common = ("--model", str(model), "--threads", "1", "--prompts", "4", "--prompt-tokens", "12", "--max-tokens", "6")
    effort = ("--rounds", "2", "--least", "2", "--waves", "1", "--method", "ngram", "--concurrency", "1,3")
    return run("bench", "load", *common, *effort, *args)


def test_every_mode_at_every_load(run, small, tmp_path):
    files = [tmp_path / name for name in ("f.json", "f.md", "f.png")]
    outputs = [word for pair in zip(("--json", "--markdown", "--plot"), map(str, files), strict=True) for word in pair]
    outcome = load(run, small, "--fixed", "4", "--more", "2", "--more-until", "2", *outputs)
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout == files[1].read_text()
    for word in ("# Load: small", "drafts by ngram", "greedy", "| K = 4 / off |", "TTFT p50, ms", "closed loop"):
        assert word in outcome.stdout
    figures = json.loads(files[0].read_text())
    modes = [[cell["mode"] for cell in point["cells"]] for point in figures["points"]]
    assert modes == [["off", "auto", "2", "4"], ["off", "auto", "4"]]
    off = figures["points"][0]["cells"][0]
    assert (off["over_off"], off["acceptance_length"], off["drafted"], off["rounds"]) == (1.0, 1.0, 0.0, 2)
    assert files[2].read_bytes().startswith(b"\x89PNG")


def test_through_a_worker(run, small):
    outcome = load(run, small, "--worker", "--more", "", "--temperature", "1", "--seed", "3")
    assert outcome.code == 0, outcome.stderr
    assert "an engine's worker" in outcome.stdout
    assert "temperature 1.0, top-p 1.0, seed 3" in outcome.stdout


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (("--concurrency", "0"), "--concurrency '0': must be numbers from 1 up"),
        (("--fixed", "x"), "--fixed 'x'"),
        (("--method", "ngram:4"), "names a draft length; give lengths with --fixed and --more"),
        (("--method", "nope"), "unknown method 'nope'"),
        (("--temperature", "-1"), "--temperature"),
        (("--url", "http://127.0.0.1:9/v1", "--worker"), "give one of them"),
        (("--url", "http://127.0.0.1:9/v1"), "no server answers at http://127.0.0.1:9/v1/models"),
        (("--max-tokens", "200"), "no prompt with an output of up to 300 tokens fits"),
        (("--plot", "x.gif"), "plots are PNG"),
    ],
)
def test_what_is_impossible_is_refused_in_one_line(run, small, args, complaint):
    outcome = load(run, small, *args)
    assert outcome.code != 0
    assert len(outcome.error_lines) == 1
    assert complaint in outcome.error_lines[0]
