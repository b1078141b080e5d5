"""The first thing a request meets: key, sizes, time. Pure ASGI; nothing is parsed before this has passed.

The body is read here, bounded in size and time, and handed on whole.
"""

import asyncio
import base64
import binascii
import hmac
import ipaddress
import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.errors import is_panic
from foredraft.server.errors import ApiError, shown, unavailable
from foredraft.server.playground import FOLDER, TYPES
from foredraft.server.settings import Settings

OPEN = frozenset({"/health", "/ready"})  # what a load balancer asks without a key
FIGURES = frozenset({"/metrics", "/version"})  # open too, as vLLM's are, unless the settings protect them
# The playground's files hold nothing of a model or a user, and the page asks for the key itself.
PAGE = frozenset({"/", *(f"/static/{path.name}" for path in FOLDER.iterdir() if path.suffix in TYPES)})
_LENGTH = re.compile(rb"[0-9]{1,15}")


class Gate:
    """Lets through what is allowed to come in; everything else gets its 4xx here."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app, self.limits, self._hosts = app, settings.limits, settings.allowed_hosts
        self._key = None if settings.api_key is None else settings.api_key.encode()
        self._open = OPEN | PAGE if settings.protects_metrics else OPEN | PAGE | FIGURES

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no websockets
        try:
            self._check_host(scope)
            self._check_key(scope)
            self._check_head(scope)
            body = await self._body(scope, receive)
        except ApiError as error:
            # what is left of a refused body is not read: the connection goes with it
            error.headers.setdefault("Connection", "close")
            await error.response(scope, receive, send)
            return
        if body is None:
            return
        try:
            await self.app(scope, _replay(body, receive), send)
        except BaseException as error:
            if is_panic(error):  # no Exception: the error page further out would not see it
                raise RuntimeError("native code panicked") from error
            raise

    def _check_host(self, scope: Scope) -> None:
        """Against DNS rebinding: a page whose own name was made to stand for this machine sends that name. An address
        cannot be rebound, and whoever is no browser may leave the header out."""
        given = next((value for name, value in scope["headers"] if name == b"host"), None)
        if self._hosts is None or given is None or scope["path"] in OPEN:
            return
        name = _name_of(given.decode("latin-1"))
        is_ours = name == "localhost" or name.endswith(".localhost") or name in self._hosts or _is_address(name)
        if not is_ours:
            raise ApiError(
                403,
                f"this server does not go by the name {shown(name)}: without an API key it answers to localhost and to "
                "addresses alone; ask it by one of them, or start it with --api-key or --allowed-host NAME",
            )

    def _check_key(self, scope: Scope) -> None:
        if self._key is None or scope["path"] in self._open:
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if not hmac.compare_digest(_key_of(given), self._key):
            headers = {"WWW-Authenticate": 'Bearer realm="foredraft"'}
            raise ApiError(401, "the API key is missing or wrong; send Authorization: Bearer KEY", headers=headers)

    def _check_head(self, scope: Scope) -> None:
        limits = self.limits
        if len(scope["raw_path"]) + len(scope["query_string"]) > limits.target:
            raise ApiError(414, f"path and query are longer than {limits.target} bytes")
        if sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > limits.headers:
            raise ApiError(431, f"the headers are larger than {limits.headers} bytes")
        for name, value in scope["headers"]:
            if name == b"content-length":
                if not _LENGTH.fullmatch(value):
                    raise ApiError(400, "Content-Length is no number")
                if int(value) > limits.body:
                    raise self._too_large()
            if name == b"content-encoding" and value.lower() != b"identity":
                raise ApiError(415, "a compressed body is not read; send it plain")

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self.limits.body} bytes")

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None if the client left before its end."""
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > self.limits.body:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self.limits.body_seconds:g} seconds") from None
        except asyncio.CancelledError:  # the server has drained, and waits for nobody who is still sending
            raise unavailable("the server is shutting down") from None


def _name_of(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].strip().rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _key_of(header: bytes) -> bytes:
    """The key a client sent: as a Bearer token, or as the password of Basic authentication."""
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
    """The body once, then whatever the connection has to say."""
    is_read = False

    async def replayed() -> Message:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replayed
