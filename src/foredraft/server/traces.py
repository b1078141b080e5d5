"""Handlers of /v1/traces: hidden states and distributions of the target, for training on another machine.

Traces are computed on the engine's thread between two steps, with KV memory of their own.
"""

from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from foredraft.errors import ForedraftError
from foredraft.server.errors import ApiError
from foredraft.server.schemas import RoutedRequest, TokenId
from foredraft.server.service import Service
from foredraft.train.fingerprint import fingerprint_target
from foredraft.train.remote.wire import encode_traces
from foredraft.train.trace import Tracer

MAX_TOKENS = 16_384  # of a request: other requests wait while it is computed
MAX_LAYERS = 16


class TraceRequest(RoutedRequest):
    """Traces of token rows of equal length (POST /v1/traces). The response is a safetensors file."""

    tokens: Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    hidden_layers: list[Annotated[int, Field(ge=-1)]] = Field(default_factory=list, max_length=MAX_LAYERS)
    top: Annotated[int, Field(ge=1)] | None = None


class TraceRoutes:
    """Routes of one service. The tracer of the last request is kept, with its KV memory; only the engine uses it."""

    def __init__(self) -> None:
        self._tracer: Tracer | None = None

    async def describe(self, service: Service) -> dict[str, Any]:
        """Describe the target, so that a trainer can compare it with its own files."""
        target = service.llm.target
        return {"target": await service.worker.run_between_steps(partial(fingerprint_target, target))}

    async def serve(self, service: Service, http: Request, request: TraceRequest) -> Response:
        """Serve POST /v1/traces. Raises ApiError."""
        _check_request(service, request)
        try:
            data = await service.worker.run_between_steps(partial(self._trace, service, request))
        except ForedraftError as error:
            raise ApiError(400, str(error), "hidden_layers") from None
        return Response(data, media_type="application/octet-stream")

    def _trace(self, service: Service, request: TraceRequest) -> bytes:
        layers = tuple(request.hidden_layers)
        if self._tracer is None or (self._tracer.hidden_layers, self._tracer.top) != (layers, request.top):
            self._tracer = Tracer(service.llm.target, layers, request.top)
        return encode_traces(*self._tracer.run_target(torch.tensor(request.tokens)))


def _check_request(service: Service, request: TraceRequest) -> None:
    target, lengths = service.llm.target, {len(row) for row in request.tokens}
    if target.has_encoder:
        raise ApiError(400, "an encoder-decoder model has no traces here", "tokens")
    if len(lengths) > 1:
        raise ApiError(400, "all rows of tokens must have the same length", "tokens")
    length = lengths.pop()
    if length > target.context_length:
        raise ApiError(400, f"a row has {length} tokens and the model takes {target.context_length}", "tokens")
    if length * len(request.tokens) > MAX_TOKENS:
        raise ApiError(400, f"tokens may hold at most {MAX_TOKENS} ids", "tokens")
    if any(token >= target.vocab_size for row in request.tokens for token in row):
        raise ApiError(400, f"tokens holds an id outside the vocabulary of {target.vocab_size} tokens", "tokens")
