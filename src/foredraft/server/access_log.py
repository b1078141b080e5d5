"""Access log: one line per request. The path is the only text of a client that it contains."""

import logging
import time
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("foredraft.access")
SERVED_KEY = "foredraft.served"  # key of scope["state"] for the ServedRequest of a route
MAX_PATH_CHARS = 128  # characters of a path that are logged
CLIENT_GONE_STATUS = 499  # logged if the client left before a status was sent


class UsageSource(Protocol):
    """Response that can report its token usage."""

    def build_usage(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class ServedRequest:
    """Id of a generation request, and the source of its token usage."""

    id: str
    source: UsageSource


def record_served(http: Request, name: str, source: UsageSource) -> None:
    """Record the id and usage source of a request for its access-log line."""
    http.scope.setdefault("state", {})[SERVED_KEY] = ServedRequest(name, source)


class AccessLog:
    """ASGI middleware that logs method, path, status, milliseconds, tokens and id at the end of every request."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.monotonic(), CLIENT_GONE_STATUS

        async def send_and_record(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_and_record)
        except Exception:
            status = 500 if status == CLIENT_GONE_STATUS else status  # an outer layer sends this status
            raise
        finally:
            log.info("%s", format_line(scope, status, time.monotonic() - start))


def format_line(scope: Scope, status: int, seconds: float) -> str:
    """Format the line of one request; values that it does not have are dashes."""
    served: ServedRequest | None = scope.get("state", {}).get(SERVED_KEY)
    usage = {} if served is None else served.source.build_usage()
    path = "".join(c if c.isprintable() and not c.isspace() else "?" for c in scope["path"][:MAX_PATH_CHARS])
    return (
        f"method={scope['method']} path={path} status={status} ms={1000 * seconds:.1f} "
        f"prompt_tokens={usage.get('prompt_tokens', '-')} completion_tokens={usage.get('completion_tokens', '-')} "
        f"id={'-' if served is None else served.id}"
    )
