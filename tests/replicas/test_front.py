"""The front: the answers of one server, from whichever replica runs."""

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from foredraft.replicas.affinity import SESSION_HEADER, AffinityKey, AffinityRouter
from foredraft.replicas.frames import Frame, FrameKind, RequestHead
from foredraft.server.errors import make_queue_full_error
from foredraft.server.settings import RequestLimits, ServerSettings
from tests.support.server.live_front import RunningFront, run_front
from tests.support.server.live_server import CHATML, JSON, NAME, PLAIN_HTTP

LONG = {"prompt": "the end", "max_tokens": 200, "ignore_eos": True, "temperature": 0}


def find_session(replica: str) -> dict[str, str]:
    """Return the header of a session that an idle front sends to `replica`."""
    choose = AffinityRouter().choose
    names = map(str, range(100))
    name = next(n for n in names if choose(AffinityKey(session=n), {"a": 0, "b": 0}).replica == replica)
    return {SESSION_HEADER.decode(): name}


BOTH = {name: find_session(name) for name in "ab"}


@pytest.fixture(scope="module")
def front() -> Iterator[RunningFront]:
    with run_front() as front:
        yield front


@pytest.fixture
def slow() -> Iterator[RunningFront]:
    with run_front(step_seconds=0.03) as front:
        yield front


