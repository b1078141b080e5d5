"""Playground page at `/`: static files of this package, without templates, build step or external resources."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, HTTPException, Request, Response

STATIC_FOLDER = Path(__file__).parent / "static"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",  # only the script submits the form
        "frame-ancestors 'none'",
        "object-src 'none'",
    )
)


@dataclass(frozen=True)
class StaticFile:
    """Static file of the page, read once, with its response headers."""

    content: bytes
    headers: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> "StaticFile":
        content = path.read_bytes()
        headers = {
            "Content-Type": CONTENT_TYPES[path.suffix],
            "Content-Security-Policy": CONTENT_SECURITY_POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",  # cached but revalidated, so that an upgraded server shows its new page
            "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
        }
        return cls(content, headers)

    def respond(self, request: Request) -> Response:
        """Return the file, or status 304 if the client has this version."""
        if request.headers.get("if-none-match") == self.headers["ETag"]:
            return Response(status_code=304, headers=self.headers)
        return Response(self.content, headers=self.headers)


def make_playground_router() -> APIRouter:
    """Make the routes `/` and `/static/...`.

    The files need no API key. The page asks for the key if a request gets status 401.
    """
    files = {
        path.name: StaticFile.read(path) for path in sorted(STATIC_FOLDER.iterdir()) if path.suffix in CONTENT_TYPES
    }
    router = APIRouter(include_in_schema=False)

    @router.api_route("/", methods=["GET", "HEAD"])
    def page(request: Request) -> Response:
        return files["index.html"].respond(request)

    @router.api_route("/static/{name}", methods=["GET", "HEAD"])
    def static(name: str, request: Request) -> Response:
        if name not in files:
            raise HTTPException(404, "the playground has no such file")
        return files[name].respond(request)

    return router
