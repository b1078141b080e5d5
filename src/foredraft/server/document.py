"""The OpenAPI document of routes that read their bodies themselves."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

_REF = "#/components/schemas/{model}"
_MODELS = "x-models"  # where a route keeps its models until the document is written


def documented(model: type[BaseModel]) -> dict[str, Any]:
    """For a route's openapi_extra."""
    schema = model.model_json_schema(ref_template=_REF)
    parts = schema.pop("$defs", {})
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"requestBody": body, _MODELS: parts}


def describe(app: FastAPI) -> None:
    """Put the models of the routes where the document refers to them."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schemas = found.setdefault("components", {}).setdefault("schemas", {})
            for path in found["paths"].values():
                for operation in path.values():
                    schemas |= operation.pop(_MODELS, {})
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
