"""FastAPI application: routes, middleware and error handlers of one service."""

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
from foredraft.server.access_log import AccessLog
from foredraft.server.errors import ApiError, on_api_error, on_crash, on_http_error
from foredraft.server.field_limits import validate_body
from foredraft.server.http_checks import HttpCheckMiddleware
from foredraft.server.json_body import read
from foredraft.server.openapi import build_openapi_extra, install_openapi
from foredraft.server.playground import make_playground_router
from foredraft.server.prometheus_text import MetricsPage
from foredraft.server.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from foredraft.server.service import Service
from foredraft.server.traces import TraceRequest, TraceRoutes

Model = TypeVar("Model", bound=BaseModel)
Handler = Callable[[Service, Request, Model], Awaitable[Response]]


def create_app(service: Service) -> FastAPI:
    """Build the application of a service. The service is closed when the application shuts down."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(title="foredraft", version=foredraft.__version__, lifespan=lifespan, redirect_slashes=False)
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_crash)
    app.add_middleware(HttpCheckMiddleware, settings=service.settings)
    if service.settings.has_access_log:
        app.add_middleware(AccessLog)  # the middleware added last is the outermost
    _add_state(app, service)
    _add_models(app, service)
    _add_posts(app, service)
    if service.settings.has_traces:
        _add_traces(app, service)
    app.include_router(make_playground_router())
    install_openapi(app)
    return app


def _add_posts(app: FastAPI, service: Service) -> None:
    _add_post_route(app, service, "/v1/completions", CompletionRequest, completions.serve)
    _add_post_route(app, service, "/v1/chat/completions", ChatRequest, chat.serve)
    _add_post_route(app, service, "/tokenize", TokenizeRequest, tokens.tokenize)
    _add_post_route(app, service, "/detokenize", DetokenizeRequest, tokens.detokenize)

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """Return the tokenizer's special tokens, chat template and lengths."""
        return JSONResponse(tokens.describe_tokenizer(service))


def _add_traces(app: FastAPI, service: Service) -> None:
    routes = TraceRoutes()
    _add_post_route(app, service, "/v1/traces", TraceRequest, routes.serve)

    @app.get("/v1/traces")
    async def describe() -> dict[str, Any]:
        """Return numbers that identify the target's weights."""
        return await routes.describe(service)


def _add_post_route(app: FastAPI, service: Service, path: str, model: type[Model], handler: Handler[Model]) -> None:
    """Add a POST route whose body is read by `json_body` with limits, not by FastAPI."""
    limits = service.settings.limits

    async def route(http: Request) -> Response:
        content_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise ApiError(415, "the body must be sent as Content-Type: application/json")
        request = await read(
            await http.body(), service.thread_pool, limits.max_depth, lambda body: validate_body(model, body, limits)
        )
        return await handler(service, http, request)

    route.__doc__ = model.__doc__
    app.post(path, openapi_extra=build_openapi_extra(model), response_class=JSONResponse)(route)


def _add_state(app: FastAPI, service: Service) -> None:
    metrics_page = MetricsPage(service.metrics)

    @app.get("/health")
    async def health() -> Response:
        """Return 200 if the engine makes progress or is idle."""
        return (
            JSONResponse({"status": "ok"})
            if service.is_healthy
            else _make_unready_response("the engine makes no progress")
        )

    @app.get("/ready")
    async def ready() -> Response:
        """Return 200 if new requests are accepted; 503 if the model loads, the queue is full, or the server stops."""
        return (
            JSONResponse({"status": "ready"})
            if service.is_ready
            else _make_unready_response("loading, full or shutting down")
        )

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return all metrics in Prometheus's text format."""
        return Response(metrics_page.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def version() -> dict[str, Any]:
        """Return the version of Foredraft."""
        return {"version": foredraft.__version__}


def _add_models(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the names of the served model."""
        return {"object": "list", "data": [_build_model_card(service, name) for name in service.settings.model_names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Return the entry of one model name; 404 for an unknown name."""
        service.check_name(name)
        return _build_model_card(service, name)


def _build_model_card(service: Service, name: str) -> dict[str, Any]:
    rule = service.llm.rule
    simulated = (
        {} if rule is None or rule.simulated_rate is None else {"simulated_acceptance_rate": rule.simulated_rate}
    )
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "foredraft",
        "root": service.settings.model_names[0],
        "parent": None,
        "max_model_len": service.max_length,
        "permission": [],
        "drafter": service.llm.drafter_name,
        **simulated,
    }


def _make_unready_response(status: str) -> Response:
    return JSONResponse({"status": status}, 503, {"Retry-After": "5"})
