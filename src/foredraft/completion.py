"""What the user gets back: completions, stream deltas, log-probabilities, figures."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]
# How a token came to be: `plain` when nothing was drafted, `accepted` draft, the target's `corrected` token in place
# of a rejected one, the `bonus` token after a fully accepted draft.
Origin = Literal["plain", "accepted", "corrected", "bonus"]


@dataclass(frozen=True)
class TokenLogprob:
    """The chosen token and the likeliest ones, under the law drawn from and under the model's own."""

    token_id: int
    logprob: float  # log p after temperature, filters and penalties; 0.0 for a greedy choice
    raw_logprob: float  # log-softmax of the logits as the model gave them
    top: tuple[tuple[int, float], ...] = ()  # (id, logprob), falling
    raw_top: tuple[tuple[int, float], ...] = ()  # (id, raw logprob), falling


@dataclass(frozen=True)
class Stats:
    """Figures of one completion."""

    num_tokens: int = 0  # emitted
    num_drafts: int = 0  # target passes that verified a draft
    num_drafted: int = 0  # tokens drafted
    num_accepted: int = 0  # drafted tokens kept, after cutting at the end of the text
    accepted_at: tuple[int, ...] = ()  # [i]: drafts whose token at depth i + 1 was kept
    target_passes: int = 0  # passes that emitted tokens
    draft_time: float = 0.0  # seconds, shared evenly with the batch
    wall_time: float = 0.0  # seconds from admission to the last token
    num_predicted: int = 0  # of the tokens drafted, those copied from the request's prediction
    num_predicted_accepted: int = 0  # of them, those kept

    @property
    def acceptance_length(self) -> float:
        """Tokens per target pass, bonus included; 1.0 is plain decoding."""
        return self.num_tokens / self.target_passes if self.target_passes else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafted tokens that were kept."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def per_position(self) -> tuple[float, ...]:
        """Unconditional: drafts kept to depth i + 1 over all drafts."""
        return tuple(count / self.num_drafts for count in self.accepted_at) if self.num_drafts else ()


@dataclass(frozen=True)
class StepTree:
    """What one target pass verified of a draft, for those who watch: node 0 is the last committed token."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]  # -1 for node 0
    pieces: tuple[str, ...]  # each node's token as text, on its own
    accepted: tuple[int, ...]  # nodes that were kept, node 0 first
    emitted: tuple[int, ...]  # the tokens the pass put out: the last follows the last kept node


@dataclass(frozen=True)
class Completion:
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None = None  # the stop string or stop id that ended it
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None  # the first prompt token has none
    stats: Stats = field(default_factory=Stats)
    prompt: str | None = None  # the prompt as given, if it was text
    prompt_token_ids: list[int] = field(default_factory=list)
    index: int = 0  # which of the n samples
    verification: str = "match"  # the rule that ran; a lossy one is named here
    error: str | None = None  # with finish_reason "error"


@dataclass(frozen=True)
class Delta:
    """New text of one completion while it streams."""

    index: int  # prompt index * n + sample
    text: str  # whole characters only; may be empty while one is incomplete
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]  # one per token
    pieces: tuple[str, ...]  # the text each token added; together they are `text`
    finish_reason: FinishReason | None = None
    completion: Completion | None = None  # with the last delta
    steps: tuple[StepTree, ...] = ()  # of a request that asked to be traced
