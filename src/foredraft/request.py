"""Requests and batches. A `Request` is mutable; a `Batch` is frozen and describes one step to drafters and models."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from foredraft.request_spec import RequestSpec
from foredraft.sampling.distribution import TokenHistory
from foredraft.sampling.grammar_matcher import GrammarMatcher


class RequestStatus(Enum):
    """State of a request. PREEMPTED is waiting too; its KV entries may have been evicted."""

    NEW = auto()
    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


@dataclass(eq=False)  # compared by identity
class Request:
    """One sequence that is being generated: its constant `spec`, and the state of its generation.

    Read-only for drafters: only the scheduler changes it, and the sandbox of a drafter undoes changes by the drafter.
    """

    slot: int  # request slot: index 0 to max_batch - 1, constant while it runs; drafters key state by it; -1 = not yet
    spec: RequestSpec  # what defines the request; never replaced
    waits_for: "Request | None" = None  # first of the n requests of one prompt; this request waits for its pages
    matcher: GrammarMatcher | None = None  # follows the grammar of this sequence
    output: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)  # block table: page ids in order
    num_computed: int = 0  # tokens with KV in the target's pool: a prefix of `tokens`
    status: RequestStatus = RequestStatus.NEW
    arrival_index: int = -1  # order of arrival
    last_step: int = -1  # order of the last step in which the request ran
    lacks_states: bool = False  # the drafter was not given hidden states of it that a draft needs
    num_cached_tokens: int | None = None  # prompt tokens hit in the prefix cache at the first run; None = has not run

    @property
    def num_tokens(self) -> int:
        """Length of prompt and output."""
        return len(self.spec.prompt) + len(self.output)

    @property
    def tokens(self) -> list[int]:
        """Prompt and output: every committed token."""
        return [*self.spec.prompt, *self.output]

    def get_token(self, index: int) -> int:
        """Return the committed token at a position."""
        prompt = self.spec.prompt
        start = len(prompt)
        return prompt[index] if index < start else self.output[index - start]

    def get_tokens(self, start: int, stop: int) -> list[int]:
        """Return the committed tokens [start, stop) without building the whole list."""
        prompt = self.spec.prompt
        split = len(prompt)
        return [*prompt[start:stop], *self.output[max(0, start - split) : max(0, stop - split)]]

    @property
    def max_draft_depth(self) -> int:
        """Largest useful depth of a draft. It leaves room for one more token, which the target adds to every draft."""
        return self.spec.max_output_tokens - len(self.output) - 1

    def build_history(self, draft_path: Sequence[int] = ()) -> TokenHistory:
        """Return the history of a row of logits that follows the committed tokens and a path of draft tokens."""
        spec = self.spec
        return TokenHistory(spec.prompt, self.output, draft_path, tuple(spec.end_ids), spec.bad_words, self.matcher)


@dataclass(frozen=True)
class Batch:
    """Requests of one step. The batch index b of a request is its row in all tensors of the step."""

    requests: tuple[Request, ...]
    num_new_tokens: tuple[int, ...]  # committed tokens that this step computes; at least 1
    granted_nodes: tuple[int, ...]  # draft nodes granted; 0 if the chunk does not reach the last committed token
    page_size: int = 16  # tokens per page
    draft_stream: int = 0  # number in the noise of sampled drafts: drafters that sample for one request differ in it

    def __len__(self) -> int:
        return len(self.requests)

    def get_root_token(self, b: int) -> int:
        """Return the last committed token of a request's chunk: the root of its draft."""
        request = self.requests[b]
        return request.get_token(request.num_computed + self.num_new_tokens[b] - 1)

    def find_drafting(self) -> list[int]:
        """Return the batch indices of the requests that may draft."""
        return [b for b, granted in enumerate(self.granted_nodes) if granted > 0]

    @property
    def needs_logits(self) -> list[bool]:
        """Whether each chunk reaches the last committed token, so that the step samples a new one, as [B]."""
        return [
            r.num_computed + chunk == r.num_tokens for r, chunk in zip(self.requests, self.num_new_tokens, strict=True)
        ]
