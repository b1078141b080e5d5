"""Handler of POST /v1/chat/completions."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from foredraft.errors import ForedraftError
from foredraft.server.chat_format import build_deltas, build_message
from foredraft.server.choice_stream import ChoicePart, ChoiceStream, count_usage
from foredraft.server.errors import ApiError
from foredraft.server.generation import Generation
from foredraft.server.grammars import find_grammar_field, read_grammar
from foredraft.server.logprobs import format_chat_logprobs, format_prompt_logprobs
from foredraft.server.message_stream import MessageStream
from foredraft.server.messages.assistant_message import AssistantMessage
from foredraft.server.messages.reasoning_format import ReasoningStart
from foredraft.server.messages.tools import ToolUse
from foredraft.server.prompts import check_text_size, encode_prediction
from foredraft.server.responses import (
    ResponseHead,
    build_spec_metrics,
    check_started,
    encode_error_event,
    respond,
)
from foredraft.server.sampling_params import build_options, build_sampling
from foredraft.server.schemas import ChatRequest
from foredraft.server.service import PromptSubmission, Service
from foredraft.server.sse import DONE_EVENT, encode_event
from foredraft.server.template_rows import ChatInput
from foredraft.server.templates import EncodedChat
from foredraft.server.tool_request import check_results, read_tool_use, read_variables


async def serve(service: Service, http: Request, request: ChatRequest) -> Response:
    """Serve a chat request. Raises ApiError."""
    service.check_name(request.model)
    _check_request(request)
    prepared = await service.run_off_loop(_prepare_chat, service, request)
    generation = await service.submit([prepared.submission])
    return await respond(service, http, request, generation, ChatResponse(service, request, generation, prepared))


@dataclass(frozen=True)
class PreparedChat:
    """Chat request that is ready for the engine, and what the parser of its answers needs."""

    submission: PromptSubmission
    use: ToolUse
    start: ReasoningStart  # place of the output's first token


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


def _prepare_chat(service: Service, request: ChatRequest) -> PreparedChat:
    """Render, tokenize and check the messages. Runs on a thread, because it may take long."""
    if service.llm.target.has_encoder and request.prompt_logprobs is not None:
        raise ApiError(400, "the input of an encoder has no log-probabilities; leave it out", "prompt_logprobs")
    use = read_tool_use(request)
    own = read_grammar(request)
    chat = _encode_messages(service, request, use)
    ids = chat.ids if request.truncate_prompt_tokens is None else chat.ids[-request.truncate_prompt_tokens :]
    service.check_length(len(ids), "messages")
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    service.check_output_length(len(ids), getattr(request, name), name)
    max_tokens = getattr(request, name) or service.count_free_tokens(len(ids))
    count = (request.top_logprobs or 0) if request.logprobs else None
    start = service.dialect.find_start(chat.end, own)
    grammar_field = find_grammar_field(request) or ("tools" if use.tools else None)
    try:
        grammar = service.dialect.build_grammar(use, own, start)
    except ForedraftError as error:
        raise ApiError(400, f"{grammar_field}: {error}", grammar_field) from None
    sampling = build_sampling(request, max_tokens, count, request.prompt_logprobs, grammar)
    shown_tokens = service.dialect.list_shown_tokens(use)
    options = build_options(request, encode_prediction(service, request), service.llm.rule, shown_tokens)
    return PreparedChat(PromptSubmission(ids, sampling, options, grammar_field), use, start)


def _encode_messages(service: Service, request: ChatRequest, use: ToolUse) -> EncodedChat:
    check_results(request.messages)
    is_truncated = request.truncate_prompt_tokens is not None
    check_text_size(service, sum(message.size for message in request.messages), "messages", is_truncated)
    adds_prompt = request.add_generation_prompt
    if request.continue_final_message and "add_generation_prompt" not in request.model_fields_set:
        adds_prompt = False
    variables = read_variables(request, service.chat_template)
    chat = ChatInput(request.messages, use.described, variables, adds_prompt, request.continue_final_message)
    return service.chat_template.encode_chat(chat)


class ChatResponse:
    """Chat response of one generation, as one body or as a stream of events."""

    def __init__(self, service: Service, request: ChatRequest, generation: Generation, prepared: PreparedChat) -> None:
        self.service, self.request, self.generation = service, request, generation
        kind = "chat.completion.chunk" if request.is_streaming else "chat.completion"
        self.head = ResponseHead.for_request(service, request, generation, "chatcmpl", kind)
        field = prepared.submission.grammar_field
        self.choices = [
            ChoiceStream.for_transcript(request, transcript, i, field)
            for i, transcript in enumerate(generation.transcripts)
        ]
        self.streams = [MessageStream(service.dialect.make_parser(prepared.use, prepared.start)) for _ in self.choices]

    def build_usage(self) -> dict[str, Any]:
        return count_usage(self.choices, self.request.n)

    async def collect_body(self) -> dict[str, Any]:
        """Read all deltas and build the response body."""
        parts, messages = [ChoicePart() for _ in self.choices], [AssistantMessage() for _ in self.choices]
        async for delta in self.generation.read_deltas():
            part = self.choices[delta.index].take_delta(delta)
            messages[delta.index].add(self.streams[delta.index].take_part(part))
            parts[delta.index].add(part)
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
            async for generated in self.generation.read_deltas():
                choice = self.choices[generated.index]
                part = choice.take_delta(generated)
                for delta, piece in self._split_part(choice.index, part):
                    yield self._encode_chunk([self._build_choice(choice, piece, delta=delta)], is_continuous)
            last = build_spec_metrics(self.service, self.request, self.generation) | self._build_prompt_fields()
            if options is not None and options.include_usage:
                last["usage"] = self.build_usage()
            if last:
                yield encode_event(self.head.build_body([]) | last)
        except ApiError as error:
            yield encode_error_event(error)
        yield DONE_EVENT

    def _split_part(self, index: int, part: ChoicePart) -> list[tuple[dict[str, Any], ChoicePart]]:
        """Return the deltas of a part. The last one carries its tokens and its end.

        A part whose text is held back has no delta, unless the client reads something else of it.
        """
        stream = self.streams[index]
        events = stream.take_part(part)
        if stream.is_plain:
            return [({"content": part.text}, part)]
        deltas = build_deltas(events)
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
            "finish_reason": self.streams[choice.index].name_finish(part.finish_reason),
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
