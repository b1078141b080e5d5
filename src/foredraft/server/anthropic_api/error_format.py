"""Errors in Anthropic's format, for its routes only."""

from typing import Any

PREFIX = "/v1/messages"
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_anthropic_path(path: str) -> bool:
    """Return True for the path of a route whose errors have this format."""
    return path == PREFIX or path.startswith(f"{PREFIX}/")


def build_error_body(status: int, message: str, param: str | None) -> dict[str, Any]:
    """Build the body of an error.

    Args:
        status: HTTP status.
        message: one sentence.
        param: field at fault, which the message names if it does not yet. None = there is none.
    """
    text = message if param is None or param in message else f"{param}: {message}"
    return {"type": "error", "error": {"type": _ERROR_TYPES.get(status, "invalid_request_error"), "message": text}}
