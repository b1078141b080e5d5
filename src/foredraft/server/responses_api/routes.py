"""Routes of /v1/responses: create, retrieve and delete a response, and list its input items."""

import asyncio
import hashlib
import uuid
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from foredraft.server.errors import ApiError, quote_name
from foredraft.server.http_checks import read_key
from foredraft.server.responses import ResponseHead, respond
from foredraft.server.responses_api.item_page import DEFAULT_LIMIT, DEFAULT_ORDER, read_page
from foredraft.server.responses_api.preparation import prepare_response
from foredraft.server.responses_api.response_body import ResponseBody
from foredraft.server.responses_api.response_store import ResponseStore
from foredraft.server.responses_api.response_stream import ItemResponse
from foredraft.server.responses_api.schema import LOGPROBS, ResponseRequest
from foredraft.server.responses_api.stored_response import StoredResponse
from foredraft.server.service import Service
from foredraft.server.settings import ServerSettings

PREVIOUS = "previous_response_id"


class ResponseRoutes:
    """Routes of one server, with its stored responses.

    Args:
        settings: of the server.
        tag: part of the ids of responses, by which a front finds this replica. Default "" = none.
    """

    def __init__(self, settings: ServerSettings, tag: str = "") -> None:
        self.store = ResponseStore(settings.stored_responses, settings.stored_response_bytes)
        self._tag = tag

    def add_to(self, app: FastAPI) -> None:
        """Add the routes of stored responses to an application."""

        @app.get("/v1/responses/{name}")
        async def retrieve(http: Request, name: str) -> Response:
            """Return a stored response; 404 if it is not stored, or belongs to another API key."""
            _refuse_query(http, ())
            return Response(self._find(http, name).body, media_type="application/json")

        @app.delete("/v1/responses/{name}")
        async def delete(http: Request, name: str) -> dict[str, Any]:
            """Delete a stored response. Responses that continue it keep their conversation."""
            _refuse_query(http, ())
            if not self.store.delete(_hash_owner(http), name):
                raise self._make_missing_error(name)
            return {"id": name, "object": "response", "deleted": True}

        @app.get("/v1/responses/{name}/input_items")
        async def list_input_items(
            http: Request,
            name: str,
            limit: str = str(DEFAULT_LIMIT),
            order: str = DEFAULT_ORDER,
            after: str | None = None,
        ) -> dict[str, Any]:
            """List the items that a stored response was given, those of its conversation included."""
            _refuse_query(http, ("limit", "order", "after"))
            page = read_page(limit, order, after)
            items = await asyncio.to_thread(self._find(http, name).list_conversation)  # JSON of a long conversation
            return page.cut(items)

    async def create(self, service: Service, http: Request, request: ResponseRequest) -> Response:
        """Serve POST /v1/responses. Raises ApiError."""
        service.check_name(request.model)
        self._check_request(request)
        owner = _hash_owner(http)
        previous = self._find_previous(service, owner, request.previous_response_id)
        has_images = request.has_images or (previous is not None and previous.has_images)
        prepared = await service.run_off_loop(prepare_response, service, request, previous, has_images=has_images)
        submission = prepared.prepared.submission
        generation = await service.submit([submission])
        head = ResponseHead.for_request(service, request, generation, "resp", "response")
        head = replace(head, id=f"resp_{self._tag}{request.request_id or uuid.uuid4().hex}")
        is_stored = self.store.is_enabled and request.store is not False

        def store(body: bytes) -> None:
            model = service.settings.model_names[0]
            self.store.add(StoredResponse(head.id, owner, model, previous, prepared.input_items, body))

        body = ResponseBody(head, request, submission.sampling, is_stored)
        response = ItemResponse(service, request, generation, prepared, body, store if is_stored else None)
        return await respond(service, http, request, generation, response)

    def _check_request(self, request: ResponseRequest) -> None:
        if request.max_output_tokens == 0:
            raise ApiError(400, "max_output_tokens must be at least 1", "max_output_tokens")
        if request.top_logprobs is not None and not request.has_logprobs:
            raise ApiError(400, f'top_logprobs goes with include = ["{LOGPROBS}"]', "top_logprobs")
        if request.store and not self.store.is_enabled:
            message = "this server stores no responses; send store = false, or start it with --stored-responses N"
            raise ApiError(400, message, "store")

    def _find_previous(self, service: Service, owner: bytes, name: str | None) -> StoredResponse | None:
        if name is None:
            return None
        found = self.store.find(owner, name)
        if found is None:
            raise self._make_missing_error(name, PREVIOUS)
        if found.model != service.settings.model_names[0]:
            message = f"{PREVIOUS}: that response is of the model {quote_name(found.model)}; name this model"
            raise ApiError(400, message, PREVIOUS)
        return found

    def _find(self, http: Request, name: str) -> StoredResponse:
        found = self.store.find(_hash_owner(http), name)
        if found is None:
            raise self._make_missing_error(name)
        return found

    def _make_missing_error(self, name: str, param: str | None = None) -> ApiError:
        """Make the error 404 with the bound of the store."""
        start = "" if param is None else f"{param}: "
        if not self.store.is_enabled:
            message = "this server stores no responses (--stored-responses 0); send the whole conversation as input"
            return ApiError(404, start + message, param)
        mib = self.store.max_bytes / (1 << 20)
        message = (
            f"no response {quote_name(name)} is stored for this API key. The server keeps the "
            f"{self.store.max_responses} last used ones, at most {mib:.3g} MiB, until it stops; send the whole "
            "conversation as input"
        )
        return ApiError(404, start + message, param)


def _hash_owner(http: Request) -> bytes:
    """Return the hash of the API key that a client sends; clients without a key are one owner."""
    return hashlib.sha256(read_key(http.scope["headers"])).digest()


def _refuse_query(http: Request, known: tuple[str, ...]) -> None:
    """Raise ApiError for a parameter of the query that is not known."""
    for name in http.query_params:
        if name not in known:
            listed = f"; it has {', '.join(known)}" if known else ""
            raise ApiError(400, f"{quote_name(name)} is not a parameter of this route{listed}; leave it out", name[:64])
