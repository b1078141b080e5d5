"""State of one response choice, and the parts that deltas add to it; shared by both routes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from foredraft.engine.transcript import Transcript
from foredraft.outputs import Delta, TokenLogprob
from foredraft.server.errors import ApiError
from foredraft.server.schemas import GenerationRequest


@dataclass
class ChoicePart:
    """Content of one delta, or of all deltas of a choice."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    entries: list[TokenLogprob] = field(default_factory=list)  # one per token; empty without `logprobs`
    offsets: list[int] = field(default_factory=list)  # offset of each token's text in the text of the choice
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    trace: dict[str, Any] | None = None

    def add(self, other: "ChoicePart") -> None:
        """Append a later part."""
        self.text += other.text
        self.tokens += other.tokens
        self.entries += other.entries
        self.offsets += other.offsets
        self.finish_reason, self.stop_reason = other.finish_reason, other.stop_reason
        if other.trace is not None:
            self.trace = other.trace if self.trace is None else _join_traces(self.trace, other.trace)


@dataclass
class ChoiceStream:
    """Converter of the deltas of one transcript, in order, to ChoiceParts."""

    index: int
    transcript: Transcript
    num_chars: int = 0  # characters sent so far, an echoed prompt included
    num_tokens: int = 0  # tokens sent so far
    has_started: bool = False  # the first chunk was sent
    has_trace: bool = False  # the request sets foredraft_trace
    includes_stop: bool = False  # the request sets include_stop_str_in_output
    grammar_field: str | None = None  # field of the request that sets its grammar
    is_silent: bool = False  # max_tokens = 0 with echo: generated tokens are not sent

    @classmethod
    def for_transcript(
        cls, request: GenerationRequest, transcript: Transcript, index: int, grammar_field: str | None
    ) -> "ChoiceStream":
        return cls(
            index,
            transcript,
            has_trace=request.foredraft_trace,
            includes_stop=request.include_stop_str_in_output,
            grammar_field=grammar_field,
        )

    def take_delta(self, delta: Delta) -> ChoicePart:
        """Convert a delta.

        Raises:
            ApiError: the request ended with an error: 400 for a grammar that failed during generation, else 500.
        """
        if delta.finish_reason == "error":
            message = (delta.completion and delta.completion.error) or "the request failed"
            matcher = self.transcript.request.matcher
            if matcher is not None and matcher.error is not None:
                raise ApiError(400, message, self.grammar_field)
            raise ApiError(500, message)
        if self.is_silent:
            return ChoicePart(finish_reason="length" if delta.finish_reason else None)
        end = self.num_tokens + len(delta.token_ids)
        part = ChoicePart(delta.text, list(delta.token_ids), self.transcript.logprobs[self.num_tokens : end])
        self.num_tokens = end
        for piece in delta.pieces[: len(delta.token_ids)]:
            part.offsets.append(self.num_chars)
            self.num_chars += len(piece)
        if delta.finish_reason is not None:
            part.finish_reason = delta.finish_reason
            part.stop_reason = self.transcript.stop_reason
            if delta.finish_reason == "abort":
                part.stop_reason = self.transcript.error
            if self.includes_stop and isinstance(part.stop_reason, str):
                part.text += part.stop_reason
        if self.has_trace:
            part.trace = build_trace(delta)
        return part


def build_trace(delta: Delta) -> dict[str, Any]:
    """Build the `foredraft_trace` field: tokens, their text and origins, and the token tree of every step.

    In a tree of `steps`, node 0 is the last committed token, `accepted` lists the accepted nodes, and every other node
    is a rejected draft token.
    """
    return {
        "token_ids": list(delta.token_ids),
        "pieces": list(delta.pieces),
        "origins": list(delta.origins),
        "steps": [asdict(step) for step in delta.steps],
    }


def _join_traces(one: dict[str, list[Any]], other: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: one[name] + other[name] for name in one}


def count_usage(choices: Sequence[ChoiceStream], n: int) -> dict[str, Any]:
    """Count the tokens so far for `usage`. A prompt counts once for all of its `n` samples."""
    first = choices[::n]
    prompt = sum(len(choice.transcript.request.spec.input_tokens) for choice in first)
    output = sum(choice.num_tokens for choice in choices)
    cached = sum(choice.transcript.request.num_cached_tokens or 0 for choice in first)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if any(choice.transcript.request.spec.options.prediction for choice in choices):
        usage["completion_tokens_details"] = _count_predicted(choices)
    return usage


def _count_predicted(choices: Sequence[ChoiceStream]) -> dict[str, int]:
    """Count the accepted and rejected tokens that were drafted from the prediction.

    Unlike in OpenAI's API, rejected tokens are not part of completion_tokens.
    """
    drafted = sum(choice.transcript.stats_recorder.num_predicted for choice in choices)
    accepted = sum(choice.transcript.stats_recorder.num_predicted_accepted for choice in choices)
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
