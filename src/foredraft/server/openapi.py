"""OpenAPI document. FastAPI cannot derive it, because the routes parse their bodies themselves."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from foredraft.server.anthropic_api.error_format import is_anthropic_path

_SCHEMA_REF = "#/components/schemas/{model}"
_MODELS_KEY = "x-models"  # key of a route's model schemas until the document is built
_EVENT_CONTENT = {"text/event-stream": {"schema": {"type": "string"}}}
_TEXT_CONTENT = {"text/plain": {"schema": {"type": "string"}}}
_ERROR_SCHEMA = {
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
_ANTHROPIC_ERROR_SCHEMA = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_STATUS_SCHEMA = {"type": "object", "required": ["status"], "properties": {"status": {"type": "string"}}}
_ERROR_DESCRIPTIONS = {
    "400": "A field or a value is invalid; the error names the field.",
    "401": "The API key is missing or wrong.",
    "404": "There is no such model or response.",
    "409": "The name is taken, no KV memory is free, or another model is being loaded.",
    "408": "The body took too long to arrive.",
    "413": "The body is too large.",
    "414": "Path and query are too long.",
    "415": "The body is not application/json, or it is compressed.",
    "429": "The queue is full; see Retry-After.",
    "431": "The headers are too large.",
    "503": "The model is loading, or the server is shutting down.",
    "504": "The request took longer than the server allows.",
}
_COMMON_ERRORS = ("400", "401", "408", "413", "414", "415", "431", "503")
# They name a model or a response outside a body.
_NAMED_PATHS = (
    "/v1/models/{name}",
    "/admin/models/{name}",
    "/tokenizer_info",
    "/v1/responses/{name}",
    "/v1/responses/{name}/input_items",
)
_STREAMED_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
# Route -> keys that every body with status 200 has.
_REQUIRED_KEYS = {
    "/v1/completions": {"id", "object", "created", "model", "choices", "usage"},
    "/v1/chat/completions": {"id", "object", "created", "model", "choices", "usage"},
    "/v1/responses": {"id", "object", "created_at", "status", "model", "output", "usage"},
    "/v1/responses/{name}": {"id", "object"},
    "/v1/responses/{name}/input_items": {"object", "data", "first_id", "last_id", "has_more"},
    "/v1/messages": {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"},
    "/v1/messages/count_tokens": {"input_tokens"},
    "/tokenize": {"count", "max_model_len", "tokens"},
    "/detokenize": {"prompt"},
    "/tokenizer_info": {"tokenizer_class", "vocab_size", "model_max_length", "chat_template"},
    "/health": {"status"},
    "/ready": {"status"},
    "/version": {"version"},
    "/v1/models": {"object", "data"},
    "/v1/models/{name}": {"id", "object", "created", "owned_by", "max_model_len"},
    "/admin/models": {"object"},
    "/admin/models/{name}": {"id", "object", "deleted"},
}


def build_openapi_extra(model: type[BaseModel]) -> dict[str, Any]:
    """Build the `openapi_extra` of a route whose body is `model`."""
    schema = model.model_json_schema(ref_template=_SCHEMA_REF)
    definitions = schema.pop("$defs", {})
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"requestBody": body, _MODELS_KEY: definitions}


def install_openapi(app: FastAPI) -> None:
    """Replace `app.openapi` by a function that adds the routes' models and responses to the document."""

    def build_document() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas |= {"Error": _ERROR_SCHEMA, "AnthropicError": _ANTHROPIC_ERROR_SCHEMA}
            for path, operations in document["paths"].items():
                for method, operation in operations.items():
                    schemas |= operation.pop(_MODELS_KEY, {})
                    operation["responses"] = _build_responses(path, method == "post")
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = build_document  # type: ignore[method-assign]


def _build_responses(path: str, has_body: bool) -> dict[str, Any]:
    """Build the responses of a route by status."""
    codes = [*_COMMON_ERRORS]
    if has_body or path in _NAMED_PATHS:
        codes.append("404")
    if path.startswith("/admin/"):
        codes.append("409")
    if has_body and path.startswith("/v1/"):
        codes += ["429", "504"]
    name = "AnthropicError" if is_anthropic_path(path) else "Error"
    error = _build_json_content({"$ref": _SCHEMA_REF.format(model=name)})
    responses: dict[str, Any] = {
        code: {"description": _ERROR_DESCRIPTIONS[code], "content": error} for code in sorted(codes)
    }
    if path in ("/health", "/ready"):
        responses["503"]["content"] = _build_json_content(_STATUS_SCHEMA)
    return {"200": {"description": "Success.", "content": _build_content(path)}} | responses


def _build_content(path: str) -> dict[str, Any]:
    if path == "/metrics":
        return _TEXT_CONTENT
    content = _build_json_content({"type": "object", "required": sorted(_REQUIRED_KEYS.get(path, ()))})
    return content | _EVENT_CONTENT if path in _STREAMED_PATHS else content


def _build_json_content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
