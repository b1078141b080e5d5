"""What both routes write around their choices."""

import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from foredraft.server.access import note_served
from foredraft.server.errors import ApiError, unavailable
from foredraft.server.generation import Generation
from foredraft.server.parameters import speculation
from foredraft.server.protocol import Generating
from foredraft.server.sse import EventStream, event, unless_gone
from foredraft.server.writing import Part
from foredraft.verify import LOSSY

if TYPE_CHECKING:
    from foredraft.server.service import Service


@dataclass(frozen=True)
class Head:
    """The same in every chunk of a response."""

    id: str
    object: str
    created: int
    model: str
    verification: str | None = None  # the rule, where it changes the text

    @classmethod
    def of(cls, service: "Service", request: Generating, prefix: str, kind: str) -> "Head":
        name = f"{prefix}-{request.request_id or uuid.uuid4().hex}"
        rule = service.llm.verify
        model = request.model or service.settings.names[0]
        return cls(name, kind, int(time.time()), model, rule if rule in LOSSY else None)

    def body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        body = {
            "id": self.id, "object": self.object, "created": self.created, "model": self.model, "choices": choices
        }  # fmt: skip
        return body if self.verification is None else body | {"verification": self.verification}


class Answer(Protocol):
    """What a route makes of its generation."""

    head: Head

    def usage(self) -> dict[str, Any]: ...

    def events(self) -> AsyncIterator[bytes]: ...

    def whole(self) -> Coroutine[Any, Any, dict[str, Any]]: ...


async def respond(
    service: "Service", http: Request, request: Generating, generation: Generation, answer: Answer
) -> Response:
    """A stream, or all at once; whoever leaves before the end ends the generation."""
    note_served(http, answer.head.id, answer)
    if request.is_streaming:
        settings = service.settings
        return EventStream(answer.events(), generation.cancel, settings.keep_alive, settings.limits.stall_seconds)
    try:
        body = await unless_gone(http.receive, answer.whole())
    finally:
        generation.cancel()
    return Response(status_code=499) if body is None else JSONResponse(body)


def check_begun(service: "Service", parts: Sequence[Part]) -> None:
    """Raises ApiError if nothing was written before all of it was aborted: by the deadline, or by a shutdown."""
    if all(part.finish_reason == "abort" and not part.tokens for part in parts):
        if service.is_stopping:
            raise unavailable("the server is shutting down")
        raise ApiError(504, str(parts[0].stop_reason or "the request was aborted"))


def finished(service: "Service", request: Generating, generation: Generation) -> dict[str, Any]:
    """Figures of speculation, where they are asked for and there is one completion."""
    is_wanted = request.speculative_metrics or service.settings.has_spec_metrics
    if not is_wanted or len(generation.completions) != 1:
        return {}
    (completion,) = generation.completions.values()
    return {"metrics": {"speculative_decoding": speculation(completion.stats)}}


def error_event(error: ApiError) -> bytes:
    return event(error.body)
