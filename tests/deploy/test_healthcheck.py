"""The health check of the image: status 200 alone is healthy, and no proxy is asked."""

import runpy
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

is_healthy = runpy.run_path(str(Path(__file__).parents[2] / "deploy" / "healthcheck.py"))["is_healthy"]


class Server(HTTPServer):
    status = 200


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.send_response(self.server.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Keep the output of the tests free of requests."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("status", "expected"), [(200, True), (503, False), (302, False)])
def test_the_status_decides(server, status, expected, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    server.status = status
    assert is_healthy(server.server_port) is expected


def test_a_server_that_does_not_listen_is_unhealthy():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        assert is_healthy(sock.getsockname()[1]) is False
