"""The access log: one line for every request, without anything that a client wrote but the path."""

import logging
import time
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("foredraft.access")
SERVED = "foredraft.served"  # in scope["state"]: what a route made of its request
MAX_PATH = 128  # characters
GONE = 499  # the client left before there was a status


class Answer(Protocol):
    """What a route writes for its request."""

    def usage(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Served:
    """A request that generates: its id, and where its figures are."""

    id: str
    answer: Answer


def note_served(http: Request, name: str, answer: Answer) -> None:
    """For the access log, which reads the figures at the end of the request."""
    http.scope.setdefault("state", {})[SERVED] = Served(name, answer)


class AccessLog:
    """Writes method, path, status, milliseconds, tokens and id once a request has ended, however it did."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.monotonic(), GONE

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noted)
        except Exception:
            status = 500 if status == GONE else status  # answered further out
            raise
        finally:
            log.info("%s", line_of(scope, status, time.monotonic() - began))


def line_of(scope: Scope, status: int, seconds: float) -> str:
    """One line; a figure that a request does not have is a dash."""
    served: Served | None = scope.get("state", {}).get(SERVED)
    usage = {} if served is None else served.answer.usage()
    path = "".join(c if c.isprintable() and not c.isspace() else "?" for c in scope["path"][:MAX_PATH])
    return (
        f"method={scope['method']} path={path} status={status} ms={1000 * seconds:.1f} "
        f"prompt_tokens={usage.get('prompt_tokens', '-')} completion_tokens={usage.get('completion_tokens', '-')} "
        f"id={'-' if served is None else served.id}"
    )
