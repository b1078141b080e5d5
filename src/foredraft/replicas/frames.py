"""Messages between the front and a replica: one HTTP request and its response over one connection.

front -> replica    HEAD (JSON: secret, method, target, headers), BODY; the client has left: the connection is closed
replica -> front    HEAD (JSON: status, headers), BODY ..., END; ABORT instead of END if the response stays incomplete

A frame is one byte for its kind, four for its length, and the payload. HTTP would need a parser at either end, which
costs more than a token of a small model.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from starlette.types import Scope

MAX_FRAME_BYTES = 256 << 20  # bytes; larger than any body that a server accepts or sends
_PREFIX = struct.Struct(">BI")


class FrameKind(IntEnum):
    """First byte of a frame."""

    HEAD = 1
    BODY = 2
    END = 3
    ABORT = 4


class FrameError(ValueError):
    """The bytes are no frames of this protocol."""


@dataclass(frozen=True)
class Frame:
    """One message."""

    kind: FrameKind
    payload: bytes = b""

    def encode(self) -> bytes:
        """Return the bytes of the frame."""
        return _PREFIX.pack(self.kind, len(self.payload)) + self.payload


class FrameSplitter:
    """Splits the bytes of a connection into frames."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that `data` completes. Raises FrameError for bytes of another protocol."""
        self._rest += data
        while len(self._rest) >= _PREFIX.size:
            kind, size = _PREFIX.unpack_from(self._rest)
            if kind not in FrameKind.__members__.values() or size > MAX_FRAME_BYTES:
                raise FrameError("the bytes are no frame")
            end = _PREFIX.size + size
            if len(self._rest) < end:
                return
            payload = bytes(self._rest[_PREFIX.size : end])
            del self._rest[:end]
            yield Frame(FrameKind(kind), payload)


@dataclass(frozen=True)
class RequestHead:
    """Everything of a request but its body."""

    secret: str  # shared by the front and its replicas
    method: str
    path: str
    raw_path: str  # as the client sent it
    query: str
    headers: list[tuple[str, str]]
    client: tuple[str, int] | None

    @classmethod
    def from_scope(cls, scope: Scope, secret: str) -> "RequestHead":
        """Read the head from the ASGI scope of the front."""
        return cls(
            secret,
            scope["method"],
            scope["path"],
            scope["raw_path"].decode("latin-1"),
            scope["query_string"].decode("latin-1"),
            [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]],
            scope.get("client"),
        )

    @classmethod
    def decode(cls, payload: bytes) -> "RequestHead":
        """Read the payload of a HEAD frame. Raises FrameError if a field is missing."""
        try:
            values = json.loads(payload)
            client = None if values["client"] is None else (values["client"][0], values["client"][1])
            headers = [(name, value) for name, value in values["headers"]]
            return cls(**values | {"headers": headers, "client": client})
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise FrameError("the head of a request is incomplete") from error

    def encode(self) -> bytes:
        """Return the payload of a HEAD frame."""
        return json.dumps(vars(self)).encode()

    def build_scope(self, state: dict[str, Any]) -> Scope:
        """Build the ASGI scope of the replica."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.raw_path.encode("latin-1"),
            "query_string": self.query.encode("latin-1"),
            "root_path": "",
            "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self.headers],
            "client": self.client,
            "server": None,
            "state": state,
        }


@dataclass(frozen=True)
class HttpResponseHead:
    """Status and headers of a response."""

    status: int
    headers: list[tuple[bytes, bytes]]

    @classmethod
    def decode(cls, payload: bytes) -> "HttpResponseHead":
        """Read the payload of a HEAD frame. Raises FrameError if a field is missing."""
        try:
            values = json.loads(payload)
            headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in values["headers"]]
            return cls(int(values["status"]), headers)
        except (ValueError, TypeError, KeyError) as error:
            raise FrameError("the head of a response is incomplete") from error

    def encode(self) -> bytes:
        """Return the payload of a HEAD frame."""
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in self.headers]
        return json.dumps({"status": self.status, "headers": headers}).encode()

    @property
    def is_event_stream(self) -> bool:
        """Whether the body is a stream of server-sent events."""
        return any(
            name.lower() == b"content-type" and value.startswith(b"text/event-stream") for name, value in self.headers
        )
