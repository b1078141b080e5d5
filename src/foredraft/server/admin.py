"""Routes that load and unload models while the server runs. `HttpCheckMiddleware` checks their key."""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import AfterValidator, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from foredraft.errors import ForedraftError
from foredraft.server.errors import ApiError
from foredraft.server.model_card import build_model_card
from foredraft.server.model_host import ModelHost, ModelSource
from foredraft.server.model_names import check_model_name
from foredraft.server.openapi import build_openapi_extra
from foredraft.server.request_body import read_request
from foredraft.server.schemas import StrictModel
from foredraft.server.service import Service

Text = Annotated[str, Field(min_length=1, max_length=1024)]
Size = Annotated[int, Field(ge=1, le=1 << 31)]
MAX_WEIGHT = 1e6


def _check_method(name: str) -> str:
    """Return the name of a method. Raises ForedraftError for one of a Python module, which a request may not import."""
    if ":" in name:
        raise ForedraftError("a method of a Python module is given on the command line only")
    return name


class LoadModelRequest(StrictModel):
    """Model to load (POST /admin/models). The fields below `kv_memory` are options of `foredraft serve`."""

    name: Annotated[str, AfterValidator(check_model_name)]
    model: Text | None = None  # folder or hub id
    lora: Text | None = None  # folder of an adapter, instead of `model`
    weight: Annotated[float, Field(gt=0, le=MAX_WEIGHT)] = 1.0
    kv_memory: Text | None = None  # such as 2GiB, beside the memory of all models; None = a share of that by weight
    spec_method: Annotated[Text, AfterValidator(_check_method)] | None = None
    spec_model: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    spec_option: Annotated[list[Text], Field(max_length=64)] | None = None
    spec_tokens: Text | Annotated[int, Field(ge=1, le=1024)] | None = None
    spec_quantization: Text | None = None
    spec_dtype: Text | None = None
    spec_revision: Text | None = None
    spec_max_model_len: Size | None = None
    spec_vocab: Text | None = None
    verify: Text | None = None
    quantization: Text | None = None
    revision: Text | None = None
    tokenizer: Text | None = None
    dtype: Text | None = None
    device: Text | None = None
    max_model_len: Size | None = None
    max_batch: Size | None = None
    tool_call_parser: Text | None = None
    reasoning_parser: Text | None = None


SourceFactory = Callable[[LoadModelRequest], ModelSource]


class AdminRoutes:
    """Routes /admin/models of one server.

    Args:
        host: models of the server.
        make_source: returns the source of a model; it may take long. Raises ForedraftError for an invalid option.
    """

    def __init__(self, host: ModelHost, make_source: SourceFactory) -> None:
        self._host, self._make_source = host, make_source

    def add_to(self, app: FastAPI) -> None:
        """Add the routes to an application."""

        @app.get("/admin/models")
        async def list_models() -> dict[str, Any]:
            """List the models with their requests and their KV memory."""
            return {"object": "list", "data": [_describe(service) for service in self._host.models.list_open()]}

        @app.post("/admin/models", openapi_extra=build_openapi_extra(LoadModelRequest), response_class=JSONResponse)
        async def load_model(http: Request) -> Response:
            """Load a model. The response is sent when it serves; the load goes on if the client leaves."""
            request = await read_request(http, self._host.models, LoadModelRequest)
            return JSONResponse(_describe(await self._load(request)))

        @app.delete("/admin/models/{name:path}")
        async def unload_model(name: str) -> dict[str, Any]:
            """Unload a model after its running requests; new ones get status 404 or 503."""
            await self._host.unload(name)
            return {"id": name, "object": "model", "deleted": True}

    async def _load(self, request: LoadModelRequest) -> Service:
        if (request.model is None) == (request.lora is None):
            raise ApiError(400, "give either model or lora", "model")
        self._host.check_free(request.name)
        try:
            return await self._host.load(await asyncio.to_thread(self._make_source, request))
        except ForedraftError as error:  # it names the folder, which responses leave out
            message = str(error).replace(request.model or request.lora or "", request.name)
            raise ApiError(400, message, "model" if request.lora is None else "lora") from None


def _describe(service: Service) -> dict[str, Any]:
    allocator = service.worker.engine.scheduler.allocator
    return build_model_card(service, service.settings.model_names[0]) | {
        "kv_tokens": (allocator.num_pages - 1) * allocator.page_size,
        "num_running": service.worker.num_running,
        "num_waiting": service.worker.num_waiting,
    }
