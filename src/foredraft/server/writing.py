"""One choice while it is written: what a delta adds to it, streamed or collected alike."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from foredraft.completion import Delta, TokenLogprob
from foredraft.engine.output import Transcript
from foredraft.server.errors import ApiError
from foredraft.server.grammars import grammar_field
from foredraft.server.protocol import Generating


@dataclass
class Part:
    """What one delta, or all of them, said."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    entries: list[TokenLogprob] = field(default_factory=list)  # one per token where log-probabilities are wanted
    offsets: list[int] = field(default_factory=list)  # where each token's text begins, from the start of the choice
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    trace: dict[str, Any] | None = None

    def add(self, other: "Part") -> None:
        self.text += other.text
        self.tokens += other.tokens
        self.entries += other.entries
        self.offsets += other.offsets
        self.finish_reason, self.stop_reason = other.finish_reason, other.stop_reason
        if other.trace is not None:
            self.trace = other.trace if self.trace is None else _joined(self.trace, other.trace)


@dataclass
class Choice:
    """Takes the deltas of one transcript in order."""

    index: int
    transcript: Transcript
    length: int = 0  # characters written, an echoed prompt included
    used: int = 0  # tokens written
    has_begun: bool = False
    has_trace: bool = False
    includes_stop: bool = False
    grammar_field: str | None = None  # what asked for a grammar
    is_silent: bool = False  # an echo alone was wanted: what is generated is not written

    @classmethod
    def of(cls, request: Generating, transcript: Transcript, index: int) -> "Choice":
        return cls(
            index,
            transcript,
            has_trace=request.foredraft_trace,
            includes_stop=request.include_stop_str_in_output,
            grammar_field=grammar_field(request),
        )

    def take(self, delta: Delta) -> Part:
        """Raises ApiError if the text ended in an error: of ours, or of a grammar that only its text shows."""
        if delta.finish_reason == "error":
            message = (delta.completion and delta.completion.error) or "the request failed"
            matcher = self.transcript.request.matcher
            if matcher is not None and matcher.error is not None:
                raise ApiError(400, message, self.grammar_field)
            raise ApiError(500, message)
        if self.is_silent:
            return Part(finish_reason="length" if delta.finish_reason else None)
        end = self.used + len(delta.token_ids)
        part = Part(delta.text, list(delta.token_ids), self.transcript.logprobs[self.used : end])
        self.used = end
        for piece in delta.pieces[: len(delta.token_ids)]:
            part.offsets.append(self.length)
            self.length += len(piece)
        if delta.finish_reason is not None:
            part.finish_reason = delta.finish_reason
            part.stop_reason = self.transcript.stop_reason
            if delta.finish_reason == "abort":
                part.stop_reason = self.transcript.error
            if self.includes_stop and isinstance(part.stop_reason, str):
                part.text += part.stop_reason
        if self.has_trace:
            part.trace = trace_of(delta)
        return part


def trace_of(delta: Delta) -> dict[str, Any]:
    """How the tokens of a delta came to be. `steps`: the tree of every pass of the target; node 0 is the last token
    before it, `accepted` the nodes that were kept, and every other node a rejected draft."""
    return {
        "token_ids": list(delta.token_ids),
        "pieces": list(delta.pieces),
        "origins": list(delta.origins),
        "steps": [asdict(step) for step in delta.steps],
    }


def _joined(one: dict[str, list[Any]], other: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: one[name] + other[name] for name in one}


def usage_of(choices: Sequence[Choice], n: int) -> dict[str, Any]:
    """Tokens so far. The samples of a prompt share it, so it counts once."""
    first = choices[::n]
    prompt = sum(choice.transcript.request.num_given for choice in first)
    output = sum(choice.used for choice in choices)
    cached = sum(choice.transcript.request.num_cached or 0 for choice in first)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if any(choice.transcript.request.prediction for choice in choices):
        usage["completion_tokens_details"] = _predicted(choices)
    return usage


def _predicted(choices: Sequence[Choice]) -> dict[str, int]:
    """Tokens drafted from the prediction: those that are in the completion, and those that the target rejected. Unlike
    OpenAI's, the rejected are no part of completion_tokens."""
    drafted = sum(choice.transcript.num_predicted for choice in choices)
    accepted = sum(choice.transcript.num_predicted_accepted for choice in choices)
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
