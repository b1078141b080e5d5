"""Results of the public API: completions, deltas of a stream, log-probabilities and statistics."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]
# Origin of a token: `plain` = from a step without a draft; `accepted` = a draft token; `corrected` = sampled in place
# of a rejected draft token; `bonus` = sampled after a draft that was accepted whole.
Origin = Literal["plain", "accepted", "corrected", "bonus"]


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probabilities of a token and of the likeliest tokens, after and before the sampling settings."""

    token_id: int
    logprob: float  # log p after temperature, filters and penalties; 0.0 for a greedy token
    raw_logprob: float  # log-softmax of the logits of the model
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), descending
    raw_top: tuple[tuple[int, float], ...] = ()  # (token id, raw logprob), descending


@dataclass(frozen=True)
class Stats:
    """Statistics of one completion."""

    num_tokens: int = 0  # output tokens
    num_drafts: int = 0  # forward passes of the target that verified a draft
    num_drafted: int = 0  # draft tokens
    num_accepted: int = 0  # accepted draft tokens, up to the end of the output
    accepted_at: tuple[int, ...] = ()  # [i]: drafts whose token at depth i + 1 was accepted
    target_passes: int = 0  # forward passes of the target that emitted tokens
    draft_time: float = 0.0  # seconds in the drafter, divided evenly among the requests of a step
    wall_time: float = 0.0  # seconds from admission to the last token
    num_predicted: int = 0  # draft tokens that were copied from the request's prediction
    num_predicted_accepted: int = 0  # accepted ones among them

    @property
    def acceptance_length(self) -> float:
        """Tokens per forward pass of the target, bonus token included; 1.0 is plain decoding."""
        return self.num_tokens / self.target_passes if self.target_passes else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the draft tokens that were accepted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def per_position(self) -> tuple[float, ...]:
        """Share of all drafts that were accepted to depth i + 1 or deeper (unconditional)."""
        return tuple(count / self.num_drafts for count in self.accepted_at) if self.num_drafts else ()


def sum_stats(stats: Iterable[Stats]) -> Stats:
    """Return the sum of the counts and times, so that every rate is a mean over all target passes."""
    rows = list(stats)
    names = [spec.name for spec in fields(Stats) if spec.name != "accepted_at"]
    sums = {name: sum(getattr(row, name) for row in rows) for name in names}
    accepted_at = tuple(sum(column) for column in zip_longest(*(row.accepted_at for row in rows), fillvalue=0))
    return Stats(**sums, accepted_at=accepted_at)


@dataclass(frozen=True)
class StepTree:
    """Token tree that one forward pass of the target verified, for display. Node 0 is the last committed token."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]  # -1 for node 0
    pieces: tuple[str, ...]  # text of each token by itself
    accepted: tuple[int, ...]  # accepted nodes, node 0 first
    emitted: tuple[int, ...]  # tokens that the step emitted; the last one follows the last accepted node


@dataclass(frozen=True)
class Completion:
    """Output of one sample of a prompt."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None = None  # stop string or stop token id that ended the output
    logprobs: list[TokenLogprob] | None = None  # one per output token, if requested
    prompt_logprobs: list[TokenLogprob | None] | None = None  # one per prompt token, None for the first
    stats: Stats = field(default_factory=Stats)
    prompt: str | None = None  # the prompt if it was text
    prompt_token_ids: list[int] = field(default_factory=list)
    index: int = 0  # index among the n samples of the prompt
    verification: str = "match"  # name of the verification rule
    error: str | None = None  # message, with finish_reason "error"


@dataclass(frozen=True)
class Delta:
    """New text and tokens of one completion in a stream."""

    index: int  # prompt index * n + sample index
    text: str  # whole characters only; empty while a character is incomplete
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]  # one per token
    pieces: tuple[str, ...]  # text that each token added; joined they are `text`
    finish_reason: FinishReason | None = None  # set in the last delta
    completion: Completion | None = None  # set in the last delta
    steps: tuple[StepTree, ...] = ()  # one per step, if the request is traced
