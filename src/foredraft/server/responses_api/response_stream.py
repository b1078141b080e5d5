"""Response of POST /v1/responses, as one body or as a stream of events."""

import itertools
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from foredraft.server.answer_stream import AnswerPiece, AnswerStream
from foredraft.server.choice_stream import ChoicePart
from foredraft.server.errors import ApiError
from foredraft.server.generation import Generation
from foredraft.server.logprobs import format_chat_logprobs
from foredraft.server.responses import build_spec_metrics, check_started
from foredraft.server.responses_api.output_items import Event, OutputWriter
from foredraft.server.responses_api.preparation import PreparedResponse
from foredraft.server.responses_api.response_body import ResponseBody, build_usage
from foredraft.server.responses_api.schema import ResponseRequest
from foredraft.server.service import Service
from foredraft.server.sse import encode_event

Store = Callable[[bytes], None]  # takes the JSON of a complete response


class ItemResponse:
    """Response of one generation.

    Args:
        service: state of the routes of one model.
        request: the request.
        generation: its generation.
        prepared: result of `prepare_response`.
        body: fields of the response.
        store: called with the response when it is complete. None = it is not stored.
    """

    def __init__(
        self,
        service: Service,
        request: ResponseRequest,
        generation: Generation,
        prepared: PreparedResponse,
        body: ResponseBody,
        store: Store | None,
    ) -> None:
        self.head = body.head
        self._service, self._request, self._generation = service, request, generation
        self._body, self._store = body, store
        self._answers = AnswerStream(service, prepared.chat, generation, prepared.prepared)
        self._writer = OutputWriter(request.has_logprobs)
        self._last = ChoicePart()  # all parts

    def build_usage(self) -> dict[str, Any]:
        """Count the tokens so far, as `usage` of a chat completion, for the access log."""
        return self._answers.count_usage()

    async def collect_body(self) -> dict[str, Any]:
        """Read the answer and build the response."""
        async for piece in self._answers.read():
            self._take_piece(piece)
        check_started(self._service, [self._last])
        self._writer.finish(self._item_status)
        return self._build_end()

    async def stream_events(self) -> AsyncIterator[bytes]:
        """Yield server-sent events. An error becomes an event `error`, then `response.failed`."""
        numbers = itertools.count()

        def encode(event: Event) -> bytes:
            numbered = {"type": event["type"], "sequence_number": next(numbers)} | event
            return encode_event(numbered, event["type"])

        started = self._body.build("in_progress", [])
        yield encode({"type": "response.created", "response": started})
        yield encode({"type": "response.in_progress", "response": started})
        try:
            async for piece in self._answers.read():
                for event in self._take_piece(piece):
                    yield encode(event)
            for event in self._writer.finish(self._item_status):
                yield encode(event)
            body = self._build_end()
            yield encode({"type": f"response.{body['status']}", "response": body})
        except ApiError as error:
            details = error.body["error"]
            code = str(details["code"])
            yield encode({"type": "error", "code": code, "message": error.message, "param": error.param})
            failed = self._body.build_failed(self._writer.items, error)
            yield encode({"type": "response.failed", "response": failed})

    def _take_piece(self, piece: AnswerPiece) -> list[Event]:
        self._last.add(piece.part)
        logprobs = []
        if self._request.has_logprobs:
            count = self._request.top_logprobs or 0
            logprobs = format_chat_logprobs(self._service.vocabulary, piece.part.entries, count)["content"]
        return self._writer.write(piece.events, logprobs)

    @property
    def _item_status(self) -> str:
        """Status of the last item."""
        return "completed" if self._last.finish_reason == "stop" else "incomplete"

    def _build_end(self) -> dict[str, Any]:
        """Build the response of a generation that has ended, and store it unless it was aborted."""
        tokens = self._answers.count_usage()
        num_cached = tokens["prompt_tokens_details"]["cached_tokens"]
        num_written = max(self._service.count_cacheable(tokens["prompt_tokens"]) - num_cached, 0)
        usage = build_usage(tokens, self._answers.count_reasoning_tokens(0), num_written)
        metrics = build_spec_metrics(self._service, self._request, self._generation)
        output = self._writer.items
        if self._last.finish_reason == "abort":
            error = ApiError(504, str(self._last.stop_reason or "the request was aborted"))
            return self._body.build_failed(output, error) | {"usage": usage} | metrics
        status = "incomplete" if self._last.finish_reason == "length" else "completed"
        body = self._body.build(status, output, usage) | metrics
        if self._store is not None:
            self._store(json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode())
        return body
