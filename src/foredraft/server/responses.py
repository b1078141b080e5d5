"""Parts of a response that all routes of generation share."""

import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from foredraft.server.access_log import record_served
from foredraft.server.choice_stream import ChoicePart
from foredraft.server.errors import ApiError, make_unavailable_error
from foredraft.server.generation import Generation
from foredraft.server.sampling_params import format_spec_metrics
from foredraft.server.schemas import SamplingRequest
from foredraft.server.sse import EventStream, encode_event, run_until_disconnect

if TYPE_CHECKING:
    from foredraft.server.service import Service


SIMULATION_HEADER = "x-foredraft-simulated"  # its value is the acceptance rate


@dataclass(frozen=True)
class ResponseHead:
    """Fields that are the same in every chunk of a response."""

    id: str
    object: str
    created: int
    model: str
    verification: str | None = None  # verification rule, if it is not lossless
    simulated_rate: float | None = None  # rate at which the rule simulates acceptance; None = it verifies

    @classmethod
    def for_request(
        cls, service: "Service", request: SamplingRequest, generation: Generation, prefix: str, kind: str
    ) -> "ResponseHead":
        name = f"{prefix}-{request.request_id or uuid.uuid4().hex}"
        rule = generation.transcripts[0].request.spec.rule  # all prompts of a body have the same
        model = request.model or service.settings.model_names[0]
        verification = None if rule.is_lossless else rule.name
        return cls(name, kind, int(time.time()), model, verification, rule.simulated_rate)

    def build_body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "id": self.id, "object": self.object, "created": self.created, "model": self.model, "choices": choices
        }  # fmt: skip
        return body | self.notes

    @property
    def notes(self) -> dict[str, Any]:
        """Fields that say how the output differs from that of the model."""
        notes: dict[str, Any] = {}
        if self.verification is not None:
            notes["verification"] = self.verification
        if self.simulated_rate is not None:
            notes["simulated_acceptance_rate"] = self.simulated_rate
        return notes

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers of the response."""
        return {} if self.simulated_rate is None else {SIMULATION_HEADER: f"{self.simulated_rate:g}"}


class GenerationResponse(Protocol):
    """Response of a route, as one body or as a stream of events."""

    head: ResponseHead

    def build_usage(self) -> dict[str, Any]: ...

    def stream_events(self) -> AsyncIterator[bytes]: ...

    def collect_body(self) -> Coroutine[Any, Any, dict[str, Any]]: ...


async def respond(
    service: "Service", http: Request, request: SamplingRequest, generation: Generation, response: GenerationResponse
) -> Response:
    """Send a stream or a whole body. A client that disconnects early cancels the generation."""
    record_served(http, response.head.id, response)
    if request.is_streaming:
        settings = service.settings
        return EventStream(
            response.stream_events(),
            generation.cancel,
            settings.keep_alive_seconds,
            settings.limits.stall_timeout,
            response.head.headers,
        )
    try:
        body = await run_until_disconnect(http.receive, response.collect_body())
    finally:
        generation.cancel()
    return Response(status_code=499) if body is None else JSONResponse(body, headers=response.head.headers)


def check_started(service: "Service", parts: Sequence[ChoicePart]) -> None:
    """Raise ApiError if all choices were aborted without a token, by the deadline (504) or a shutdown (503)."""
    if all(part.finish_reason == "abort" and not part.tokens for part in parts):
        if service.is_stopping:
            raise make_unavailable_error(service.stop_message)
        raise ApiError(504, str(parts[0].stop_reason or "the request was aborted"))


def build_spec_metrics(service: "Service", request: SamplingRequest, generation: Generation) -> dict[str, Any]:
    """Build the field `metrics` if it is enabled and there is one completion; else {}."""
    is_enabled = request.speculative_metrics or service.settings.has_spec_metrics
    if not is_enabled or len(generation.completions) != 1:
        return {}
    (completion,) = generation.completions.values()
    figures = format_spec_metrics(completion.stats)
    rate = generation.transcripts[0].request.spec.rule.simulated_rate
    if rate is not None:
        figures["simulated_acceptance_rate"] = rate
    return {"metrics": {"speculative_decoding": figures}}


def encode_error_event(error: ApiError) -> bytes:
    """Encode an error as a server-sent event."""
    return encode_event(error.body)
