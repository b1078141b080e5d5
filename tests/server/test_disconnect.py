"""Clients that leave, read slowly, or wait too long: what they held is free."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest

from foredraft.drafters.spec import DrafterSpec
from foredraft.engine.worker import WorkerLimits
from foredraft.server.settings import RequestLimits, ServerSettings
from tests.support.server.live_server import NAME, RunningServer, make_fresh_llm, run_server

LONG = {"prompt": "the end", "max_tokens": 240, "ignore_eos": True, "temperature": 0}


class Slow:
    """A drafter that takes its time and drafts nothing: steps that a test can count."""

    spec = DrafterSpec(max_nodes=1)

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.steps = 0

    def propose(self, batch):
        from foredraft.drafters.draft import to_token_tree

        time.sleep(self.seconds)
        self.steps += 1
        return to_token_tree(batch, {})

    def observe(self, batch, commit) -> None: ...

    def forget(self, slots) -> None: ...


@pytest.fixture
def slow() -> Iterator[tuple[RunningServer, Slow]]:
    drafter = Slow(0.03)
    with run_server(make_fresh_llm().with_drafter(drafter)) as server:
        yield server, drafter


def request(body: dict, path: str = "/v1/completions") -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def wait_for(condition, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_ends_its_request_within_two_steps(slow, path: str, is_stream: bool):
    server, drafter = slow
    body = LONG | {"stream": is_stream, "n": 2}
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(request(body, path))
        wait_for(lambda: drafter.steps > 5)
    left = drafter.steps
    wait_for(lambda: not server.engine.scheduler.has_work)
    assert drafter.steps - left <= 2
    assert server.is_idle()
    server.engine.scheduler.check_integrity()
    assert server.metrics()['foredraft:request_success_total{finished_reason="abort"}'] == 2


def test_many_who_leave_and_some_who_stay(slow):
    server, drafter = slow
    drafter.seconds = 0.001
    expected = server.complete(**LONG)["choices"][0]["text"]
    texts = []
    stayers = [
        threading.Thread(target=lambda: texts.append(server.complete(**LONG)["choices"][0]["text"])) for _ in range(3)
    ]
    for thread in stayers:
        thread.start()
    for i in range(20):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(request(LONG | {"stream": i % 2 == 0}))
            time.sleep(0.01 * (i % 4))
    for thread in stayers:
        thread.join()
    assert texts == [expected] * 3
    assert server.is_idle()
    server.engine.scheduler.check_integrity()


def test_a_stalled_reader_is_let_go():
    limits = replace(RequestLimits(), stall_timeout=0.3)
    settings = ServerSettings(model_names=(NAME,), limits=limits)
    body = LONG | {"prompt": ["a"] * 16, "n": 16, "stream": True, "logprobs": 20, "max_tokens": 60}
    with run_server(
        make_fresh_llm(), settings, WorkerLimits(max_buffered=1 << 12, stall_after=0.3, max_queue=512)
    ) as server:
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.connect(("127.0.0.1", server.port))
            connection.sendall(request(body))
            wait_for(lambda: server.engine.has_work)
            assert server.is_idle(60)
        assert server.metrics()['foredraft:request_success_total{finished_reason="abort"}'] > 0


def test_a_silent_stream_says_that_it_lives():
    with run_server(
        make_fresh_llm().with_drafter(Slow(0.25)), ServerSettings(model_names=(NAME,), keep_alive_seconds=0.1)
    ) as server:
        with httpx.stream(
            "POST", server.url + "/v1/completions", json=LONG | {"max_tokens": 3, "stream": True}
        ) as answer:
            lines = list(answer.iter_lines())
        comments = [line for line in lines if line.startswith(":")]
        assert comments
        assert lines[-2:] == ["data: [DONE]", ""]
        assert all(line.startswith((":", "data: ")) or not line for line in lines)


def test_a_deadline_cuts_a_text_and_says_so():
    with run_server(
        make_fresh_llm().with_drafter(Slow(0.03)), ServerSettings(model_names=(NAME,), request_timeout=0.5)
    ) as server:
        body = server.complete(**LONG)
        choice = body["choices"][0]
        assert choice["finish_reason"] == "abort"
        assert "deadline" in choice["stop_reason"]
        assert 0 < body["usage"]["completion_tokens"] < 240
        chunks = server.chunks("/v1/completions", **LONG)
        assert chunks[-1]["choices"][0]["finish_reason"] == "abort"
    with run_server(make_fresh_llm(), ServerSettings(model_names=(NAME,), request_timeout=1e-6)) as server:
        answer = server.post("/v1/completions", LONG)
        assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")


def test_a_full_queue_is_a_429():
    with run_server(make_fresh_llm().with_drafter(Slow(0.05)), limits=WorkerLimits(max_queue=4)) as server:
        codes: list[tuple[int, str | None]] = []

        def ask() -> None:
            answer = server.post("/v1/completions", LONG | {"n": 4, "max_tokens": 12})
            codes.append((answer.status_code, answer.headers.get("retry-after")))

        threads = [threading.Thread(target=ask) for _ in range(30)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {code for code, _ in codes} == {200, 429}
        assert all(retry is not None and int(retry) >= 1 for code, retry in codes if code == 429)
        assert server.is_idle()
        assert server.complete("a", max_tokens=1)["usage"]["completion_tokens"] == 1
        assert server.post("/v1/completions", LONG | {"n": 5}).status_code == 400  # could never run


def test_a_request_that_fails_alone(slow):
    """NaN logits of one request: a 500 for it alone, without internal details."""
    server, _ = slow
    real = server.engine.target.forward

    def return_nan(window, taps=()):
        logits, features = real(window, taps)
        return logits * float("nan"), features

    server.engine.target.forward = return_nan
    try:
        answer = server.post("/v1/completions", LONG)
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        for secret in ("Traceback", "/", "object at", "Error("):
            assert secret not in answer.text
        chunks = server.chunks("/v1/completions", **LONG)
        assert chunks[-1]["error"]["code"] == 500
    finally:
        server.engine.target.forward = real
    assert server.complete("a", max_tokens=2)["usage"]["completion_tokens"] >= 1
