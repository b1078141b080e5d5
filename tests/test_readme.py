"""Every command and snippet of the README runs as it stands there, on models that a test makes."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft import zoo

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"(?:<!-- (?P<mark>[^>]+) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)```", re.DOTALL)
SHORTER = {"--max-minutes 30": "--steps 2"}  # what a test changes, and nothing else


@dataclass(frozen=True)
class Block:
    mark: str | None
    kind: str
    text: str


def blocks() -> list[Block]:
    return [Block(found["mark"], found["kind"], found["text"]) for found in BLOCK.finditer(README.read_text("utf-8"))]


def find_marked(mark: str, kind: str) -> list[str]:
    return [block.text for block in blocks() if (block.mark, block.kind) == (mark, kind)]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the files that the README names."""
    folder = tmp_path_factory.mktemp("desk")
    for name, hidden in (("my-model", 64), ("my-small-model", 32)):
        config = LlamaConfig(
            vocab_size=4096, hidden_size=hidden, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=512, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder / name)
        for file in zoo.find_target_folder(zoo.DEFAULT_TARGET).glob("tokenizer*"):
            shutil.copy(file, folder / name)
    (folder / "prompt.py").write_text("import os\nimport sys\n")
    text = "def area(width, height):\n    return width * height\n" * 12
    (folder / "texts.jsonl").write_text(f"{json.dumps({'text': text})}\n" * 24)
    return folder


def run(desk: Path, command: list[str], text: str | None = None) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, cwd=desk, env=environment, input=text, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_every_block_of_code_is_marked_with_how_it_is_run():
    known = {"command: install", "command: test", "run", "run: chat", "run: serve", "run: client", "run: train"}
    assert {block.mark for block in blocks()} == known


@pytest.mark.parametrize("number", range(len(find_marked("run", "python"))))
def test_a_snippet_of_python_runs(desk: Path, number: int):
    run(desk, [sys.executable, "-W", "error::SyntaxWarning", "-c", find_marked("run", "python")[number]])


@pytest.mark.parametrize("number", range(len(find_marked("run", "bash"))))
def test_the_commands_of_a_block_run(desk: Path, number: int):
    run(desk, ["bash", "-ec", find_marked("run", "bash")[number]])


def test_the_chat_answers(desk: Path):
    [command] = find_marked("run: chat", "bash")
    assert run(desk, ["bash", "-ec", command.strip() + " --max-tokens 4"], "Hello\n/exit\n").strip()


def test_a_drafter_is_trained_compared_and_exported(desk: Path):
    [text] = find_marked("run: train", "bash")
    for long, short in SHORTER.items():
        assert long in text
        text = text.replace(long, short)
    run(desk, ["bash", "-ec", text])
    assert (desk / "for-vllm" / "config.json").exists()


@pytest.fixture
def port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_the_server_answers_the_clients_command(desk: Path, port: int):
    [serve], [client] = find_marked("run: serve", "bash"), find_marked("run: client", "bash")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    server = subprocess.Popen(["bash", "-ec", f"exec {serve.strip()} --port {port}"], cwd=desk, env=environment)
    try:
        wait_until_ready(port)
        answer = json.loads(run(desk, ["bash", "-ec", client.replace("8000", str(port))]))
        assert answer["choices"][0]["text"]
    finally:
        server.terminate()
        server.wait(30)


def wait_until_ready(port: int) -> None:
    for _ in range(240):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready"):
                return
        except urllib.error.HTTPError as error:  # still loading; Python 3.14 warns if the answer is not closed
            error.close()
        except (urllib.error.URLError, ConnectionError):
            pass
        time.sleep(0.5)
    raise AssertionError("the server never became ready")
