"""Frames: the same however the bytes are cut, and nothing else is taken."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.replicas.frames import Frame, FrameError, FrameKind, FrameSplitter, HttpResponseHead, RequestHead

HEAD = RequestHead("s", "POST", "/v1/ä", "/v1/%C3%A4", "a=1", [("x", "ÿ"), ("x", "2")], ("127.0.0.1", 7))


@given(st.lists(st.builds(Frame, st.sampled_from(FrameKind), st.binary(max_size=40)), max_size=6), st.integers(1, 30))
def test_frames_come_out_as_they_went_in(frames: list[Frame], size: int):
    data = b"".join(frame.encode() for frame in frames)
    splitter = FrameSplitter()
    parts = [data[start : start + size] for start in range(0, len(data), size)]
    assert [frame for part in parts for frame in splitter.feed(part)] == frames


@pytest.mark.parametrize("data", [b"\x00\x00\x00\x00\x00", b"GET / HTTP/1.1", b"\x01\xff\xff\xff\xff"])
def test_other_bytes_are_refused(data: bytes):
    with pytest.raises(FrameError):
        list(FrameSplitter().feed(data))


def test_heads_come_out_as_they_went_in():
    assert RequestHead.decode(HEAD.encode()) == HEAD
    head = HttpResponseHead(200, [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x", b"\xff")])
    assert HttpResponseHead.decode(head.encode()) == head
    assert head.is_event_stream
    assert not HttpResponseHead(200, [(b"content-type", b"application/json")]).is_event_stream


@pytest.mark.parametrize("payload", [b"", b"{}", b"[]", b'{"status": "x", "headers": []}', b'{"headers": 3}'])
def test_an_incomplete_head_is_refused(payload: bytes):
    for kind in (RequestHead, HttpResponseHead):
        with pytest.raises(FrameError):
            kind.decode(payload)


def test_the_scope_is_that_of_the_client():
    scope = RequestHead.from_scope(HEAD.build_scope({}), "s").build_scope({"a": 1})
    assert (scope["path"], scope["raw_path"], scope["query_string"]) == ("/v1/ä", b"/v1/%C3%A4", b"a=1")
    assert scope["headers"] == [(b"x", b"\xff"), (b"x", b"2")]
    assert scope["state"] == {"a": 1}
