"""What a client is told when something is wrong: OpenAI's error body, one sentence, no paths and no internals."""

import logging
import re
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

log = logging.getLogger(__name__)
MAX_MESSAGE, MAX_NAME = 600, 64
_PATH = re.compile(r"(?<![\w.])~?/[^\s'\",;:)]+")  # an absolute path has no business in an answer
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
    504: "timeout_error",
}
_WORDS = {
    404: "there is no such route",
    405: "this route does not take that method",
}


class ApiError(Exception):
    """Ends a request with this status and OpenAI's error body."""

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param = status, param
        self.message = scrubbed(message)
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def scrubbed(message: str) -> str:
    """One line without paths, of bounded length."""
    line = "".join(c if c.isprintable() else " " for c in message)
    return _PATH.sub("...", line)[:MAX_MESSAGE]


def shown(name: object) -> str:
    """A client's own word, short enough to repeat."""
    text = repr(str(name))
    return text if len(text) <= MAX_NAME else text[: MAX_NAME - 4] + "...'"


def too_busy(seconds: float) -> ApiError:
    return ApiError(429, "the queue is full; try again later", headers={"Retry-After": _seconds(seconds)})


def unavailable(why: str, seconds: float = 5.0) -> ApiError:
    return ApiError(503, why, headers={"Retry-After": _seconds(seconds)})


def _seconds(seconds: float) -> str:
    return str(max(1, round(seconds)))


async def on_api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return error.response


async def on_http_error(request: Request, error: Exception) -> JSONResponse:
    """What the framework refuses by itself: a route or method that is not there."""
    assert isinstance(error, HTTPException)
    words = _WORDS.get(error.status_code, "the request cannot be served")
    return ApiError(error.status_code, words, headers=error.headers).response


async def on_crash(request: Request, error: Exception) -> JSONResponse:
    """Our bug: the log has it, the client learns nothing of it."""
    return ApiError(500, "internal error; the server's log says more").response
