"""The page at `/`: files of this package, served as they are. No template, no build step, nothing from elsewhere."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, HTTPException, Request, Response

FOLDER = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",  # the form is sent by the script alone
        "frame-ancestors 'none'",
        "object-src 'none'",
    )
)


@dataclass(frozen=True)
class StaticFile:
    """One file of the page, read once, and the headers it is sent with."""

    content: bytes
    headers: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> "StaticFile":
        content = path.read_bytes()
        headers = {
            "Content-Type": TYPES[path.suffix],
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",  # kept, but asked for again: an upgraded server shows its own page at once
            "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
        }
        return cls(content, headers)

    def response(self, request: Request) -> Response:
        if request.headers.get("if-none-match") == self.headers["ETag"]:
            return Response(status_code=304, headers=self.headers)
        return Response(self.content, headers=self.headers)


def playground() -> APIRouter:
    """Routes `/` and `/static/...`. The files need no API key: the page asks for it if a request is answered 401."""
    files = {path.name: StaticFile.read(path) for path in sorted(FOLDER.iterdir()) if path.suffix in TYPES}
    router = APIRouter(include_in_schema=False)

    @router.api_route("/", methods=["GET", "HEAD"])
    def page(request: Request) -> Response:
        return files["index.html"].response(request)

    @router.api_route("/static/{name}", methods=["GET", "HEAD"])
    def static(name: str, request: Request) -> Response:
        if name not in files:
            raise HTTPException(404, "the playground has no such file")
        return files[name].response(request)

    return router
