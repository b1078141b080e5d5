"""A request: the one mutable record, and what a step says about it to a drafter."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from foredraft.grammar import Matcher
from foredraft.sampling import History, Sampling
from foredraft.source import Source


@dataclass(frozen=True)
class RequestOptions:
    """What a request may say beside how its tokens are drawn."""

    priority: int = 0  # lower runs first
    num_speculative_tokens: int | None = None  # longest draft, fixed; 0 = none; None = the engine's choice
    prediction: tuple[int, ...] = ()  # tokens the output is expected to hold, to draft from
    salt: bytes = b""  # prefix pages and past outputs are shared among requests of one salt only
    is_traced: bool = False  # every delta carries the trees of its steps


class State(Enum):
    """Where a request is. One that was preempted waits too; what it had computed may be lost."""

    NEW = auto()
    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    OVER = auto()


@dataclass(eq=False)  # two requests are never the same, however alike
class Request:
    """One text being generated. The scheduler alone changes it."""

    slot: int  # stable small integer while the request runs; drafters key their state by it
    prompt: list[int]
    sampling: Sampling
    seed: int  # the request's own, or drawn for it when it gave none
    sample: int = 0  # which of the n samples of one prompt
    eos_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    max_length: int = 1 << 62  # context window: prompt and output together
    num_drafts: int | None = None  # longest draft, fixed by the request; None = the engine's choice
    verify: str = "match"
    priority: int = 0  # lower runs first and is preempted last
    salt: bytes = (
        b""  # prefix pages are shared among requests of one salt: the caller's, and what else a page depends on
    )
    tenant: bytes = b""  # the caller's salt alone: past outputs are drafted from for requests of one tenant
    after: "Request | None" = None  # the first sample of the same prompt, whose pages this one waits for
    prediction: tuple[int, ...] = ()  # what the output is expected to be: tokens to draft from
    source: Source | None = None  # what the encoder reads, where the model has one; `prompt` is then the decoder's
    is_traced: bool = False  # every delta carries the trees of its steps
    matcher: Matcher | None = None  # of sampling.grammar, for this text alone
    output: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    computed: int = 0  # tokens whose KV the target holds: a prefix of `tokens`
    state: State = State.NEW
    arrival: int = -1  # place in the order of coming
    last_step: int = -1  # the step it ran in last
    num_cached: int | None = None  # prompt tokens that the prefix cache had when it first ran; None = it has not yet
    hashes: list[bytes] = field(default_factory=list)  # of its full pages, each with all before it
    inserted: set[bytes] = field(default_factory=set)  # those of them that it brought into the prefix cache
    num_found: int = 0  # leading pages that it took from the prefix cache and did not write
    num_sealed: int = 0  # leading pages the prefix cache has taken up
    num_noted: int = 0  # leading ones of them whose draft KV it knows to be right

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def num_given(self) -> int:
        """Tokens that the user gave: those the encoder reads, where there is one."""
        return len(self.source.tokens) if self.source is not None and self.source.tokens else len(self.prompt)

    @property
    def tokens(self) -> list[int]:
        """Prompt and output: every committed token."""
        return self.prompt + self.output

    def token(self, index: int) -> int:
        start = len(self.prompt)
        return self.prompt[index] if index < start else self.output[index - start]

    def slice(self, start: int, stop: int) -> list[int]:
        """Committed tokens [start, stop) without building the whole list."""
        split = len(self.prompt)
        return self.prompt[start:stop] + self.output[max(0, start - split) : max(0, stop - split)]

    @property
    def room(self) -> int:
        """Depth a draft may have: the last token allowed is always the target's own."""
        return min(self.sampling.max_tokens - len(self.output), self.max_length - self.num_tokens) - 1

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids that end the text: the model's, unless ignored, and the request's own."""
        own = frozenset(self.sampling.stop_token_ids)
        return own if self.sampling.ignore_eos else own | self.eos_ids

    def history(self, drafted: Sequence[int] = ()) -> History:
        """What precedes a row of logits after the committed tokens and a drafted path."""
        return History(self.prompt, self.output, drafted, tuple(self.end_ids), self.bad_words, self.matcher)


@dataclass(frozen=True)
class Batch:
    """Who runs in this step. Index b is a row of every tensor of the step."""

    requests: tuple[Request, ...]
    chunks: tuple[int, ...]  # committed tokens to compute: `computed` moves on by this much before any draft
    budgets: tuple[int, ...]  # drafted nodes allowed; 0 where the chunk does not reach the last committed token
    page_size: int = 16  # tokens of one page of every request's table

    def __len__(self) -> int:
        return len(self.requests)

    def root(self, b: int) -> int:
        """The last committed token of a request's chunk, below which its draft stands."""
        request = self.requests[b]
        return request.token(request.computed + self.chunks[b] - 1)

    def drafting(self) -> list[int]:
        """Indices of the requests that may be drafted for."""
        return [b for b, budget in enumerate(self.budgets) if budget > 0]

    @property
    def scored(self) -> list[bool]:
        """Whether the chunk reaches the last committed token, so that the pass yields a new one."""
        return [r.computed + chunk == r.num_tokens for r, chunk in zip(self.requests, self.chunks, strict=True)]
