"""How hostile requests are written, sent, and what their answers must be like."""

import json
import re
import select
import socket
import time
from dataclasses import dataclass, field
from typing import Any

CANARY = "canaryprompt5f1e"
CHUNK = 1 << 16
_INTERNALS = re.compile(r"Traceback|/\w+/\w+|\.py\b|0x[0-9a-f]{6}|object at|<class|pydantic|starlette|foredraft\.")

_MESSAGES_PATTERN = re.compile(rb"\w+ /v1/messages[/? ]")


@dataclass(frozen=True)
class HostileRequest:
    """`fields`: what the answer must name, one of them; `may_pass`: an odd request that need not be refused;
    `may_close`: the HTTP layer may end the connection without a word, or without an error body."""

    name: str
    data: bytes = field(repr=False)
    fields: tuple[str, ...] = ()
    may_pass: bool = False
    may_close: bool = False


@dataclass(frozen=True)
class WireAnswer:
    """`status` 0: the connection was closed without one. `seconds` from the first byte sent."""

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float

    @property
    def is_cut(self) -> bool:
        """True if the body is incomplete: a server that closes before it has read the request may lose its answer."""
        return len(self.body) < int(self.headers.get("content-length", 0))

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]


def find_fault(asked: HostileRequest, answer: WireAnswer, secret: str = CANARY) -> str | None:
    """Find the fault of the answer to a hostile request; None if there is none."""
    if answer.status == 0:
        return None if asked.may_close else "closed without an answer"
    if answer.status == 200 and asked.may_pass:
        return None
    if not 400 <= answer.status < 500:
        return f"answered {answer.status}"
    if secret in answer.body.decode(errors="replace"):
        return "the answer repeats what must stay secret"
    if asked.may_close and answer.is_cut:
        return None
    if asked.may_close and not answer.headers.get("content-type", "").startswith("application/json"):
        return None if len(answer.body) < 200 else "an answer of the HTTP layer that says too much"
    return None if asked.data.startswith(b"HEAD") else _find_body_fault(asked, answer)


def _find_body_fault(asked: HostileRequest, answer: WireAnswer) -> str | None:
    try:
        error = answer.error
        has_shape = _check_shape(asked, answer)
    except (ValueError, KeyError, TypeError):
        has_shape = False
    if not has_shape:
        return "the answer is no error of its route's shape"
    shown = [word for word in _INTERNALS.findall(error["message"]) if word.encode() not in asked.data]
    if not error["message"] or shown:
        return "the message shows what is inside"
    if asked.fields and not any(name in f"{error.get('param')} {error['message']}" for name in asked.fields):
        return "the field is not named"
    return None


def _check_shape(asked: HostileRequest, answer: WireAnswer) -> bool:
    """Return True for an error of OpenAI's shape, or of Anthropic's on the routes of its API."""
    if _MESSAGES_PATTERN.match(asked.data):
        body = json.loads(answer.body)
        return set(body) == {"type", "error"} and body["type"] == "error" and set(body["error"]) == {"type", "message"}
    return set(answer.error) == {"message", "type", "param", "code"} and answer.error["code"] == answer.status


def post(path: str, body: Any, content_type: bytes = b"application/json", **headers: bytes) -> bytes:
    """Build a whole request; `body` is encoded as JSON unless it is bytes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = {"host": b"x", "content-type": content_type, "content-length": str(len(content)).encode()} | headers
    return f"POST {path} HTTP/1.1\r\n".encode() + _head(head) + content


def get(target: str, method: str = "GET", **headers: bytes) -> bytes:
    return f"{method} {target} HTTP/1.1\r\n".encode() + _head({"host": b"x"} | headers)


def post_chunked(path: str, chunks: list[bytes], end: bytes = b"0\r\n\r\n") -> bytes:
    head = {"host": b"x", "content-type": b"application/json", "transfer-encoding": b"chunked"}
    body = b"".join(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n" for chunk in chunks)
    return f"POST {path} HTTP/1.1\r\n".encode() + _head(head) + body + end


def _head(headers: dict[str, bytes]) -> bytes:
    return b"".join(name.encode() + b": " + value + b"\r\n" for name, value in headers.items()) + b"\r\n"


def exchange(port: int, data: bytes, timeout: float = 30) -> WireAnswer:
    """Send all of it, reading meanwhile; until the first answer is whole or the connection is closed."""
    began, sent, found = time.monotonic(), 0, bytearray()
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as sock:
        sock.setblocking(False)
        try:
            while not is_whole(found):
                writers = [sock] if sent < len(data) else []
                ready, free, _ = select.select([sock], writers, [], max(0.0, began + timeout - time.monotonic()))
                assert ready or free, f"no answer within {timeout} seconds"
                if free:
                    sent += sock.send(data[sent : sent + CHUNK])
                if ready:
                    part = sock.recv(CHUNK)
                    if not part:
                        break
                    found += part
        except (ConnectionResetError, BrokenPipeError):
            pass
    return _read(bytes(found), time.monotonic() - began)


def is_whole(found: bytes | bytearray) -> bool:
    head, gap, body = bytes(found).partition(b"\r\n\r\n")
    if not gap:
        return False
    length = next((line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), None)
    return length is not None and len(body) >= int(length)


def _read(found: bytes, seconds: float) -> WireAnswer:
    head, _, body = found.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 "):
        return WireAnswer(0, {}, found, seconds)
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return WireAnswer(int(first.split()[1]), headers, body[: int(headers.get("content-length", len(body)))], seconds)
