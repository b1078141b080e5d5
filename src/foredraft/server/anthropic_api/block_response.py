"""Response of POST /v1/messages, as one body or as a stream of events."""

from collections.abc import AsyncIterator
from typing import Any

from foredraft.server.answer_stream import AnswerStream
from foredraft.server.anthropic_api.error_format import build_error_body
from foredraft.server.anthropic_api.output_blocks import BlockWriter
from foredraft.server.anthropic_api.preparation import PreparedMessage
from foredraft.server.anthropic_api.schema import MessageRequest
from foredraft.server.choice_stream import ChoicePart
from foredraft.server.errors import ApiError, make_unavailable_error
from foredraft.server.generation import Generation
from foredraft.server.responses import ResponseHead, build_spec_metrics
from foredraft.server.service import Service
from foredraft.server.sse import encode_event


class BlockResponse:
    """Response of one generation.

    Args:
        service: state of the routes of one model.
        request: the request.
        generation: its generation.
        prepared: result of `prepare_message`.
        head: fields that do not change.
    """

    def __init__(
        self,
        service: Service,
        request: MessageRequest,
        generation: Generation,
        prepared: PreparedMessage,
        head: ResponseHead,
    ) -> None:
        self.head = head
        self._service, self._request, self._generation = service, request, generation
        self._answers = AnswerStream(service, prepared.chat, generation, prepared.prepared)
        self._writer = BlockWriter()
        self._last = ChoicePart()  # without text and tokens

    def build_usage(self) -> dict[str, Any]:
        """Count the tokens so far, as `usage` of a chat completion, for the access log."""
        return self._answers.count_usage()

    async def collect_body(self) -> dict[str, Any]:
        """Read the answer and build the message."""
        async for piece in self._answers.read():
            self._writer.write(piece.events)
            self._last = piece.part
        self._check_end()
        content = [block.build() for block in self._writer.blocks]
        body = self._build_message(content) | self._build_stop() | {"usage": self._count_usage()}
        return body | build_spec_metrics(self._service, self._request, self._generation)

    async def stream_events(self) -> AsyncIterator[bytes]:
        """Yield server-sent events. An error becomes the last one.

        The first event waits for the first token, because only then the tokens of the prompt cache are counted.
        """
        has_started = False
        try:
            async for piece in self._answers.read():
                if not has_started:
                    yield self._encode_start()
                    has_started = True
                for event in self._writer.write(piece.events):
                    yield encode_event(event, event["type"])
                self._last = piece.part
            self._check_end()
            for event in self._writer.finish():
                yield encode_event(event, event["type"])
            end = {"type": "message_delta", "delta": self._build_stop(), "usage": self._count_usage()}
            end |= build_spec_metrics(self._service, self._request, self._generation)
            yield encode_event(end, "message_delta")
            yield encode_event({"type": "message_stop"}, "message_stop")
        except ApiError as error:
            yield encode_event(build_error_body(error.status, error.message, error.param), "error")

    def _check_end(self) -> None:
        """Raise ApiError for a generation that was aborted: the API has no stop reason for it."""
        if self._last.finish_reason == "abort":
            if self._service.is_stopping:
                raise make_unavailable_error(self._service.stop_message)
            raise ApiError(504, str(self._last.stop_reason or "the request was aborted"))

    def _encode_start(self) -> bytes:
        stop = {"stop_reason": None, "stop_sequence": None}
        message = self._build_message([]) | stop | {"usage": self._count_usage()}
        return encode_event({"type": "message_start", "message": message}, "message_start")

    def _build_message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        body = {"id": self.head.id, "type": "message", "role": "assistant", "model": self.head.model}
        return body | self.head.notes | {"content": content}

    def _build_stop(self) -> dict[str, Any]:
        """Build the reason of the end, and the stop sequence that it found."""
        text = self._last.stop_reason
        sequence = text if isinstance(text, str) and self._last.finish_reason == "stop" else None
        return {"stop_reason": self._name_stop(sequence), "stop_sequence": sequence}

    def _name_stop(self, sequence: str | None) -> str:
        if self._last.finish_reason == "length":
            is_whole = self._answers.count_usage()["completion_tokens"] >= self._request.max_tokens
            return "max_tokens" if is_whole else "model_context_window_exceeded"
        if sequence is not None:
            return "stop_sequence"
        return "tool_use" if self._writer.has_calls else "end_turn"

    def _count_usage(self) -> dict[str, Any]:
        """Count the tokens so far. Those of the prompt are read from the cache, written to it, or neither."""
        tokens = self._answers.count_usage()
        num_read = tokens["prompt_tokens_details"]["cached_tokens"]
        num_written = max(self._service.count_cacheable(tokens["prompt_tokens"]) - num_read, 0)
        return {
            "input_tokens": tokens["prompt_tokens"] - num_read - num_written,
            "cache_creation_input_tokens": num_written,
            "cache_read_input_tokens": num_read,
            "output_tokens": tokens["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": self._answers.count_reasoning_tokens(0)}
            | tokens.get("completion_tokens_details", {}),
        }
