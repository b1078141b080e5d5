"""Limits, each at its value and one beyond, and bodies that are no valid JSON."""

import json
import re
import socket
from dataclasses import replace

import pytest

from foredraft.sampling.json_depth import measure_depth
from foredraft.server.errors import ApiError
from foredraft.server.json_body import parse
from foredraft.server.settings import RequestLimits, ServerSettings
from tests.support.server.live_server import NAME, RunningServer, make_fresh_llm, run_server

PATH = "/v1/completions"
LIMITS = RequestLimits()


def complete(server: RunningServer, **body) -> int:
    return server.post(PATH, {"prompt": "a", "max_tokens": 1} | body).status_code


@pytest.mark.parametrize(
    ("name", "at", "beyond"),
    [
        ("n", 16, 17),
        ("logprobs", 20, 21),
        ("prompt_logprobs", 20, 21),
        ("stop", list("abcd"), list("abcde")),
        ("stop", "x" * 1024, "x" * 1025),
        ("logit_bias", {str(i): 1 for i in range(300)}, {str(i): 1 for i in range(301)}),
        ("bad_words", ["zz"] * 300, ["zz"] * 301),
        ("stop_token_ids", [7] * 4096, [7] * 4097),
        ("allowed_token_ids", [7] * 4096, [7] * 4097),
        ("prompt", ["a"] * 64, ["a"] * 65),
        ("prompt", [[9]] * 64, [[9]] * 65),
    ],
)
def test_at_the_limit_and_one_beyond(server: RunningServer, name: str, at: object, beyond: object):
    assert complete(server, **{name: at}) == 200
    answer = server.post(PATH, {"prompt": "a", "max_tokens": 1, name: beyond})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name


def test_prompts_times_samples(server: RunningServer):
    assert complete(server, prompt=["a"] * 16, n=16) == 200
    assert complete(server, prompt=["a"] * 17, n=16) == 400


def test_top_logprobs(server: RunningServer):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "logprobs": True}
    assert server.post("/v1/chat/completions", body | {"top_logprobs": 20}).status_code == 200
    assert server.post("/v1/chat/completions", body | {"top_logprobs": 21}).status_code == 400


def test_the_size_of_a_schema(server: RunningServer):
    def post_schema(size: int) -> int:
        schema = {"type": "object", "description": ""}
        body = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        schema["description"] = "x" * (size - len(json.dumps(body)))
        return complete(server, response_format=body)

    assert post_schema(LIMITS.max_schema_bytes) == 200
    assert post_schema(LIMITS.max_schema_bytes + 1) == 400


def test_the_size_of_a_body(server: RunningServer):
    def of(size: int) -> bytes:
        body = b'{"prompt": "a", "max_tokens": 1, "user": "' + b'"}'
        return body[:-2] + b"x" * (size - len(body)) + body[-2:]

    assert server.post_raw(PATH, of(LIMITS.max_body_bytes)).status_code == 200
    answer = server.post_raw(PATH, of(LIMITS.max_body_bytes + 1))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, 413)


