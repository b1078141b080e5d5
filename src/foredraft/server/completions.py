"""POST /v1/completions."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from foredraft.server.answers import Head, check_begun, error_event, finished, respond
from foredraft.server.errors import ApiError
from foredraft.server.generation import Generation
from foredraft.server.grammars import grammar_field
from foredraft.server.logprobs import Entry, completion_logprobs, prompt_logprobs
from foredraft.server.parameters import options_of, sampling_of
from foredraft.server.prompts import Encoded, encode_prompts
from foredraft.server.protocol import CompletionRequest
from foredraft.server.service import Job, Service
from foredraft.server.sse import DONE, event
from foredraft.server.writing import Choice, Part, usage_of

DEFAULT_TOKENS = 16


async def serve(service: Service, http: Request, request: CompletionRequest) -> Response:
    """Raises ApiError."""
    service.check_name(request.model)
    _check(request)
    work = await service.off_loop(_prepare, service, request)
    generation = await service.submit(work.jobs)
    return await respond(service, http, request, generation, Answer(service, request, generation, work.prompts))


@dataclass(frozen=True)
class _Work:
    jobs: list[Job]
    prompts: list[Encoded]


def _check(request: CompletionRequest) -> None:
    if request.best_of not in (None, request.n):
        raise ApiError(400, f"best_of is implemented for best_of = n ({request.n}) alone; leave it out", "best_of")
    if request.max_tokens == 0 and not request.echo:
        raise ApiError(400, "max_tokens must be at least 1; 0 goes with echo alone", "max_tokens")
    if request.stream_options is not None and not request.is_streaming:
        raise ApiError(400, "stream_options go with stream = true", "stream_options")


def _prepare(service: Service, request: CompletionRequest) -> _Work:
    """Tokenising and checking; not on the event loop."""
    wanted = request.prompt_logprobs
    if service.llm.target.has_encoder and (wanted is not None or (request.echo and request.logprobs is not None)):
        raise ApiError(400, "what an encoder reads has no log-probabilities; leave those of the prompt out", "logprobs")
    if request.echo and request.logprobs is not None:
        wanted = max(wanted or 0, request.logprobs)
    most = DEFAULT_TOKENS if request.max_tokens is None else max(request.max_tokens, 1)
    sampling = sampling_of(request, most, request.logprobs, wanted)
    prediction = service.predicted(request)
    prompts = encode_prompts(service, request)
    for prompt in prompts:
        service.check_room(len(prompt.ids), request.max_tokens)
    options = options_of(request, prediction)
    return _Work([Job(prompt.ids, sampling, options, grammar_field(request)) for prompt in prompts], prompts)


class Answer:
    """The response, whole or in pieces."""

    def __init__(
        self, service: Service, request: CompletionRequest, generation: Generation, prompts: list[Encoded]
    ) -> None:
        self.service, self.request, self.generation, self.prompts = service, request, generation, prompts
        self.head = Head.of(service, request, "cmpl", "text_completion")
        self.choices = [Choice.of(request, t, i) for i, t in enumerate(generation.transcripts)]
        for choice in self.choices:
            choice.is_silent = request.max_tokens == 0
            choice.length = len(self._prompt_of(choice).text) if request.echo else 0

    def usage(self) -> dict[str, Any]:
        return usage_of(self.choices, self.request.n)

    async def whole(self) -> dict[str, Any]:
        parts = [Part() for _ in self.choices]
        async for delta in self.generation.deltas():
            parts[delta.index].add(self.choices[delta.index].take(delta))
        check_begun(self.service, parts)
        pairs = zip(self.choices, parts, strict=True)
        choices = [self._choice(choice, part, is_first=True) for choice, part in pairs]
        body = self.head.body(choices) | {"usage": self.usage()}
        return body | finished(self.service, self.request, self.generation)

    async def events(self) -> AsyncIterator[bytes]:
        options = self.request.stream_options
        try:
            async for delta in self.generation.deltas():
                choice = self.choices[delta.index]
                part = choice.take(delta)
                body = self.head.body([self._choice(choice, part, is_first=not choice.has_begun)])
                choice.has_begun = True
                if options is not None and options.continuous_usage_stats:
                    body["usage"] = self.usage()
                yield event(body)
            last = finished(self.service, self.request, self.generation)
            if options is not None and options.include_usage:
                last["usage"] = self.usage()
            if last:
                yield event(self.head.body([]) | last)
        except ApiError as error:
            yield error_event(error)
        yield DONE

    def _choice(self, choice: Choice, part: Part, is_first: bool) -> dict[str, Any]:
        request, prompt = self.request, self._prompt_of(choice)
        has_prompt = request.echo and is_first
        body: dict[str, Any] = {
            "index": choice.index,
            "text": prompt.text + part.text if has_prompt else part.text,
            "logprobs": self._logprobs(choice, part, prompt if has_prompt else None),
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if request.prompt_logprobs is not None and is_first:
            entries = choice.transcript.prompt_logprobs
            body["prompt_logprobs"] = prompt_logprobs(self.service.vocabulary, entries, request.prompt_logprobs)
        if request.return_token_ids:
            body["token_ids"] = part.tokens
            body["prompt_token_ids"] = prompt.ids if is_first else None
        if part.trace is not None:
            body["foredraft_trace"] = part.trace
        return body

    def _logprobs(self, choice: Choice, part: Part, echoed: Encoded | None) -> dict[str, Any] | None:
        count = self.request.logprobs
        if count is None:
            return None
        tokens, entries, offsets = list(part.tokens), list[Entry](part.entries), list(part.offsets)
        if echoed is not None:
            tokens = [*echoed.ids, *tokens]
            entries = [*choice.transcript.prompt_logprobs[: len(echoed.ids)], *entries]
            offsets = [*echoed.offsets, *offsets]
        as_ids = bool(self.request.return_tokens_as_token_ids)
        return completion_logprobs(self.service.vocabulary, tokens, entries, offsets, count, as_ids)

    def _prompt_of(self, choice: Choice) -> Encoded:
        return self.prompts[choice.index // self.request.n]