def wait_for(condition, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class Reader(threading.Thread):
    """Reads a stream on a thread."""

    def __init__(self, front: RunningFront, headers: dict[str, str] | None = None, **body) -> None:
        super().__init__(daemon=True)
        self.front, self.headers, self.body = front, headers, LONG | {"stream": True} | body
        self.status, self.lines, self.response_headers = 0, [], {}
        self.start()

    def run(self) -> None:
        url = self.front.url + "/v1/completions"
        with httpx.stream("POST", url, json=self.body, headers=self.headers, **PLAIN_HTTP) as answer:
            self.status, self.response_headers = answer.status_code, answer.headers
            for line in answer.iter_lines():
                self.lines.append(line)

    @property
    def events(self) -> list:
        data = [line.removeprefix("data: ") for line in self.lines if line.startswith("data: ")]
        return [event if event == "[DONE]" else json.loads(event) for event in data]


def test_the_sessions_of_the_tests_have_different_replicas(front: RunningFront):
    for name, headers in BOTH.items():
        before = front.service(name).metrics.finish_counts.total()
        assert front.complete(headers=headers).status_code == 200
        assert front.service(name).metrics.finish_counts.total() == before + 1


def test_both_replicas_give_the_same_text_for_a_seed(front: RunningFront):
    answers = [front.complete(headers=headers, seed=7, max_tokens=20).json() for headers in BOTH.values()]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["choices"] != front.complete(seed=8, max_tokens=20).json()["choices"]


def test_other_routes_are_those_of_a_replica(front: RunningFront):
    assert front.get("/v1/models").json()["data"][0]["id"] == NAME
    assert front.get("/v1/models/none").status_code == 404
    assert front.get("/nowhere").status_code == 404
    assert front.get("/").status_code == 200
    assert front.post("/tokenize", json={"prompt": "the"}).json()["count"] > 0
    assert front.complete(max_tokens=-1).json()["error"]["param"] == "max_tokens"


def test_a_stream_is_the_plain_answer_in_pieces(front: RunningFront):
    reader = Reader(front, max_tokens=12)
    reader.join(60)
    whole = front.complete(**LONG | {"max_tokens": 12}).json()["choices"][0]["text"]
    assert reader.response_headers["content-type"].startswith("text/event-stream")
    assert "".join(event["choices"][0]["text"] for event in reader.events[:-1]) == whole
    assert reader.events[-1] == "[DONE]"


def test_events_arrive_while_the_request_runs(slow: RunningFront):
    reader = Reader(slow)
    wait_for(lambda: len(reader.events) > 3)
    assert slow.front.pool.num_running == 1
    assert reader.is_alive()


def test_a_client_that_leaves_ends_its_request_on_the_replica(slow: RunningFront):
    body = json.dumps(LONG | {"stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    sock = socket.create_connection(("127.0.0.1", slow.port), timeout=30)
    sock.sendall(head.encode() + b"\r\n\r\n" + body)
    while b"data: " not in sock.recv(4096):
        pass
    assert sum(slow.service(name).worker.num_running for name in "ab") == 1
    sock.close()
    wait_for(lambda: not any(slow.service(name).worker.num_running for name in "ab"), 4)
    assert sum(slow.service(name).metrics.finish_counts["abort"] for name in "ab") == 1


def test_state_and_metrics_are_those_of_all(front: RunningFront):
    for path in ("/health", "/ready"):
        answer = front.get(path)
        assert (answer.status_code, answer.json()["replicas"]) == (200, {"a": "ok", "b": "ok"})
    front.complete(headers=BOTH["a"])
    front.complete(headers=BOTH["b"])
    page = front.get("/metrics").text
    for name in "ab":
        assert f'foredraft:e2e_request_latency_seconds_count{{replica="{name}",' in page
        assert f'foredraft:front_requests_running{{replica="{name}"}} 0' in page
    assert "foredraft:replicas 2" in page


def test_streams_of_a_replica_that_stops_end_with_an_error_and_the_others_go_on(slow: RunningFront):
    readers = {name: [Reader(slow, headers, max_tokens=40) for _ in range(3)] for name, headers in BOTH.items()}
    wait_for(lambda: all(reader.events for group in readers.values() for reader in group))
    slow.kill("a")
    for group in readers.values():
        for reader in group:
            reader.join(60)
    for reader in readers["a"]:
        error, done = reader.events[-2:]
        assert (error["error"]["code"], done) == (503, "[DONE]")
        assert "send the request again" in error["error"]["message"]
    for reader in readers["b"]:
        assert reader.events[-2]["choices"][0]["finish_reason"] == "length"
    again = Reader(slow, BOTH["a"], max_tokens=3)
    again.join(60)
    assert again.events[-2]["choices"][0]["finish_reason"] == "length"
    assert slow.get("/ready").json()["replicas"] == {"b": "ok"}
    assert 'front_broken_total{replica="a"} 3' in slow.get("/metrics").text


def test_a_request_without_a_token_so_far_gets_status_503_and_may_be_sent_again(slow: RunningFront):
    answers: list[httpx.Response] = []
    plain = threading.Thread(target=lambda: answers.append(slow.complete(headers=BOTH["a"], **LONG)))
    plain.start()
    wait_for(lambda: slow.service("a").worker.num_running == 1)
    slow.kill("a")
    plain.join(60)
    assert (answers[0].status_code, answers[0].headers["retry-after"]) == (503, "1")
    assert answers[0].json()["error"]["type"] == "service_unavailable"


async def answer_head(scope, receive, send) -> None:
    """Application of a replica that has begun a stream and has no token yet."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    while (await receive())["type"] != "http.disconnect":
        pass


def test_the_head_of_a_stream_waits_for_its_first_bytes(slow: RunningFront):
    """Fault: status 200 was sent before the replica had a token, and no client sends such a request again."""
    slow.replicas["a"]._app = answer_head
    reader = Reader(slow, BOTH["a"])
    wait_for(lambda: slow.replicas["a"]._exchanges)
    time.sleep(0.1)
    slow.kill("a")
    reader.join(60)
    assert (reader.status, reader.response_headers["retry-after"]) == (503, "1")


def test_a_replica_that_does_not_accept_costs_no_request(slow: RunningFront):
    slow.kill("a")
    assert slow.complete(headers=BOTH["a"]).status_code == 200
    slow.kill("b")
    answer = slow.complete()
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert slow.get("/health").status_code == slow.get("/ready").status_code == 503


async def answer_full(scope, receive, send) -> None:
    """Application of a replica whose queue is full."""
    await make_queue_full_error(9).make_response(scope["path"])(scope, receive, send)


def test_a_full_replica_passes_requests_on_and_the_last_refusal_is_passed_on(slow: RunningFront):
    slow.replicas["a"]._app = answer_full
    assert slow.complete(headers=BOTH["a"]).status_code == 200
    assert "a" in slow.front.pool.cards
    slow.replicas["b"]._app = answer_full
    answer = slow.complete(headers=BOTH["a"])
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "9")


def test_a_stored_response_is_on_the_replica_that_made_it(front: RunningFront):
    """Whatever the session says. A refusal of that replica is passed on, and a replica that has gone is a 404."""
    path, bodies = "/v1/responses", {name: {"input": name, "max_output_tokens": 3} for name in "ab"}
    made = {name: front.post(path, json=bodies[name], headers=BOTH[name]).json()["id"] for name in "ab"}
    for name, other in ("ab", "ba"):
        assert front.get(f"{path}/{made[name]}", headers=BOTH[other]).json()["id"] == made[name]
        body = bodies[name] | {"previous_response_id": made[name]}
        assert front.post(path, json=body, headers=BOTH[other]).status_code == 200
    front.service("a").is_stopping = True
    try:
        body = bodies["a"] | {"previous_response_id": made["a"]}
        assert front.post(path, json=body).status_code == 503
        assert front.get(f"{path}/{made['a']}").status_code == 200
    finally:
        front.service("a").is_stopping = False
    assert front.get(f"{path}/resp_r00000000_1").status_code == 404
    deleted = httpx.delete(f"{front.url}{path}/{made['b']}", headers=BOTH["a"], **PLAIN_HTTP)
    assert deleted.json()["deleted"]


async def answer_half(scope, receive, send) -> None:
    """Application of a replica that fails in the middle of a stream."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})


def test_a_stream_that_the_application_leaves_open_has_no_end_and_costs_no_replica(slow: RunningFront):
    """As with one server: the client sees that the end is missing."""
    slow.replicas["a"]._app = answer_half
    with pytest.raises(httpx.RemoteProtocolError):
        slow.complete(headers=BOTH["a"])
    slow.replicas["a"]._app = answer_nothing
    assert slow.complete(headers=BOTH["a"]).status_code == 500
    assert set(slow.front.pool.cards) == {"a", "b"}


async def answer_nothing(scope, receive, send) -> None:
    """Application of a replica that fails before its response."""


def test_a_draining_replica_passes_requests_on(front: RunningFront):
    front.service("a").is_stopping = True
    try:
        assert front.complete(headers=BOTH["a"]).status_code == 200
        assert front.get("/ready").json()["replicas"] == {"a": "unavailable", "b": "ok"}
        assert 'front_rerouted_total{replica="a"} 1' in front.get("/metrics").text
    finally:
        front.service("a").is_stopping = False


def test_nothing_but_the_front_can_talk_to_a_replica(front: RunningFront):
    replica = front.replicas["a"]
    head = RequestHead("guess", "GET", "/v1/models", "/v1/models", "", [], None)
    frames = Frame(FrameKind.HEAD, head.encode()).encode() + Frame(FrameKind.BODY).encode()
    for data in (frames, b"GET /v1/models HTTP/1.1\r\n\r\n"):
        with socket.create_connection((replica.host, replica.port), timeout=30) as sock:
            sock.sendall(data)
            assert sock.recv(100) == b""


def test_key_hosts_and_sizes_are_checked():
    limits = RequestLimits(max_body_bytes=1000)
    settings = ServerSettings(
        model_names=(NAME,), chat_template=CHATML, api_key="key", protects_metrics=True, limits=limits
    )
    with run_front(settings=settings) as front:
        assert front.complete().status_code == 401
        assert front.get("/metrics").status_code == 401
        assert front.get("/health").json()["replicas"] == {"a": "ok", "b": "ok"}
        key = {"authorization": "Bearer key"}
        assert front.complete(headers=key).status_code == 200
        assert 'replica="b"' in front.get("/metrics", headers=key).text
        assert front.post("/v1/completions", content=b" " * 1001, headers=JSON | key).status_code == 413


def test_the_first_signal_lets_streams_end_and_the_second_ends_them():
    with run_front(step_seconds=0.03) as front:
        readers = [Reader(front, max_tokens=20), Reader(front)]
        wait_for(lambda: all(reader.events for reader in readers))
        front.server.handle_exit(signal.SIGTERM, None)
        assert front.get("/ready").status_code == 503
        assert front.complete().status_code == 503
        readers[0].join(60)
        assert readers[0].events[-2]["choices"][0]["finish_reason"] == "length"
        front.server.handle_exit(signal.SIGTERM, None)
        readers[1].join(60)
        assert readers[1].events[-2]["error"]["message"] == "the server is shutting down"
