"""The OpenAPI document of routes that read their bodies themselves."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

_REF = "#/components/schemas/{model}"
_MODELS = "x-models"  # where a route keeps its models until the document is written
_EVENTS = {"text/event-stream": {"schema": {"type": "string"}}}
_TEXT = {"text/plain": {"schema": {"type": "string"}}}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "integer"},
            },
        }
    },
}
_STATUS = {"type": "object", "required": ["status"], "properties": {"status": {"type": "string"}}}
_REFUSALS = {
    "400": "A field or value that cannot be; `param` names it.",
    "401": "The API key is missing or wrong.",
    "404": "There is no such model.",
    "408": "The body took too long to arrive.",
    "413": "The body is too large.",
    "414": "Path and query are too long.",
    "415": "The body is no plain application/json.",
    "429": "The queue is full; see Retry-After.",
    "431": "The headers are too large.",
    "503": "The model is loading, or the server is shutting down.",
    "504": "The request took longer than the server allows.",
}
_ALWAYS = ("400", "401", "408", "413", "414", "415", "431", "503")
# what a body of 200 holds at least
_HOLDS = {
    "/v1/completions": {"id", "object", "created", "model", "choices", "usage"},
    "/v1/chat/completions": {"id", "object", "created", "model", "choices", "usage"},
    "/tokenize": {"count", "max_model_len", "tokens"},
    "/detokenize": {"prompt"},
    "/tokenizer_info": {"tokenizer_class", "vocab_size", "model_max_length", "chat_template"},
    "/health": {"status"},
    "/ready": {"status"},
    "/version": {"version"},
    "/v1/models": {"object", "data"},
    "/v1/models/{name}": {"id", "object", "created", "owned_by", "max_model_len"},
}


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
            schemas["Error"] = _ERROR
            for path, operations in found["paths"].items():
                for method, operation in operations.items():
                    schemas |= operation.pop(_MODELS, {})
                    operation["responses"] = _responses(path, method == "post")
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _responses(path: str, has_body: bool) -> dict[str, Any]:
    """By status, what a route answers."""
    refusals = [*_ALWAYS]
    if has_body or path == "/v1/models/{name}":
        refusals.append("404")
    if has_body and path.startswith("/v1/"):
        refusals += ["429", "504"]
    error = _json({"$ref": _REF.format(model="Error")})
    found: dict[str, Any] = {code: {"description": _REFUSALS[code], "content": error} for code in sorted(refusals)}
    if path in ("/health", "/ready"):
        found["503"]["content"] = _json(_STATUS)
    return {"200": {"description": "The answer.", "content": _content(path)}} | found


def _content(path: str) -> dict[str, Any]:
    if path == "/metrics":
        return _TEXT
    whole = _json({"type": "object", "required": sorted(_HOLDS.get(path, ()))})
    return whole | _EVENTS if path in ("/v1/completions", "/v1/chat/completions") else whole


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
