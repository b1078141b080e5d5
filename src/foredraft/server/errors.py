"""Error responses in OpenAI's format or that of the route: one sentence, without paths or internals of the server."""

import logging
import re
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from foredraft.server.anthropic_api.error_format import build_error_body, is_anthropic_path

log = logging.getLogger(__name__)
MAX_MESSAGE = 600  # characters of an error message
MAX_NAME = 64  # characters of a client's word in an error message
_PATH_PATTERN = re.compile(r"(?<![\w.])~?/[^\s'\",;:)]+")  # absolute paths, which responses must not reveal
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
    504: "timeout_error",
}
# Prefix of the routes of other kinds of models -> what they are for.
_OTHER_ROUTES = {
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "reranking",
    "/v2/rerank": "reranking",
    "/rerank": "reranking",
    "/v1/score": "scores of text pairs",
    "/score": "scores of text pairs",
    "/pooling": "pooled states",
    "/classify": "classification",
    "/v1/audio": "speech and transcription",
    "/v1/images": "images",
    "/v1/moderations": "moderation",
    "/v1/fine_tuning": "fine-tuning",
    "/v1/conversations": "stored conversations (previous_response_id of v1/responses continues one)",
    "/v1/files": "stored files",
    "/v1/batches": "stored batches (`foredraft batch` answers a file of requests)",
}
_HTTP_MESSAGES = {
    404: "there is no such route",
    405: "this route does not support that method",
}


class ApiError(Exception):
    """Error that ends a request with a status and an error body.

    Args:
        status: HTTP status.
        message: one sentence; paths in it are removed.
        param: field of the request that is at fault.
        headers: further headers of the response.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param = status, param
        self.message = scrub_message(message)
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = _ERROR_TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}

    def build_body(self, path: str) -> dict[str, Any]:
        """Build the body in the format of the route with this path."""
        return build_error_body(self.status, self.message, self.param) if is_anthropic_path(path) else self.body

    def make_response(self, path: str) -> JSONResponse:
        """Make the response of the route with this path."""
        return JSONResponse(self.build_body(path), self.status, self.headers)


def scrub_message(message: str) -> str:
    """Make a message one line of bounded length, without paths."""
    line = "".join(c if c.isprintable() else " " for c in message)
    return _PATH_PATTERN.sub("...", line)[:MAX_MESSAGE]


def quote_name(name: object) -> str:
    """Quote a client's word, shortened to MAX_NAME characters."""
    text = repr(str(name))
    return text if len(text) <= MAX_NAME else text[: MAX_NAME - 4] + "...'"


def make_queue_full_error(seconds: float) -> ApiError:
    """Make the error 429 with `Retry-After` in seconds."""
    return ApiError(429, "the queue is full; try again later", headers={"Retry-After": _format_seconds(seconds)})


def make_unavailable_error(message: str, seconds: float = 5.0) -> ApiError:
    """Make an error 503 with `Retry-After` in seconds."""
    return ApiError(503, message, headers={"Retry-After": _format_seconds(seconds)})


def _format_seconds(seconds: float) -> str:
    return str(max(1, round(seconds)))


async def on_api_error(request: Request, error: Exception) -> JSONResponse:
    """Return the response of an ApiError."""
    assert isinstance(error, ApiError)
    return error.make_response(request.url.path)


async def on_http_error(request: Request, error: Exception) -> JSONResponse:
    """Convert an error of the framework, such as an unknown route or method."""
    assert isinstance(error, HTTPException)
    message = _HTTP_MESSAGES.get(error.status_code, "the request cannot be served")
    if error.status_code == 404:
        message = _explain_missing_route(request.url.path) or message
    return ApiError(error.status_code, message, headers=error.headers).make_response(request.url.path)


def _explain_missing_route(path: str) -> str | None:
    """Return a message for a route of another kind of model, or of stored work; None for any other path."""
    if path.startswith("/v1/responses/"):
        return "responses do not run in the background, and have no such route; stream them instead"
    if path.startswith("/v1/messages/"):
        return "messages have no such route and no stored batches; send each one to v1/messages"
    for prefix, purpose in _OTHER_ROUTES.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            return (
                f"this server generates text and has no {purpose}; its routes are POST v1/completions, "
                "v1/chat/completions, v1/responses and v1/messages"
            )
    return None


async def on_crash(request: Request, error: Exception) -> JSONResponse:
    """Respond with 500 to an unexpected exception; details are only in the log."""
    return ApiError(500, "internal error; the server's log says more").make_response(request.url.path)
