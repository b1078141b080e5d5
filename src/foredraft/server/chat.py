"""POST /v1/chat/completions."""

from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from foredraft.server.answers import Head, check_begun, error_event, finished, respond
from foredraft.server.errors import ApiError
from foredraft.server.generation import Generation
from foredraft.server.grammars import grammar_field
from foredraft.server.logprobs import chat_logprobs, prompt_logprobs
from foredraft.server.parameters import options_of, sampling_of
from foredraft.server.prompts import check_size
from foredraft.server.protocol import ChatRequest
from foredraft.server.service import Job, Service
from foredraft.server.sse import DONE, event
from foredraft.server.writing import Choice, Part, usage_of


async def serve(service: Service, http: Request, request: ChatRequest) -> Response:
    """Raises ApiError."""
    service.check_name(request.model)
    _check(request)
    job = await service.off_loop(_prepare, service, request)
    generation = await service.submit([job])
    return await respond(service, http, request, generation, Answer(service, request, generation))


def _check(request: ChatRequest) -> None:
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs goes with logprobs = true", "top_logprobs")
    if request.stream_options is not None and not request.is_streaming:
        raise ApiError(400, "stream_options go with stream = true", "stream_options")
    both = request.max_tokens, request.max_completion_tokens
    if None not in both and both[0] != both[1]:
        raise ApiError(400, "max_tokens and max_completion_tokens disagree; give one", "max_tokens")
    for name in ("max_tokens", "max_completion_tokens"):
        if getattr(request, name) == 0:
            raise ApiError(400, f"{name} must be at least 1", name)
    if request.continue_final_message and request.messages[-1].role != "assistant":
        raise ApiError(400, "continue_final_message needs a last message of the assistant", "continue_final_message")


def _prepare(service: Service, request: ChatRequest) -> Job:
    """Rendering, tokenising and checking; not on the event loop."""
    if service.llm.target.has_encoder and request.prompt_logprobs is not None:
        raise ApiError(400, "what an encoder reads has no log-probabilities; leave it out", "prompt_logprobs")
    has_prompt = request.add_generation_prompt
    if request.continue_final_message and "add_generation_prompt" not in request.model_fields_set:
        has_prompt = False
    is_cut = request.truncate_prompt_tokens is not None
    check_size(service, sum(len(message.text) for message in request.messages), "messages", is_cut)
    ids = service.templates.encode(request.messages, has_prompt, request.continue_final_message)
    if request.truncate_prompt_tokens is not None:
        ids = ids[-request.truncate_prompt_tokens :]
    service.check_length(len(ids), "messages")
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    service.check_room(len(ids), getattr(request, name), name)
    most = getattr(request, name) or service.room_after(len(ids))
    count = (request.top_logprobs or 0) if request.logprobs else None
    sampling = sampling_of(request, most, count, request.prompt_logprobs)
    return Job(ids, sampling, options_of(request, service.predicted(request)), grammar_field(request))


class Answer:
    """The response, whole or in pieces."""

    def __init__(self, service: Service, request: ChatRequest, generation: Generation) -> None:
        self.service, self.request, self.generation = service, request, generation
        kind = "chat.completion.chunk" if request.is_streaming else "chat.completion"
        self.head = Head.of(service, request, "chatcmpl", kind)
        self.choices = [Choice.of(request, t, i) for i, t in enumerate(generation.transcripts)]

    def usage(self) -> dict[str, Any]:
        return usage_of(self.choices, self.request.n)

    async def whole(self) -> dict[str, Any]:
        parts = [Part() for _ in self.choices]
        async for delta in self.generation.deltas():
            parts[delta.index].add(self.choices[delta.index].take(delta))
        check_begun(self.service, parts)
        choices = []
        for choice, part in zip(self.choices, parts, strict=True):
            message = {"role": "assistant", "content": part.text, "refusal": None}
            choices.append(self._choice(choice, part, message=message))
        body = self.head.body(choices) | {"usage": self.usage()}
        return body | self._prompt() | finished(self.service, self.request, self.generation)

    async def events(self) -> AsyncIterator[bytes]:
        options = self.request.stream_options
        is_continuous = options is not None and options.continuous_usage_stats
        try:
            for choice in self.choices:
                delta = {"role": "assistant", "content": ""}
                yield self._event([self._choice(choice, Part(), delta=delta)], is_continuous)
            async for piece in self.generation.deltas():
                choice = self.choices[piece.index]
                part = choice.take(piece)
                yield self._event([self._choice(choice, part, delta={"content": part.text})], is_continuous)
            last = finished(self.service, self.request, self.generation) | self._prompt()
            if options is not None and options.include_usage:
                last["usage"] = self.usage()
            if last:
                yield event(self.head.body([]) | last)
        except ApiError as error:
            yield error_event(error)
        yield DONE

    def _event(self, choices: list[dict[str, Any]], has_usage: bool) -> bytes:
        body = self.head.body(choices)
        return event(body | {"usage": self.usage()} if has_usage else body)

    def _choice(self, choice: Choice, part: Part, **content: dict[str, Any]) -> dict[str, Any]:
        """`content`: the message, or what is new of it."""
        request = self.request
        logprobs = None
        if request.logprobs and (part.entries or "message" in content):
            as_ids = bool(request.return_tokens_as_token_ids)
            logprobs = chat_logprobs(self.service.vocabulary, part.entries, request.top_logprobs or 0, as_ids)
        body: dict[str, Any] = {
            "index": choice.index,
            **content,
            "logprobs": logprobs,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if request.return_token_ids:
            body["token_ids"] = part.tokens
        if part.trace is not None:
            body["foredraft_trace"] = part.trace
        return body

    def _prompt(self) -> dict[str, Any]:
        """What was asked to be said of the prompt."""
        first, request = self.choices[0].transcript, self.request
        found: dict[str, Any] = {}
        if request.return_token_ids:
            found["prompt_token_ids"] = first.request.prompt
        if request.prompt_logprobs is not None:
            entries, count = first.prompt_logprobs, request.prompt_logprobs
            found["prompt_logprobs"] = prompt_logprobs(self.service.vocabulary, entries, count)
        return found
