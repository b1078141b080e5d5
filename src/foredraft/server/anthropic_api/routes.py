"""Handlers of POST /v1/messages and /v1/messages/count_tokens."""

import uuid
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from foredraft.server.anthropic_api.block_response import BlockResponse
from foredraft.server.anthropic_api.preparation import count_tokens, prepare_message
from foredraft.server.anthropic_api.schema import CountTokensRequest, MessageRequest
from foredraft.server.responses import ResponseHead, respond
from foredraft.server.service import Service


async def create_message(service: Service, http: Request, request: MessageRequest) -> Response:
    """Serve POST /v1/messages. Raises ApiError."""
    service.check_name(request.model)
    prepared = await service.run_off_loop(prepare_message, service, request, has_images=request.has_images)
    generation = await service.submit([prepared.prepared.submission])
    head = ResponseHead.for_request(service, request, generation, "msg", "message")
    head = replace(head, id=f"msg_{request.request_id or uuid.uuid4().hex}")
    response = BlockResponse(service, request, generation, prepared, head)
    return await respond(service, http, request, generation, response)


async def count_message_tokens(service: Service, http: Request, request: CountTokensRequest) -> Response:
    """Serve POST /v1/messages/count_tokens. Raises ApiError."""
    service.check_name(request.model)
    count = await service.run_off_loop(count_tokens, service, request, has_images=request.has_images)
    return JSONResponse({"input_tokens": count})
