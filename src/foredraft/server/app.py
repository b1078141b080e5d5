"""FastAPI application: routes, middleware and error handlers of one server."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import foredraft
from foredraft.server import chat, completions, tokens
from foredraft.server.access_log import AccessLog
from foredraft.server.admin import AdminRoutes
from foredraft.server.anthropic_api.routes import count_message_tokens, create_message
from foredraft.server.anthropic_api.schema import CountTokensRequest, MessageRequest
from foredraft.server.errors import ApiError, on_api_error, on_crash, on_http_error
from foredraft.server.http_checks import HttpCheckMiddleware
from foredraft.server.model_card import build_model_card
from foredraft.server.openapi import build_openapi_extra, install_openapi
from foredraft.server.playground import make_playground_router
from foredraft.server.prometheus_text import MetricsPage
from foredraft.server.request_body import read_request
from foredraft.server.responses_api.routes import ResponseRoutes
from foredraft.server.responses_api.schema import ResponseRequest
from foredraft.server.responses_api.store_metrics import build_store_families
from foredraft.server.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    RoutedRequest,
    TokenizeRequest,
)
from foredraft.server.served_models import ServedModels
from foredraft.server.service import Service
from foredraft.server.traces import TraceRequest, TraceRoutes

Model = TypeVar("Model", bound=RoutedRequest)
Handler = Callable[[Service, Request, Model], Awaitable[Response]]


def create_app(models: ServedModels, admin: AdminRoutes | None = None, tag: str = "") -> FastAPI:
    """Build the application of a server. Its models are closed when the application shuts down.

    Args:
        models: models of the server.
        admin: routes that load and unload models. Default None = there are none.
        tag: part of the ids of responses, by which a front finds this replica. Default "" = none.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        models.close()

    app = FastAPI(title="foredraft", version=foredraft.__version__, lifespan=lifespan, redirect_slashes=False)
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_crash)
    app.add_middleware(HttpCheckMiddleware, settings=models.settings)
    if models.settings.has_access_log:
        app.add_middleware(AccessLog)  # the middleware added last is the outermost
    responses = ResponseRoutes(models.settings, tag)
    _add_state(app, models, responses)
    _add_models(app, models)
    _add_posts(app, models)
    _add_responses(app, models, responses)
    if models.settings.has_traces:
        _add_traces(app, models)
    if admin is not None:
        admin.add_to(app)
    app.include_router(make_playground_router())
    install_openapi(app)
    return app


def _add_posts(app: FastAPI, models: ServedModels) -> None:
    _add_post_route(app, models, "/v1/completions", CompletionRequest, completions.serve)
    _add_post_route(app, models, "/v1/chat/completions", ChatRequest, chat.serve)
    _add_post_route(app, models, "/v1/messages", MessageRequest, create_message)
    _add_post_route(app, models, "/v1/messages/count_tokens", CountTokensRequest, count_message_tokens)
    _add_post_route(app, models, "/tokenize", TokenizeRequest, tokens.tokenize)
    _add_post_route(app, models, "/detokenize", DetokenizeRequest, tokens.detokenize)

    @app.get("/tokenizer_info")
    async def tokenizer_info(model: str | None = None) -> Response:
        """Return the tokenizer's special tokens, chat template and lengths."""
        return JSONResponse(tokens.describe_tokenizer(models.find(model)))


def _add_responses(app: FastAPI, models: ServedModels, routes: ResponseRoutes) -> None:
    _add_post_route(app, models, "/v1/responses", ResponseRequest, routes.create)
    routes.add_to(app)


def _add_traces(app: FastAPI, models: ServedModels) -> None:
    routes = TraceRoutes()
    _add_post_route(app, models, "/v1/traces", TraceRequest, routes.serve)

    @app.get("/v1/traces")
    async def describe() -> dict[str, Any]:
        """Return numbers that identify the target's weights."""
        return await routes.describe(models.find(None))


def _add_post_route(app: FastAPI, models: ServedModels, path: str, model: type[Model], handler: Handler[Model]) -> None:
    """Add a POST route for the model that the body names. `json_body` reads the body with limits, not FastAPI."""

    async def route(http: Request) -> Response:
        request = await read_request(http, models, model)
        return await handler(models.find(request.model), http, request)

    route.__doc__ = model.__doc__
    app.post(path, openapi_extra=build_openapi_extra(model), response_class=JSONResponse)(route)


def _add_state(app: FastAPI, models: ServedModels, responses: ResponseRoutes) -> None:
    metrics_page = MetricsPage(
        lambda: [service.metrics for service in models.services], lambda: build_store_families(responses.store)
    )

    @app.get("/health")
    async def health() -> Response:
        """Return 200 if the engine of every model makes progress or is idle."""
        return (
            JSONResponse({"status": "ok"})
            if models.is_healthy
            else _make_unready_response(models, "the engine makes no progress", lambda each: each.is_healthy)
        )

    @app.get("/ready")
    async def ready() -> Response:
        """Return 200 if every model accepts requests; 503 if one loads, a queue is full, or the server stops."""
        return (
            JSONResponse({"status": "ready"})
            if models.is_ready
            else _make_unready_response(models, "loading, full or shutting down", lambda each: each.is_ready)
        )

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return all metrics in Prometheus's text format."""
        return Response(metrics_page.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def version() -> dict[str, Any]:
        """Return the version of Foredraft."""
        return {"version": foredraft.__version__}


def _add_models(app: FastAPI, models: ServedModels) -> None:
    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """List the names of the models that are loaded."""
        cards = [build_model_card(each, name) for each in models.list_open() for name in each.settings.model_names]
        return {"object": "list", "data": cards}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Return the entry of one model name; 404 for an unknown name."""
        return build_model_card(models.find(name), name)


def _make_unready_response(models: ServedModels, status: str, is_fine: Callable[[Service], bool]) -> Response:
    """Make the response 503; on a server with several models it names those that are not fine."""
    if models.has_several:
        names = [service.settings.model_names[0] for service in models.services if not is_fine(service)]
        status = f"{status}: {', '.join(names)}"
    return JSONResponse({"status": status}, 503, {"Retry-After": "5"})
