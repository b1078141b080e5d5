"""The process: it starts, drains on SIGTERM, aborts on a second one, leaves with code 0, and keeps secrets."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

BODY = {"prompt": "canary-prompt-71ab def main(", "temperature": 0, "ignore_eos": True, "max_tokens": 600}
KEY = "sk-canary-99c2"


def restore_signals() -> None:
    """Background jobs of a shell, and nohup, ignore these two; a server started by hand does not."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Process:
    """`foredraft serve` with the built-in pair."""

    def __init__(self, *args: str) -> None:
        command = [sys.executable, "-m", "foredraft", "serve", "--port", "0", "--kv-memory", "256M", *args]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "FOREDRAFT_API_KEY": KEY}
        pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=env, preexec_fn=restore_signals, **pipes)
        self.lines: list[str] = []
        self.reader = threading.Thread(target=lambda: self.lines.extend(self.process.stderr))
        self.reader.start()

    def wait_for(self, pattern: str, seconds: float = 120) -> str:
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            for line in list(self.lines):
                if found := re.search(pattern, line):
                    return found[0]
            time.sleep(0.05)
        raise AssertionError(self.lines)

    def left(self) -> int:
        code = self.process.wait(60)
        self.reader.join()
        self.process.stdout.close()
        self.process.stderr.close()
        return code


@contextlib.contextmanager
def serve(*args: str, seconds: float = 120) -> Iterator[tuple[Process, httpx.Client]]:
    server = Process(*args)
    try:
        url = server.wait_for(r"http://[\w.:]+")
        with httpx.Client(base_url=url, timeout=60, headers={"Authorization": f"Bearer {KEY}"}) as client:
            server.wait_for("serving builtin", seconds)
            yield server, client
    finally:
        server.process.kill()
        server.left()


def stream(client: httpx.Client, into: list[str]) -> threading.Thread:
    """Reads a stream on a thread; returns once its first event is there."""
    has_begun = threading.Event()

    def read() -> None:
        with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
            for line in answer.iter_lines():
                into.append(line)
                has_begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert has_begun.wait(60)
    return thread


def read_finish_reason(lines: list[str]) -> str:
    """Return the finish reason of a stream, which must have ended."""
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2] if line]
    return chunks[-1]["choices"][0]["finish_reason"]


def test_sigterm_drains_and_leaves_with_0():
    with serve() as (server, client):
        assert client.get("/ready").status_code == 200
        assert client.get("/v1/models", headers={"Authorization": ""}).status_code == 401
        whole = client.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
        lines: list[list[str]] = [[] for _ in range(4)]
        readers = [stream(client, into) for into in lines]
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        for path, body in (("/ready", None), ("/v1/completions", BODY)):
            answer = client.post(path, json=body) if body else client.get(path)
            assert (answer.status_code, bool(answer.headers["retry-after"])) == (503, True)
        for reader in readers:
            reader.join()
        assert server.left() == 0
        for found in lines:
            assert read_finish_reason(found) == "length"
            texts = [json.loads(line[6:])["choices"][0]["text"] for line in found if line.startswith("data: {")]
            assert "".join(texts) == whole
        said = "".join(server.lines)
        for secret in (KEY, "canary-prompt", "Traceback"):
            assert secret not in said


@pytest.mark.parametrize("how", ["second signal", "drain timeout"])
def test_what_does_not_end_in_time_is_aborted(how: str):
    with serve("--drain-timeout", "0.2" if how == "drain timeout" else "60") as (server, client):
        lines: list[str] = []
        reader = stream(client, lines)
        server.process.send_signal(signal.SIGTERM)
        if how == "second signal":
            time.sleep(0.1)
            server.process.send_signal(signal.SIGTERM)
        reader.join()
        assert server.left() == 0
        assert read_finish_reason(lines) == "abort"


def test_a_server_that_still_loads_leaves_at_once():
    server = Process()
    url = server.wait_for(r"http://[\w.:]+")
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with contextlib.suppress(httpx.ConnectError):
            assert httpx.get(f"{url}/health").status_code == 200
            break
    server.process.send_signal(signal.SIGTERM)
    assert server.left() == 0


def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path):
    server = Process("--model", str(tmp_path / "nothing"))
    assert server.left() == 1
    assert server.lines[-1].startswith("error: ")
    assert "Traceback" not in "".join(server.lines)


def test_a_port_in_use_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        server = Process("--port", port)
        assert server.left() == 1
    assert len(server.lines) == 1
    assert f"port {port}" in server.lines[0]
    assert "--port" in server.lines[0]
