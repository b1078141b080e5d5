"""Clients that speak HTTP badly, slowly, all at once, or better than most do.

What is refused is in `hostile_corpus.py`; here are exchanges of more than one request, and of more than one client.
"""

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from foredraft.server.settings import RequestLimits, ServerSettings
from tests.server.test_hostile import assert_unharmed
from tests.support.server.hostile_corpus import CHAT, COMPLETE
from tests.support.server.hostile_wire import exchange, get, post, post_chunked
from tests.support.server.live_server import NAME, RunningServer, make_fresh_llm, run_server

GOOD: dict[str, Any] = {"prompt": "the end", "max_tokens": 12, "ignore_eos": True, "temperature": 0}
STREAM = GOOD | {"stream": True, "max_tokens": 200}


@contextlib.contextmanager
def connect(server: RunningServer, data: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
        sock.sendall(data)
        yield sock


def answers(sock: socket.socket, count: int) -> list[tuple[int, bytes]]:
    """Read (status, body) of answers with a length header; fewer if the connection ends."""
    found, data = [], b""
    while len(found) < count:
        head, gap, rest = data.partition(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        size = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
        if gap and len(rest) >= size:
            found.append((int(head[9:12]), rest[:size]))
            data = rest[size:]
            continue
        part = sock.recv(1 << 16)
        if not part:
            break
        data += part
    return found


def everything(sock: socket.socket) -> bytes:
    """Until the connection is closed."""
    found = b""
    with contextlib.suppress(OSError):
        while part := sock.recv(1 << 16):
            found += part
    return found


def text_of(body: bytes) -> str:
    return json.loads(body)["choices"][0]["text"]


def test_requests_in_one_packet_are_answered_in_their_order(server: RunningServer) -> None:
    prompts = ["the end", "def", "a", "the end", "der"]
    wanted = [server.complete(**GOOD | {"prompt": prompt})["choices"][0]["text"] for prompt in prompts]
    packet = b"".join(post(COMPLETE, GOOD | {"prompt": prompt}) for prompt in prompts)
    with connect(server, packet) as sock:
        found = answers(sock, len(prompts))
    assert [text_of(body) for _, body in found] == wanted


def test_a_bad_request_between_good_ones_spoils_neither_side_of_it(server: RunningServer) -> None:
    good = post(COMPLETE, GOOD)
    bad = post(COMPLETE, GOOD | {"x": 1})
    with connect(server, good + bad + good) as sock:
        found = answers(sock, 3)
    assert [status for status, _ in found] == [200, 400, 200]
    assert text_of(found[0][1]) == text_of(found[2][1])


def test_junk_after_a_request_ends_the_connection_and_not_the_answer(server: RunningServer) -> None:
    good = post(COMPLETE, GOOD)
    with connect(server, good + b"\0\0\0junk\r\n\r\n" + good) as sock:
        found = everything(sock)
    assert found.startswith(b"HTTP/1.1 200 ")
    assert found.count(b"HTTP/1.1 200 ") == 1
    assert server.complete(**GOOD)["choices"][0]["text"].encode() in found


def test_a_client_that_leaves_takes_all_it_had_sent_with_it(server: RunningServer) -> None:
    """A stream and twenty requests behind it in the same packet."""
    with connect(server, post(COMPLETE, STREAM) + post(COMPLETE, STREAM) * 20) as sock:
        assert sock.recv(100)
    assert_unharmed(server)


CHUNKS = json.dumps(GOOD).encode()
SPELT: dict[str, bytes] = {
    "bytes": post_chunked(COMPLETE, [bytes([byte]) for byte in CHUNKS]),
    "an extension": post_chunked(COMPLETE, []).removesuffix(b"0\r\n\r\n")
    + b'%x;a="b;c";d\r\n%s\r\n0;last\r\n\r\n' % (len(CHUNKS), CHUNKS),
    "zeros before a size": post_chunked(COMPLETE, []).removesuffix(b"0\r\n\r\n")
    + b"0000%X\r\n%s\r\n000\r\n\r\n" % (len(CHUNKS), CHUNKS),
    "a trailer": post_chunked(COMPLETE, [CHUNKS], b"0\r\nx: y\r\nauthorization: Bearer z\r\n\r\n"),
}
JUNK: dict[str, bytes] = {
    "a size beyond 64 bits": b"f" * 17 + b"\r\n",
    "a size with a sign": b"+5\r\nhello\r\n0\r\n\r\n",
    "a size with a space": b" 5\r\nhello\r\n0\r\n\r\n",
    "a size in hexadecimal notation": b"0x5\r\nhello\r\n0\r\n\r\n",
    "no size": b"\r\n\r\n",
    "no line end after data": b"2\r\n{}0\r\n\r\n",
    "a bare line feed": b"2\n{}\n0\n\n",
    "an endless extension": b"2;" + b"x" * 200_000,
    "a trailer of a megabyte": b"0\r\nx: " + b"y" * (1 << 20) + b"\r\n\r\n",
    "invalid UTF-8 as size": b"\xff\xfe\r\n",
}


@pytest.mark.parametrize("how", SPELT)
def test_every_right_way_to_send_chunks_is_read(server: RunningServer, how: str) -> None:
    answer = exchange(server.port, SPELT[how])
    assert (answer.status, text_of(answer.body)) == (200, server.complete(**GOOD)["choices"][0]["text"])


@pytest.mark.parametrize("how", JUNK)
def test_chunks_that_are_none_end_the_connection(server: RunningServer, how: str) -> None:
    """Refused or closed, and nothing after it on the same connection is a request."""
    data = post_chunked(COMPLETE, [], b"") + JUNK[how] + get("/v1/models")
    with connect(server) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        found = everything(sock)
    assert b'"object":"list"' not in found.replace(b" ", b"")
    assert not found or b" 400 " in found.split(b"\r\n", 1)[0]
    assert_unharmed(server)


def test_a_client_that_waits_to_be_asked_for_its_body_is_asked(server: RunningServer) -> None:
    content = json.dumps(GOOD).encode()
    whole = post(COMPLETE, content, expect=b"100-continue")
    with connect(server, whole[: -len(content)]) as sock:
        assert sock.recv(1000).startswith(b"HTTP/1.1 100 ")
        sock.sendall(content)
        assert answers(sock, 1)[0][0] == 200


def test_odd_but_right_requests_are_answered(server: RunningServer) -> None:
    odd = {
        "HTTP/1.0": b"GET /health HTTP/1.0\r\n\r\n",
        "an upgrade that is declined": get("/health", upgrade=b"h2c", connection=b"Upgrade, HTTP2-Settings"),
        "header values that are no UTF-8": get("/health", **{"x-name": b"\xff\xfe\xed\xa0\x80"}),
        "a type with a parameter": post(COMPLETE, GOOD, b"Application/JSON ; charset=utf-8"),
    }
    for name, data in odd.items():
        assert exchange(server.port, data).status == 200, name


@pytest.mark.parametrize("is_list", [True, False])
@pytest.mark.parametrize("depth", [1, 10, 60, 63, 64, 65, 500, 5000])
def test_depth_in_any_field_is_a_400(server: RunningServer, depth: int, is_list: bool) -> None:
    """Up to the limit the field's own check refuses it, beyond it the depth: never a 500."""
    spelt = (b"[" if is_list else b'{"a":') * depth + b"1" + (b"]" if is_list else b"}") * depth
    for path, name in (
        (COMPLETE, "logit_bias"), (COMPLETE, "stop"), (COMPLETE, "response_format"), (COMPLETE, "prediction"),
        (COMPLETE, "structured_outputs"), (CHAT, "messages"), (COMPLETE, "user"), ("/tokenize", "prompt"),
    ):  # fmt: skip
        answer = exchange(server.port, post(path, b'{"prompt": "a", "%s": %s}' % (name.encode(), spelt)))
        assert answer.status == 400, (path, name, answer.body[:200])
        assert set(answer.error) == {"message", "type", "param", "code"}


def test_bodies_that_drip_are_cut_off_and_delay_no_request() -> None:
    limits = replace(RequestLimits(), body_timeout=0.6)
    whole = post(COMPLETE, GOOD)
    head = whole.index(b"\r\n\r\n") + 4
    with (
        run_server(make_fresh_llm(), ServerSettings(model_names=(NAME,), limits=limits)) as server,
        contextlib.ExitStack() as stack,
    ):
        wanted = server.complete(**GOOD)["choices"][0]["text"]
        slow = [stack.enter_context(connect(server, whole[: head + 1])) for _ in range(40)]
        for i in range(15):
            for sock in slow:
                with contextlib.suppress(OSError):
                    sock.sendall(whole[head + 1 + i : head + 2 + i])
            assert server.complete(**GOOD)["choices"][0]["text"] == wanted
        for sock in slow:
            [(status, body)] = answers(sock, 1)
            assert (status, json.loads(body)["error"]["code"]) == (408, 408)
        assert_unharmed(server)


class Crowd:
    """Clients of every bad kind at once, each in a separate thread, until the block ends."""

    def __init__(self, server: RunningServer, count: int) -> None:
        self.server, self._is_over = server, threading.Event()
        self.rounds = 0
        self._threads = [threading.Thread(target=self._work, args=(seed,)) for seed in range(count)]

    def _work(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._is_over.is_set():
            with contextlib.suppress(OSError):
                self._misbehave(rng)
            self.rounds += 1

    def _misbehave(self, rng: random.Random) -> None:
        body = post(COMPLETE, STREAM | {"n": rng.choice((1, 3))})
        cut = rng.choice((0, 5, 60, len(body) - 1, len(body), len(body), len(body)))
        with connect(self.server, body[:cut]) as sock:
            sock.settimeout(0.05)
            what = rng.randrange(4)
            if what == 0:
                sock.shutdown(socket.SHUT_WR)
            if what == 1:
                sock.sendall(bytes(rng.randrange(256) for _ in range(300)) + b"\r\n\r\n")
            if what == 2:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            for _ in range(rng.randrange(3)):
                sock.recv(rng.choice((1, 500)))
            self._is_over.wait(rng.random() * 0.05)

    def __enter__(self) -> "Crowd":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(60)


def test_a_crowd_of_bad_clients_changes_no_other_text() -> None:
    limits = replace(RequestLimits(), header_timeout=1.0, body_timeout=1.0)
    with (
        run_server(make_fresh_llm(), ServerSettings(model_names=(NAME,), limits=limits)) as server,
        contextlib.ExitStack() as stack,
    ):
        idle = [stack.enter_context(connect(server)) for _ in range(100)]
        kinds = [GOOD, GOOD | {"temperature": 1.0, "seed": 7, "n": 2}]
        wanted = [[choice["text"] for choice in server.complete(**kind)["choices"]] for kind in kinds]
        with Crowd(server, 8) as crowd:
            end = time.monotonic() + 2
            while time.monotonic() < end or crowd.rounds < 40:
                for kind, texts in zip(kinds, wanted, strict=True):
                    assert [choice["text"] for choice in server.complete(**kind)["choices"]] == texts
        assert_unharmed(server)
        for sock in idle:  # let go after the time that headers may take
            sock.settimeout(20)
            assert sock.recv(1) == b""
        end = time.monotonic() + 20
        while server.server.server_state.connections and time.monotonic() < end:
            time.sleep(0.02)
        assert not server.server.server_state.connections
