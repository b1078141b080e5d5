"""The client of a target's server: patience while it does not answer, and its refusals in one line."""

import io
import urllib.error
import urllib.request

import pytest

from foredraft.errors import ForedraftError
from foredraft.train.remote.client import RETRY_SECONDS, TargetClient, check_url
from foredraft.train.remote.wire import decode_traces

URL = "http://server:1"


def answer(monkeypatch, *outcomes):
    """Replace the network by outcomes in turn: bytes, or an exception. Returns the requests."""
    requests, left = [], list(outcomes)

    def open_url(request, timeout):
        requests.append(request)
        outcome = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(outcome, Exception):
            raise outcome
        return io.BytesIO(outcome)

    monkeypatch.setattr(urllib.request, "urlopen", open_url)
    return requests


def make_error(status, body=b'{"error": {"message": "why"}}'):
    return urllib.error.HTTPError(URL, status, "", {}, io.BytesIO(body))


def test_a_server_that_loads_is_waited_for(monkeypatch):
    waits = []
    requests = answer(monkeypatch, urllib.error.URLError("refused"), make_error(503), b'{"a": 1}')
    assert TargetClient(URL, "key", waits.append).get_json("/x") == {"a": 1}
    assert waits == list(RETRY_SECONDS[:2])
    assert {request.headers["Authorization"] for request in requests} == {"Bearer key"}


def test_a_server_that_never_answers_is_named_with_the_way_on(monkeypatch):
    waits = []
    answer(monkeypatch, ConnectionResetError("reset"))
    with pytest.raises(ForedraftError, match=r"http://server:1 does not answer \(reset\).*the same command goes on"):
        TargetClient(URL, None, waits.append).get_json("/x")
    assert waits == list(RETRY_SECONDS)


@pytest.mark.parametrize(("body", "reason"), [(b'{"error": {"message": "why"}}', "why"), (b"<html>\nx", "<html>")])
def test_a_refusal_is_not_repeated(monkeypatch, body, reason):
    requests = answer(monkeypatch, make_error(401, body))
    with pytest.raises(ForedraftError, match=f"refused the request .status 401: {reason}"):
        TargetClient(URL, None, pytest.fail).get_json("/x")
    assert len(requests) == 1


def test_only_web_addresses_are_taken():
    check_url("https://host/prefix")
    with pytest.raises(ForedraftError, match="takes an address"):
        check_url("file:///etc/passwd")


def test_bytes_of_another_server_are_no_traces():
    with pytest.raises(ForedraftError, match="sent no traces"):
        decode_traces(b"<html>")
