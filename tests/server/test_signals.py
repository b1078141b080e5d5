"""A server as a process, and every signal it may meet while it streams."""

import contextlib
import json
import signal
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.server.test_lifecycle import BODY, KEY, Process, read_finish_reason, serve, stream

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer " + KEY.encode() + b"\r\n"


@contextlib.contextmanager
def lingering(client: httpx.Client) -> Iterator[list[socket.socket]]:
    """Clients that have sent nothing, half a head, and half a body, and do not leave; the last kind is given."""
    parts = (b"", HEAD, HEAD + b"content-type: application/json\r\ncontent-length: 400\r\n\r\n{")
    with contextlib.ExitStack() as stack:
        made = []
        for part in parts * 5:
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", client.base_url.port), timeout=30))
            sock.sendall(part)
            made.append(sock)
        yield made[2::3]


def clean(server: Process) -> None:
    """It left with code 0 and no word of the inside."""
    assert server.left() == 0
    said = "".join(server.lines)
    for word in (KEY, "canary-prompt", "Traceback", "terminate called"):
        assert word not in said, said


@pytest.mark.parametrize("second", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)])
def test_a_second_signal_of_either_kind_aborts_what_streams(second: signal.Signals) -> None:
    with serve("--drain-timeout", "60") as (server, client):
        lines: list[list[str]] = [[] for _ in range(3)]
        readers = [stream(client, into) for into in lines]
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        server.process.send_signal(second)
        for reader in readers:
            reader.join(60)
        clean(server)
        assert {read_finish_reason(found) for found in lines} == {"abort"}


@pytest.mark.soak
def test_many_signals_at_once_end_it_once() -> None:
    with serve("--drain-timeout", "60") as (server, client):
        lines: list[str] = []
        reader = stream(client, lines)
        for _ in range(20):
            with contextlib.suppress(ProcessLookupError):
                server.process.send_signal(signal.SIGINT)
                server.process.send_signal(signal.SIGTERM)
        reader.join(60)
        clean(server)
        assert read_finish_reason(lines) == "abort"


def test_clients_that_do_not_leave_do_not_keep_a_drained_server() -> None:
    with serve("--drain-timeout", "60") as (server, client), lingering(client) as half:
        lines: list[str] = []
        reader = stream(client, lines)
        server.process.send_signal(signal.SIGTERM)
        reader.join(60)
        began = time.monotonic()
        clean(server)
        assert time.monotonic() - began < 30  # the drain is over: FLUSH_SECONDS, and a busy machine
        assert read_finish_reason(lines) == "length"
        for sock in half:
            assert sock.recv(1000).startswith(b"HTTP/1.1 503 ")


def list_reports(lines: list[str]) -> list[str]:
    """Join the texts of a stream, chunk by chunk."""
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return ["".join(choice["text"] for chunk in chunks for choice in chunk["choices"])]


@pytest.mark.soak
def test_a_server_that_was_stopped_and_continued_goes_on_with_its_streams() -> None:
    with serve() as (server, client):
        whole: list[str] = []
        stream(client, whole).join(60)
        lines: list[str] = []
        reader = stream(client, lines)
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(1)
        server.process.send_signal(signal.SIGCONT)
        reader.join(60)
        assert list_reports(lines) == list_reports(whole)
        assert read_finish_reason(lines) == "length"
        server.process.send_signal(signal.SIGTERM)
        clean(server)


@pytest.mark.soak
def test_a_terminal_that_closes_ends_the_server_and_its_streams() -> None:
    """SIGHUP has its ordinary meaning."""
    with serve() as (server, client):
        with pytest.raises(httpx.RemoteProtocolError):
            hang_up(server, client)
        assert server.left() == -signal.SIGHUP
        assert "Traceback" not in "".join(server.lines)


def hang_up(server: Process, client: httpx.Client) -> None:
    with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
        for _ in answer.iter_lines():
            server.process.send_signal(signal.SIGHUP)
