"""The routes, put together."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import foredraft
from foredraft.server import chat, completions, tokens
from foredraft.server.access import AccessLog
from foredraft.server.body import read
from foredraft.server.caps import checked
from foredraft.server.document import describe, documented
from foredraft.server.errors import ApiError, on_api_error, on_crash, on_http_error
from foredraft.server.gate import Gate
from foredraft.server.playground import playground
from foredraft.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from foredraft.server.service import Service

Model = TypeVar("Model", bound=BaseModel)
Handler = Callable[[Service, Request, Model], Awaitable[Response]]


def create_app(service: Service) -> FastAPI:
    """The application of one service, which is closed when the application shuts down."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(title="foredraft", version=foredraft.__version__, lifespan=lifespan, redirect_slashes=False)
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_crash)
    app.add_middleware(Gate, settings=service.settings)
    if service.settings.has_access_log:
        app.add_middleware(AccessLog)  # the last to be added is the first to see a request
    _add_state(app, service)
    _add_models(app, service)
    _add_posts(app, service)
    app.include_router(playground())
    describe(app)
    return app


def _add_posts(app: FastAPI, service: Service) -> None:
    _post(app, service, "/v1/completions", CompletionRequest, completions.serve)
    _post(app, service, "/v1/chat/completions", ChatRequest, chat.serve)
    _post(app, service, "/tokenize", TokenizeRequest, tokens.tokenize)
    _post(app, service, "/detokenize", DetokenizeRequest, tokens.detokenize)

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        return JSONResponse(tokens.info(service))


def _post(app: FastAPI, service: Service, path: str, model: type[Model], handler: Handler[Model]) -> None:
    """A route whose body we read ourselves, strictly and with limits."""
    limits = service.settings.limits

    async def route(http: Request) -> Response:
        kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "the body must be sent as Content-Type: application/json")
        request = await read(await http.body(), service.pool, limits.depth, lambda body: checked(model, body, limits))
        return await handler(service, http, request)

    route.__doc__ = model.__doc__
    app.post(path, openapi_extra=documented(model), response_class=JSONResponse)(route)


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Response:
        """200 while the engine makes progress or has nothing to do."""
        return JSONResponse({"status": "ok"}) if service.is_healthy else _not("the engine makes no progress")

    @app.get("/ready")
    async def ready() -> Response:
        """200 while new requests are taken: not while the model loads, not while the server stops."""
        return JSONResponse({"status": "ready"}) if service.is_ready else _not("loading, full or shutting down")

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def version() -> dict[str, Any]:
        return {"version": foredraft.__version__}


def _add_models(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_card(service, name) for name in service.settings.names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_name(name)
        return _card(service, name)


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "foredraft",
        "root": service.settings.names[0],
        "parent": None,
        "max_model_len": service.longest,
        "permission": [],
        "drafter": service.llm.drafter_name,
    }


def _not(why: str) -> Response:
    return JSONResponse({"status": why}, 503, {"Retry-After": "5"})