def test_a_body_of_unknown_length(server: RunningServer):
    """Chunked: the size is known only when too much of it has come."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += b"Transfer-Encoding: chunked\r\n\r\n"
    assert b" 413 " in said(server, head + (b"10000\r\n" + b"x" * 0x10000 + b"\r\n") * 33)


def test_headers_and_request_line(server: RunningServer):
    def headers(size: int) -> int:
        return server.get("/v1/models", headers={"x-long": "x" * size}).status_code

    assert headers(LIMITS.max_header_bytes - 1000) == 200
    assert headers(LIMITS.max_header_bytes + 1) == 431
    assert server.get("/v1/models?x=" + "x" * (LIMITS.max_target_bytes - 100)).status_code == 200
    assert server.get("/v1/models?x=" + "x" * LIMITS.max_target_bytes).status_code == 414
    assert b" 400 " in said(server, b"GET /v1/models HTTP/1.1\r\nx: " + b"x" * (1 << 20) + b"\r\n\r\n")
    assert b" 400 " in said(server, b"nonsense\r\n\r\n")


def test_the_depth_of_json(server: RunningServer):
    def nest_lists(depth: int) -> bytes:
        return b'{"prompt": "a", "x": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"

    at, beyond = server.post_raw(PATH, nest_lists(64)), server.post_raw(PATH, nest_lists(65))
    assert "'x'" in at.json()["error"]["message"]
    assert "nested deeper than 64" in beyond.json()["error"]["message"]
    assert server.post_raw(PATH, nest_lists(300_000)).status_code == 400


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b"{", "not JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"prompt": [1' + b",1" * 200_001 + b"]}", "200000 values"),
        (b'{"prompt": ["' + b'","' * 100_001 + b'"]}', "200000 values"),
        (b'{"a": {"x":1' + b"".join(b',"%d":1' % i for i in range(4096)) + b"}}", "4096 keys"),
        (b'{"messages": [{"role": "user", "content": [{}' + b",{}" * 90_000 + b"]}]}", "is missing"),
        (b'{"prompt": "' + b'\\"' * 90_000, "not JSON"),
        (b"null", "must be a JSON object"),
        (b'"a"', "must be a JSON object"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN"),
        (b'{"prompt": "a", "temperature": -Infinity}', "Infinity"),
        (b'{"prompt": "a", "temperature": 1e999}', "too large"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "digits"),
        (b'{"prompt": "a", "prompt": "b"}', "twice"),
        (b'{"prompt": "a", "stream_options": {"x": 1, "x": 1}}', "twice"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "\\u0000"}', "NUL"),
        (b'{"prompt": "\x00"}', "not JSON"),
        (b'{"\\udfff": 1}', "surrogate"),
        (b"{'prompt': 'a'}", "not JSON"),
        (b'{"prompt": "a"} x', "not JSON"),
        (b'\xef\xbb\xbf{"prompt": "a"}', "not JSON"),
    ],
)
def test_what_is_no_json_of_ours(server: RunningServer, body: bytes, words: str):
    answer = server.post_raw(PATH, body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_escapes_that_are_fine():
    assert parse(b'{"a": "\\ud83c\\udf63 \\"[[[\\\\"}', 2) == {"a": '\U0001f363 "[[[\\'}


def test_escaped_quotes_are_characters_of_one_value():
    text = '"\\' * 250_000
    assert parse(json.dumps({"prompt": text}).encode(), 2) == {"prompt": text}


def test_brackets_and_numbers_are_found_behind_any_run_of_escapes():
    for length in range(9):
        text = "\\" * length
        inside, outside = f'{text}"[[[{"1" * 99}', [[]]
        body = json.dumps({"a": inside, "b": outside}).encode()
        assert parse(body, 3) == {"a": inside, "b": outside}
        with pytest.raises(ApiError, match="nested deeper than 2"):
            parse(body, 2)
        with pytest.raises(ApiError, match="64 digits"):
            parse(body[:-1] + b', "c": ' + b"1" * 65 + b"}", 3)


@pytest.mark.parametrize("number", ["1e999", "1E+999", "-12.5e400"])
def test_a_number_beyond_the_largest_is_refused_wherever_it_stands(number: str):
    with pytest.raises(ApiError, match="too large"):
        parse(f'{{"a": "\\"", "b": [{number}]}}'.encode(), 3)


@pytest.mark.parametrize(
    ("text", "depth"),
    [(b"{}", 1), (b'{"[[[": "]["}', 1), (b'{"a": [[{}], []]}', 4), (b'{"\\"": ["\\\\"]}', 2), (b"1", 0)],
)
def test_depth(text: bytes, depth: int):
    assert measure_depth(re.sub(rb'"(?:[^"\\\\]|\\\\.)*"', b"", text)) == depth
    with pytest.raises(ApiError, match=r"nested|object"):
        parse(text, depth - 1)


def test_slow_clients_are_let_go():
    limits = replace(LIMITS, header_timeout=0.3, body_timeout=0.3)
    with run_server(make_fresh_llm(), ServerSettings(model_names=(NAME,), limits=limits)) as server:
        assert said(server, b"GET /v1/models HTTP/1.1\r\nHost:") == b""
        half = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        )
        assert b" 408 " in said(server, half)
        whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        assert said(server, whole + b"GET /hea").count(b"200 OK") == 1  # then the rest never comes
        assert server.complete("a", max_tokens=64)["usage"]["completion_tokens"] > 0


def said(server: RunningServer, request: bytes) -> bytes:
    """Everything the server answers until it closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        found = b""
        try:
            connection.sendall(request)
            while part := connection.recv(1 << 16):
                found += part
        except (ConnectionResetError, BrokenPipeError):
            pass
        return found
