"""Connections below the requests: two listeners, clients that stop sending, more of them than files, lines of junk."""

import contextlib
import json
import logging
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from foredraft.errors import ForedraftError
from foredraft.server.lifecycle import listen
from tests.server.test_disconnect import LONG, Slow, request, wait_for
from tests.support.server.live_server import RunningServer, make_fresh_llm, run_server

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
SHORT = {"prompt": "the end", "max_tokens": 12, "ignore_eos": True, "temperature": 0}
FILES = 128
UNLOADED = """
import resource
from foredraft.server.lifecycle import ModelServer, listen
from foredraft.server.served_models import ServedModels
from foredraft.server.service import Service
from foredraft.server.settings import ServerSettings
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
sock = listen("127.0.0.1", 0)
print(sock.getsockname()[1], flush=True)
ModelServer(ServedModels.single(Service(ServerSettings()))).run(sockets=[sock])
"""


@pytest.fixture
def slow() -> Iterator[tuple[RunningServer, Slow]]:
    drafter = Slow(0.03)
    with run_server(make_fresh_llm().with_drafter(drafter)) as server:
        yield server, drafter


@contextlib.contextmanager
def half_closed(port: int, data: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        yield connection


def everything(connection: socket.socket) -> bytes:
    found = b""
    while part := connection.recv(1 << 16):
        found += part
    return found


def is_well(connection: socket.socket) -> bool:
    """True if a kept connection answers /health."""
    connection.sendall(HEALTH)
    found = b""
    while not found.endswith(b"}"):
        part = connection.recv(1 << 16)
        if not part:
            return False
        found += part
    return b" 200 OK" in found


def final(answer: bytes) -> bytes:
    """Return the answer after its interim ones."""
    while answer.startswith(b"HTTP/1.1 100 "):
        answer = answer.partition(b"\r\n\r\n")[2]
    return answer


def test_only_one_socket_listens_on_a_port():
    with listen("127.0.0.1", 0) as sock, pytest.raises(ForedraftError, match="give another --port"):
        listen("127.0.0.1", sock.getsockname()[1])


def test_a_client_may_connect_before_the_loop_runs():
    with listen("127.0.0.1", 0) as sock:
        socket.create_connection(sock.getsockname(), timeout=5).close()


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_a_client_that_only_stops_sending_gets_its_answer(slow, version: bytes):
    server, _ = slow
    expected = server.complete(**SHORT)["choices"]
    data = request(SHORT).replace(b"HTTP/1.1", b"HTTP/" + version)
    with half_closed(server.port, data) as connection:
        head, _, body = final(everything(connection)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert json.loads(body)["choices"] == expected


def test_a_client_that_only_stops_sending_gets_its_stream(slow):
    server, _ = slow
    with half_closed(server.port, request(SHORT | {"stream": True})) as connection:
        answer = final(everything(connection))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b'data: {"id"') > 1
    assert b"data: [DONE]\n\n" in answer


def test_all_requests_sent_before_the_end_are_answered(server: RunningServer):
    with half_closed(server.port, HEALTH + HEALTH) as connection:
        assert everything(connection).count(b"HTTP/1.1 200 ") == 2


def test_half_a_request_is_not_waited_for(server: RunningServer):
    for data in (HEALTH[:-4], request(SHORT)[:-4]):
        with half_closed(server.port, data) as connection:
            assert everything(connection) == b""


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_stops_sending_and_then_leaves_ends_its_request(slow, is_stream: bool):
    server, drafter = slow
    with half_closed(server.port, request(LONG | {"stream": is_stream})):
        wait_for(lambda: drafter.steps > 5)
    assert server.is_idle()
    assert drafter.steps < 200
    assert server.metrics()['foredraft:request_success_total{finished_reason="abort"}'] == 1


def test_a_full_room_closes_the_longest_idle(caplog: pytest.LogCaptureFixture):
    with run_server(is_open=False) as server, contextlib.ExitStack() as stack:
        server.server.connection_limit.max_connections = 8
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 20)) for _ in range(40)]
        assert server.get("/health").status_code == 200
        assert len(server.server.server_state.connections) <= 9
        assert idle[0].recv(1) == b""
        assert is_well(idle[-1])
    assert [record.getMessage() for record in caplog.records if "connections are open" in record.getMessage()] == [
        "8 connections are open, the most that the limit on open files allows; the longest idle is closed"
    ]


def test_a_connection_between_two_requests_is_idle():
    with run_server(is_open=False) as server, contextlib.ExitStack() as stack:
        server.server.connection_limit.max_connections = 2
        first = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 20))
        for _ in range(2):
            assert is_well(first)
        others = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 20)) for _ in range(2)]
        assert first.recv(1) == b""
        assert is_well(others[0])


def test_junk_is_logged_once(caplog: pytest.LogCaptureFixture):
    with run_server(is_open=False) as server:  # one that has not warned yet
        for _ in range(30):
            with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
                connection.sendall(b"GET junk\r\n\r\n")
                assert b" 400 " in everything(connection)
    lines = [record.getMessage() for record in caplog.records if "Invalid HTTP" in record.getMessage()]
    assert len(lines) == 1


def test_more_idle_connections_than_files_leave_the_server_well():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 1024), hard), hard))
    command = [sys.executable, "-c", UNLOADED]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            with contextlib.ExitStack() as stack:
                for _ in range(3 * FILES):
                    stack.enter_context(socket.create_connection(("127.0.0.1", port), 20))
                for _ in range(3):
                    with half_closed(port, HEALTH) as connection:
                        assert b" 200 OK" in everything(connection)
                    time.sleep(0.2)
        finally:
            process.terminate()
            _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert len(said.splitlines()) == 1, said
    assert "connections are open" in said


def test_errors_are_never_left_out(caplog: pytest.LogCaptureFixture):
    from foredraft.server.log_throttle import LogThrottle, make_throttled_logger

    log = make_throttled_logger("foredraft.server.test")
    for i in range(3):
        log.error("wrong %d", i)
        log.warning("odd %d", i)
    assert [record.getMessage() for record in caplog.records] == ["wrong 0", "odd 0", "wrong 1", "wrong 2"]
    now = [0.0]
    sparing = LogThrottle(lambda: now[0])

    def said() -> str | None:
        record = logging.LogRecord("x", logging.WARNING, "", 0, "odd %d", (1,), None)
        return record.getMessage() if sparing.filter(record) else None

    assert [said(), said(), said()] == ["odd 1", None, None]
    now[0] = 61.0
    assert said() == "odd 1 (2 more like it before)"
