"""`foredraft batch` with the built-in model: results, errors by line, and a job that is killed."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from foredraft import LLM, Sampling

PROMPTS = ["def fibonacci(n):", "class Stack:", "import os", "for i in range("]


def read_rows(path):
    return [json.loads(row) for row in path.read_text(encoding="utf-8").splitlines()]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_prompts_of_a_text_file_have_the_text_of_generate(run, tmp_path):
    (tmp_path / "in.txt").write_text("\n".join(PROMPTS))
    out = tmp_path / "out.jsonl"
    outcome = run("batch", str(tmp_path / "in.txt"), str(out), "--max-tokens", "12")
    assert outcome.code == 0
    with LLM() as llm:
        expected = [c.text for c in llm.generate(PROMPTS, Sampling(temperature=0.0, max_tokens=12))]
    assert [row["response"]["body"]["choices"][0]["text"] for row in read_rows(out)] == expected
    assert "4 results in" in outcome.stderr


def test_every_line_has_its_own_result_or_error(run, tmp_path):
    body = {"model": "builtin", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    rows = [
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": body},
        {"custom_id": "model", "url": "/v1/completions", "body": {"model": "gpt", "prompt": "x"}},
        {"custom_id": "field", "prompt": "x", "temprature": 0},
        {"custom_id": "route", "url": "/v1/embeddings", "body": {}},
        {"custom_id": "nan", "prompt": "x", "temperature": float("nan")},
        {"custom_id": "last", "prompt": "x", "max_tokens": 2},
    ]
    out = tmp_path / "out.jsonl"
    outcome = run("batch", write_rows(tmp_path / "in.jsonl", rows), str(out))
    results = read_rows(out)
    assert outcome.code == 0
    assert [row["custom_id"] for row in results] == [row["custom_id"] for row in rows]
    statuses = [row["response"] and row["response"]["status_code"] for row in results]
    assert statuses == [200, 404, 400, None, 400, 200]
    assert "temprature" in results[2]["response"]["body"]["error"]["message"]
    assert "url must be" in results[3]["error"]["message"]
    assert "4 failed" in outcome.stderr


@pytest.mark.parametrize(
    ("content", "args", "message"),
    [
        (None, (), "cannot be read"),
        ("", (), "has no lines"),
        ('"x"\n', ("--field", "top_p"), "--field takes KEY=VALUE"),
        ('"x"\n', ("--spec-method", "ngram,draft_model"), "a batch drafts with one method"),
        ('"x"\n', ("--kv-memory", "much"), "--kv-memory takes a size"),
        ('"x"\n', ("--spec-tokens", "0"), "a batch without drafts has --spec-method none"),
        ('"x"\n', ("--replicas", "2"), "--replicas is for --ray"),
    ],
)
def test_mistakes_are_one_line_before_a_model_is_loaded(run, tmp_path, content, args, message):
    if content is not None:
        (tmp_path / "in.jsonl").write_text(content)
    outcome = run("batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), *args)
    assert outcome.code in (1, 2)
    assert message in outcome.stderr
    assert len(outcome.error_lines) == 1
    assert list(tmp_path.glob("out*")) == []


@pytest.mark.parametrize("options", [[], ["--unordered"]], ids=["ordered", "unordered"])
def test_a_job_killed_again_and_again_writes_the_file_of_an_undisturbed_one(tmp_path, options):
    """Faults: a result lost, written twice, or cut; a text that depends on the requests beside it or on time."""
    rows = [{"prompt": PROMPTS[i % 4] + f" # {i}", "temperature": 1.0 * (i % 2), "max_tokens": 16} for i in range(40)]
    source = write_rows(tmp_path / "in.jsonl", rows)
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"

    def start(out):
        command = [sys.executable, "-m", "foredraft", "batch", source, str(out), "--max-batch", "4", *options]
        return subprocess.Popen(command, stderr=subprocess.DEVNULL)

    part = tmp_path / "killed.jsonl.part"
    for kill in range(1 if options else 2):
        process = start(killed)
        size = part.stat().st_size if part.exists() else 0
        while process.poll() is None and (not part.exists() or part.stat().st_size <= size + 4000 * kill):
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert not killed.exists()
    assert start(killed).wait() == 0
    assert start(whole).wait() == 0
    if options:
        assert sorted(killed.read_bytes().splitlines()) == sorted(whole.read_bytes().splitlines())
    else:
        assert killed.read_bytes() == whole.read_bytes()
    assert len(read_rows(killed)) == len(rows)
