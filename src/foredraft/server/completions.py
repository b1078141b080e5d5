"""Handler of POST /v1/completions."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from foredraft.server.choice_stream import ChoicePart, ChoiceStream, count_usage
from foredraft.server.errors import ApiError
from foredraft.server.generation import Generation
from foredraft.server.grammars import find_grammar_field, read_grammar
from foredraft.server.infill import InfillTokens
from foredraft.server.logprobs import LogprobEntry, format_completion_logprobs, format_prompt_logprobs
from foredraft.server.prompts import EncodedPrompt, encode_prediction, encode_prompts
from foredraft.server.responses import (
    ResponseHead,
    build_spec_metrics,
    check_started,
    encode_error_event,
    respond,
)
from foredraft.server.sampling_params import build_options, build_sampling
from foredraft.server.schemas import CompletionRequest
from foredraft.server.service import PromptSubmission, Service
from foredraft.server.sse import DONE_EVENT, encode_event

DEFAULT_MAX_TOKENS = 16  # OpenAI's default


async def serve(service: Service, http: Request, request: CompletionRequest) -> Response:
    """Serve a completion request. Raises ApiError."""
    service.check_name(request.model)
    _check_request(request)
    prepared = await service.run_off_loop(_prepare_prompts, service, request)
    generation = await service.submit(prepared.submissions)
    return await respond(
        service, http, request, generation, CompletionResponse(service, request, generation, prepared.encoded)
    )


@dataclass(frozen=True)
class _PreparedRequest:
    submissions: list[PromptSubmission]
    encoded: list[EncodedPrompt]


def _check_request(request: CompletionRequest) -> None:
    if request.best_of not in (None, request.n):
        raise ApiError(400, f"best_of is implemented only for best_of = n ({request.n}); leave it out", "best_of")
    if request.max_tokens == 0 and not request.echo:
        raise ApiError(400, "max_tokens must be at least 1; 0 is allowed only with echo", "max_tokens")
    if request.suffix and request.truncate_prompt_tokens is not None:
        message = "truncate_prompt_tokens would cut the tokens around the suffix; shorten prompt and suffix instead"
        raise ApiError(400, message, "truncate_prompt_tokens")
    if request.suffix and request.echo and request.logprobs is not None:
        message = "with suffix, logprobs of an echoed prompt are in another order than its text; give prompt_logprobs"
        raise ApiError(400, message, "logprobs")
    if request.stream_options is not None and not request.is_streaming:
        raise ApiError(400, "stream_options go with stream = true", "stream_options")


def _prepare_prompts(service: Service, request: CompletionRequest) -> _PreparedRequest:
    """Tokenize and check the prompts. Runs on a thread, because it may take long."""
    prompt_logprobs = request.prompt_logprobs
    has_echo_logprobs = request.echo and request.logprobs is not None
    if service.llm.target.has_encoder and (prompt_logprobs is not None or has_echo_logprobs):
        raise ApiError(
            400, "the input of an encoder has no log-probabilities; leave those of the prompt out", "logprobs"
        )
    if request.echo and request.logprobs is not None:
        prompt_logprobs = max(prompt_logprobs or 0, request.logprobs)
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else max(request.max_tokens, 1)
    sampling = build_sampling(request, max_tokens, request.logprobs, prompt_logprobs, read_grammar(request))
    prediction = encode_prediction(service, request)
    prompts = encode_prompts(service, request)
    if request.suffix and not request.ignore_eos:
        found = InfillTokens.find(service.vocabulary).end_ids
        ends = [token for token in found if token not in service.llm.end_ids]
        sampling = replace(sampling, stop_token_ids=tuple({*sampling.stop_token_ids, *ends}))
    for prompt in prompts:
        service.check_output_length(len(prompt.ids), request.max_tokens)
    options = build_options(request, prediction, service.llm.rule)
    return _PreparedRequest(
        [PromptSubmission(prompt.ids, sampling, options, find_grammar_field(request)) for prompt in prompts], prompts
    )


class CompletionResponse:
    """Completion response of one generation, as one body or as a stream of events."""

    def __init__(
        self, service: Service, request: CompletionRequest, generation: Generation, prompts: list[EncodedPrompt]
    ) -> None:
        self.service, self.request, self.generation, self.prompts = service, request, generation, prompts
        self.head = ResponseHead.for_request(service, request, generation, "cmpl", "text_completion")
        field = find_grammar_field(request)
        self.choices = [
            ChoiceStream.for_transcript(request, transcript, i, field)
            for i, transcript in enumerate(generation.transcripts)
        ]
        for choice in self.choices:
            choice.is_silent = request.max_tokens == 0
            choice.num_chars = len(self._find_prompt(choice).text) if request.echo else 0

    def build_usage(self) -> dict[str, Any]:
        return count_usage(self.choices, self.request.n)

    async def collect_body(self) -> dict[str, Any]:
        """Read all deltas and build the response body."""
        parts = [ChoicePart() for _ in self.choices]
        async for delta in self.generation.read_deltas():
            parts[delta.index].add(self.choices[delta.index].take_delta(delta))
        check_started(self.service, parts)
        pairs = zip(self.choices, parts, strict=True)
        choices = [self._build_choice(choice, part, is_first=True) for choice, part in pairs]
        body = self.head.build_body(choices) | {"usage": self.build_usage()}
        return body | build_spec_metrics(self.service, self.request, self.generation)

    async def stream_events(self) -> AsyncIterator[bytes]:
        """Yield server-sent events, one per delta. An error becomes the last event before [DONE]."""
        options = self.request.stream_options
        try:
            async for delta in self.generation.read_deltas():
                choice = self.choices[delta.index]
                part = choice.take_delta(delta)
                body = self.head.build_body([self._build_choice(choice, part, is_first=not choice.has_started)])
                choice.has_started = True
                if options is not None and options.continuous_usage_stats:
                    body["usage"] = self.build_usage()
                yield encode_event(body)
            last = build_spec_metrics(self.service, self.request, self.generation)
            if options is not None and options.include_usage:
                last["usage"] = self.build_usage()
            if last:
                yield encode_event(self.head.build_body([]) | last)
        except ApiError as error:
            yield encode_error_event(error)
        yield DONE_EVENT

    def _build_choice(self, choice: ChoiceStream, part: ChoicePart, is_first: bool) -> dict[str, Any]:
        """Build one entry of `choices`; the first part of a choice also has the fields about its prompt."""
        request, prompt = self.request, self._find_prompt(choice)
        has_prompt = request.echo and is_first
        body: dict[str, Any] = {
            "index": choice.index,
            "text": prompt.text + part.text if has_prompt else part.text,
            "logprobs": self._build_logprobs(choice, part, prompt if has_prompt else None),
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if request.prompt_logprobs is not None and is_first:
            entries = choice.transcript.prompt_logprobs
            body["prompt_logprobs"] = format_prompt_logprobs(self.service.vocabulary, entries, request.prompt_logprobs)
        if request.return_token_ids:
            body["token_ids"] = part.tokens
            body["prompt_token_ids"] = prompt.ids if is_first else None
        if part.trace is not None:
            body["foredraft_trace"] = part.trace
        return body

    def _build_logprobs(
        self, choice: ChoiceStream, part: ChoicePart, echoed: EncodedPrompt | None
    ) -> dict[str, Any] | None:
        count = self.request.logprobs
        if count is None:
            return None
        tokens, entries, offsets = list(part.tokens), list[LogprobEntry](part.entries), list(part.offsets)
        if echoed is not None:
            tokens = [*echoed.ids, *tokens]
            entries = [*choice.transcript.prompt_logprobs[: len(echoed.ids)], *entries]
            offsets = [*echoed.offsets, *offsets]
        as_ids = bool(self.request.return_tokens_as_token_ids)
        return format_completion_logprobs(self.service.vocabulary, tokens, entries, offsets, count, as_ids)

    def _find_prompt(self, choice: ChoiceStream) -> EncodedPrompt:
        return self.prompts[choice.index // self.request.n]
