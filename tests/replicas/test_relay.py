"""End of a stream whose replica has gone."""

import asyncio
import json
from typing import Any

import pytest

from foredraft.replicas.directory import ReplicaCard
from foredraft.replicas.frames import RequestHead
from foredraft.replicas.relay import Relay


@pytest.mark.parametrize(
    ("path", "start", "end"),
    [("/v1/completions", "data: ", "data: [DONE]"), ("/v1/messages", "event: error\ndata: ", "")],
)
def test_a_stream_ends_with_an_error_of_its_route(path: str, start: str, end: str):
    """Fault: a client of /v1/messages got OpenAI's error and [DONE], which it cannot read."""
    relay = Relay(ReplicaCard("a", "127.0.0.1", 1, 0), RequestHead("", "POST", path, path, "", [], None), b"")
    relay.has_started = True
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(relay.end("the replica stopped", {"type": "http", "path": path}, send))
    event, *rest = sent[0]["body"].decode().rstrip("\n").split("\n\n")
    assert event.startswith(start)
    error = json.loads(event.removeprefix(start))
    assert "the replica stopped" in error["error"]["message"]
    assert ("type" in error, "".join(rest)) == (path == "/v1/messages", end)
