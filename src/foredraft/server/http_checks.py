"""First checks of an HTTP request: Host header, API key, sizes. Pure ASGI, before anything is parsed.

The body is read here, with limits on its size and time, and passed on as a whole.
"""

import asyncio
import base64
import binascii
import hmac
import ipaddress
import re
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.errors import is_panic
from foredraft.server.errors import ApiError, make_unavailable_error, quote_name
from foredraft.server.playground import CONTENT_TYPES, STATIC_FOLDER
from foredraft.server.settings import ServerSettings

PUBLIC_PATHS = frozenset({"/health", "/ready"})  # paths that load balancers read without an API key
ADMIN_PREFIX = "/admin/"  # of the routes that need the admin key instead of the API key
METRICS_PATHS = frozenset({"/metrics", "/version"})  # public as in vLLM, unless ServerSettings.protects_metrics
# The playground's files contain no data of models or users, and the page asks for the API key itself.
PAGE = frozenset({"/", *(f"/static/{path.name}" for path in STATIC_FOLDER.iterdir() if path.suffix in CONTENT_TYPES)})
_LENGTH_PATTERN = re.compile(rb"[0-9]{1,15}")


class HttpCheckMiddleware:
    """ASGI middleware that passes valid requests on and answers all others with a 4xx status."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app, self.limits, self._allowed_hosts = app, settings.limits, settings.allowed_hosts
        self._api_key = None if settings.api_key is None else settings.api_key.encode()
        self._admin_key = None if settings.admin_key is None else settings.admin_key.encode()
        self._public_paths = PUBLIC_PATHS | PAGE if settings.protects_metrics else PUBLIC_PATHS | PAGE | METRICS_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # websockets are not supported
        try:
            self._check_host(scope)
            self._check_key(scope)
            self._check_head(scope)
            body = await self._read_body(scope, receive)
        except ApiError as error:
            # The rest of a refused body is not read, so the connection cannot be reused.
            error.headers.setdefault("Connection", "close")
            await error.make_response(scope["path"])(scope, receive, send)
            return
        if body is None:
            return
        try:
            await self.app(scope, _replay(body, receive), send)
        except BaseException as error:
            if is_panic(error):  # a Rust panic is no Exception: the outer error handler would not catch it
                raise RuntimeError("native code panicked") from error
            raise

    def _check_host(self, scope: Scope) -> None:
        """Refuse unknown Host names, as a defence against DNS rebinding.

        In such an attack a web page's own host name resolves to this machine, and the browser sends that name.
        Addresses cannot be rebound. Clients other than browsers may omit the header.
        """
        header = next((value for name, value in scope["headers"] if name == b"host"), None)
        if self._allowed_hosts is None or header is None or scope["path"] in PUBLIC_PATHS:
            return
        name = _parse_host_name(header.decode("latin-1"))
        is_local = name == "localhost" or name.endswith(".localhost")
        if not (is_local or name in self._allowed_hosts or _is_address(name)):
            raise ApiError(
                403,
                f"this server does not go by the name {quote_name(name)}: without an API key it answers only to "
                "localhost and to addresses; use one of them, or start it with --api-key or --allowed-host NAME",
            )

    def _check_key(self, scope: Scope) -> None:
        is_admin = self._admin_key is not None and scope["path"].startswith(ADMIN_PREFIX)
        key = self._admin_key if is_admin else self._api_key
        if key is None or scope["path"] in self._public_paths:
            return
        if not hmac.compare_digest(read_key(scope["headers"]), key):
            headers = {"WWW-Authenticate": 'Bearer realm="foredraft"'}
            title = "admin" if is_admin else "API"
            raise ApiError(
                401,
                f"the {title} key is missing or wrong; send Authorization: Bearer KEY or x-api-key: KEY",
                headers=headers,
            )

    def _check_head(self, scope: Scope) -> None:
        limits = self.limits
        if len(scope["raw_path"]) + len(scope["query_string"]) > limits.max_target_bytes:
            raise ApiError(414, f"path and query are longer than {limits.max_target_bytes} bytes")
        if sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > limits.max_header_bytes:
            raise ApiError(431, f"the headers are larger than {limits.max_header_bytes} bytes")
        for name, value in scope["headers"]:
            if name == b"content-length":
                if not _LENGTH_PATTERN.fullmatch(value):
                    raise ApiError(400, "Content-Length is not a number")
                if int(value) > limits.max_body_bytes:
                    raise self._make_too_large_error()
            if name == b"content-encoding" and value.lower() != b"identity":
                raise ApiError(415, "compressed bodies are not supported; send it uncompressed")

    def _make_too_large_error(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self.limits.max_body_bytes} bytes")

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes | None:
        """Read the whole body. Returns None if the client left before its end."""
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.limits.body_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > self.limits.max_body_bytes:
                        raise self._make_too_large_error()
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self.limits.body_timeout:g} seconds") from None
        except asyncio.CancelledError:  # the server has drained and does not wait for clients that are still sending
            raise make_unavailable_error("the server is shutting down") from None


def _parse_host_name(host: str) -> str:
    """Remove the port from a Host header."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].strip().rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def read_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Read the API key in an Authorization header: a Bearer token, or the password of Basic authentication.

    Without that header the key is that of x-api-key, which clients of Anthropic's API send.

    Args:
        headers: names in lower case, and values.
    """
    found = dict(reversed([pair for pair in headers if pair[0] in (b"authorization", b"x-api-key")]))
    if b"authorization" not in found:
        return found.get(b"x-api-key", b"").strip()
    header = found[b"authorization"]
    scheme, _, value = header.partition(b" ")
    value = value.strip()
    if scheme.lower() == b"bearer":
        return value
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return b""


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields the body once, then the messages of the connection."""
    is_read = False

    async def receive_again() -> Message:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return receive_again
