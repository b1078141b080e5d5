"""Handler of POST /v1/chat/completions."""

from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from foredraft.server.answer_stream import AnswerPiece, AnswerStream
from foredraft.server.chat_format import build_deltas, build_message
from foredraft.server.chat_preparation import PreparedChat, prepare_chat
from foredraft.server.choice_stream import ChoicePart, ChoiceStream
from foredraft.server.errors import ApiError
from foredraft.server.generation import Generation
from foredraft.server.logprobs import format_chat_logprobs, format_prompt_logprobs
from foredraft.server.messages.assistant_message import AssistantMessage
from foredraft.server.responses import (
    ResponseHead,
    build_spec_metrics,
    check_started,
    encode_error_event,
    respond,
)
from foredraft.server.schemas import ChatRequest
from foredraft.server.service import Service
from foredraft.server.sse import DONE_EVENT, encode_event


async def serve(service: Service, http: Request, request: ChatRequest) -> Response:
    """Serve a chat request. Raises ApiError."""
    service.check_name(request.model)
    _check_request(request)
    prepared = await service.run_off_loop(prepare_chat, service, request, has_images=request.has_images)
    generation = await service.submit([prepared.submission])
    return await respond(service, http, request, generation, ChatResponse(service, request, generation, prepared))


def _check_request(request: ChatRequest) -> None:
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs goes with logprobs = true", "top_logprobs")
    if request.stream_options is not None and not request.is_streaming:
        raise ApiError(400, "stream_options go with stream = true", "stream_options")
    max_tokens = request.max_tokens, request.max_completion_tokens
    if None not in max_tokens and max_tokens[0] != max_tokens[1]:
        raise ApiError(400, "max_tokens and max_completion_tokens disagree; give one", "max_tokens")
    for name in ("max_tokens", "max_completion_tokens"):
        if getattr(request, name) == 0:
            raise ApiError(400, f"{name} must be at least 1", name)
    if request.continue_final_message and request.messages[-1].role != "assistant":
        raise ApiError(400, "continue_final_message needs a last message of the assistant", "continue_final_message")


class ChatResponse:
    """Chat response of one generation, as one body or as a stream of events."""

    def __init__(self, service: Service, request: ChatRequest, generation: Generation, prepared: PreparedChat) -> None:
        self.service, self.request, self.generation = service, request, generation
        kind = "chat.completion.chunk" if request.is_streaming else "chat.completion"
        self.head = ResponseHead.for_request(service, request, generation, "chatcmpl", kind)
        self.answers = AnswerStream(service, request, generation, prepared)
        self.choices = self.answers.choices

    def build_usage(self) -> dict[str, Any]:
        return self.answers.count_usage()

    async def collect_body(self) -> dict[str, Any]:
        """Read all deltas and build the response body."""
        parts, messages = [ChoicePart() for _ in self.choices], [AssistantMessage() for _ in self.choices]
        async for piece in self.answers.read():
            messages[piece.index].add(piece.events)
            parts[piece.index].add(piece.part)
        check_started(self.service, parts)
        choices = []
        for choice, part, message in zip(self.choices, parts, messages, strict=True):
            choices.append(self._build_choice(choice, part, message=build_message(message)))
        body = self.head.build_body(choices) | {"usage": self.build_usage()}
        return body | self._build_prompt_fields() | build_spec_metrics(self.service, self.request, self.generation)

    async def stream_events(self) -> AsyncIterator[bytes]:
        """Yield server-sent events, one per delta. An error becomes the last event before [DONE]."""
        options = self.request.stream_options
        is_continuous = options is not None and options.continuous_usage_stats
        try:
            for choice in self.choices:
                delta = {"role": "assistant", "content": ""}
                yield self._encode_chunk([self._build_choice(choice, ChoicePart(), delta=delta)], is_continuous)
            async for piece in self.answers.read():
                choice = self.choices[piece.index]
                for delta, part in self._split_piece(piece):
                    yield self._encode_chunk([self._build_choice(choice, part, delta=delta)], is_continuous)
            last = build_spec_metrics(self.service, self.request, self.generation) | self._build_prompt_fields()
            if options is not None and options.include_usage:
                last["usage"] = self.build_usage()
            if last:
                yield encode_event(self.head.build_body([]) | last)
        except ApiError as error:
            yield encode_error_event(error)
        yield DONE_EVENT

    def _split_piece(self, piece: AnswerPiece) -> list[tuple[dict[str, Any], ChoicePart]]:
        """Return the deltas of a piece. The last one carries its tokens and its end.

        A piece whose text is held back has no delta, unless the client reads something else of it.
        """
        part = piece.part
        if self.answers.is_plain:
            return [({"content": part.text}, part)]
        deltas = build_deltas(piece.events)
        if not deltas and (part.finish_reason is not None or part.entries or part.trace is not None or self._is_exact):
            deltas = [{}]
        return [(delta, ChoicePart()) for delta in deltas[:-1]] + [(delta, part) for delta in deltas[-1:]]

    @property
    def _is_exact(self) -> bool:
        """Whether the client reads the tokens or the usage of every part."""
        options = self.request.stream_options
        return bool(self.request.return_token_ids) or (options is not None and options.continuous_usage_stats)

    def _encode_chunk(self, choices: list[dict[str, Any]], has_usage: bool) -> bytes:
        body = self.head.build_body(choices)
        return encode_event(body | {"usage": self.build_usage()} if has_usage else body)

    def _build_choice(self, choice: ChoiceStream, part: ChoicePart, **content: dict[str, Any]) -> dict[str, Any]:
        """Build one entry of `choices`. `content` is its message (body) or its delta (stream)."""
        request = self.request
        logprobs = None
        if request.logprobs and (part.entries or "message" in content):
            as_ids = bool(request.return_tokens_as_token_ids)
            logprobs = format_chat_logprobs(self.service.vocabulary, part.entries, request.top_logprobs or 0, as_ids)
        body: dict[str, Any] = {
            "index": choice.index,
            **content,
            "logprobs": logprobs,
            "finish_reason": self.answers.name_finish(choice.index, part.finish_reason),
            "stop_reason": part.stop_reason,
        }
        if request.return_token_ids:
            body["token_ids"] = part.tokens
        if part.trace is not None:
            body["foredraft_trace"] = part.trace
        return body

    def _build_prompt_fields(self) -> dict[str, Any]:
        """Build the fields about the prompt that the request asks for."""
        first, request = self.choices[0].transcript, self.request
        fields: dict[str, Any] = {}
        if request.return_token_ids:
            fields["prompt_token_ids"] = first.request.spec.prompt
        if request.prompt_logprobs is not None:
            entries, count = first.prompt_logprobs, request.prompt_logprobs
            fields["prompt_logprobs"] = format_prompt_logprobs(self.service.vocabulary, entries, count)
        return fields
