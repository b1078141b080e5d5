"""Two replicas on a local Ray, one killed in the middle of 200 streams."""

import os
import signal
import time

import httpx
import pytest

from tests.server.test_lifecycle import Process, serve
from tests.support.server.replica_process import Request, find_replica_processes, is_below

NUM_STREAMS, NUM_AT_ONCE = 200, 24
START_SECONDS = 300  # Ray and two models on one core of a loaded machine


def wait_for(condition, seconds: float = START_SECONDS) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


def make_body(number: int) -> dict:
    return {
        "prompt": f"def step_{number}(",
        "seed": number,
        "temperature": 0.8,
        "max_tokens": 24,
        "ignore_eos": True,
    }


def run_streams(client: httpx.Client, server: Process) -> list[Request]:
    """Run the streams, and kill a replica once a third of them has ended and a stream of either replica runs."""
    requests: list[Request] = []
    killed: int | None = None
    while len(requests) < NUM_STREAMS or any(request.is_alive() for request in requests):
        num_alive = sum(request.is_alive() for request in requests)
        if len(requests) < NUM_STREAMS and num_alive < NUM_AT_ONCE:
            requests.append(Request(client, make_body(len(requests))))
            continue
        if killed is None and len(requests) > NUM_STREAMS / 3 and any(r.events and r.is_alive() for r in requests):
            killed = find_replica_processes(server.process.pid)[0]
            os.kill(killed, signal.SIGKILL)
        time.sleep(0.002)
    assert killed is not None
    return requests


def count(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


def test_only_processes_below_the_server_are_killed():
    """Fault: the test would kill a replica of another server on this machine."""
    parents = {9: 8, 8: 5, 7: 1, 5: 1}
    assert is_below(9, 5, parents)
    assert not is_below(7, 5, parents)
    assert not find_replica_processes(os.getpid())


@pytest.mark.timeout(900)
def test_a_killed_replica_breaks_its_own_streams_alone():
    pytest.importorskip("ray.serve", reason="pip install 'foredraft[ray]' to test replicas on Ray")
    with serve("--replicas", "2", "--max-batch", "16", seconds=START_SECONDS) as (server, client):
        wait_for(lambda: len(client.get("/ready").json()["replicas"]) == 2)
        requests = run_streams(client, server)
        broken = [request for request in requests if request.error is not None]
        whole = [request for request in requests if request.error is None]
        assert all(request.is_complete for request in whole)
        assert 1 <= len(broken) <= NUM_AT_ONCE
        assert count(client, "foredraft:front_broken_total") == len(broken)
        for request in broken:
            assert request.error["code"] == 503
            assert "send the request again" in request.error["message"]
            assert request.status == 200 or (request.status == 503 and request.retry_after == "1")

        # A seed gives the same text on the other replica, and what a broken stream had sent is its beginning.
        again = [Request(client, request.body) for request in (*broken, *whole[:8])]
        for request, old in zip(again, (*broken, *whole[:8]), strict=True):
            request.join()
            assert request.is_complete
            assert request.text.startswith(old.text)
            assert old in broken or request.text == old.text

        wait_for(lambda: len(client.get("/ready").json()["replicas"]) == 2)  # Ray has started another
        assert client.get("/health").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.left() == 0
        assert not find_replica_processes(server.process.pid)
