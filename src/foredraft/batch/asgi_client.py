"""Requests to an ASGI application in the same process."""

import asyncio
import json
from typing import Any

from starlette.types import ASGIApp, Message


async def post_json(app: ASGIApp, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Send a request to an application, and return the status and the JSON of the response."""
    data = json.dumps(body).encode()
    headers = [
        (b"host", b"localhost"),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(data)).encode()),
    ]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers,
        "client": ("localhost", 0), "server": ("localhost", 80), "state": {},
    }  # fmt: skip
    exchange = _Exchange(data)
    await app(scope, exchange.receive, exchange.send)
    return exchange.status, json.loads(bytes(exchange.content))


class _Exchange:
    """One request and its response."""

    def __init__(self, data: bytes) -> None:
        self.status = 0
        self.content = bytearray()
        self._messages: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive(self) -> Message:
        if self._messages:
            return self._messages.pop()
        await asyncio.Event().wait()  # the client stays until its task is cancelled
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            self.content += message.get("body", b"")
