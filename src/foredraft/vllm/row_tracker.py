"""Recognition of requests in the rows of an engine that gives rows no names.

A row holds all tokens of one request. Rows move between calls, and leave and come back when a request is preempted.
A row of n tokens, k of them new, continues the request that had its first n - k tokens. This file knows no vLLM.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from foredraft.request import Request, RequestStatus
from foredraft.request_spec import RequestSpec
from foredraft.sampling.params import Sampling
from foredraft.verification.rules import BLOCK

TokenIds = NDArray[np.integer]
ABSENT_CALLS = 16  # calls without a request after which it counts as finished
TAIL = 8  # last tokens in the key of a request; all tokens are compared after it


@dataclass(frozen=True)
class Row:
    """One row of a call.

    Attributes:
        index: its place in the call.
        tokens: all tokens of the request [n].
        num_new: tokens that the last step added, at least 1.
    """

    index: int
    tokens: TokenIds
    num_new: int

    @property
    def num_old(self) -> int:
        """Tokens before the last step."""
        return len(self.tokens) - self.num_new


@dataclass(eq=False)
class TrackedRequest:
    """Request that was seen in a row.

    Attributes:
        request: the request, as drafters read it.
        draft: draft of the last call.
        last_call: number of the last call that had it.
        buffer: its tokens [capacity], in the dtype of the rows.
        length: number of them.
    """

    request: Request
    buffer: TokenIds
    length: int
    last_call: int
    draft: tuple[int, ...] = ()

    @property
    def tokens(self) -> TokenIds:
        return self.buffer[: self.length]

    def append(self, tokens: TokenIds) -> None:
        """Append new tokens. The buffer doubles, so that a request costs O(tokens) in all."""
        needed = self.length + len(tokens)
        if needed > len(self.buffer):
            self.buffer = np.resize(self.buffer, 2 * needed)
        self.buffer[self.length : needed] = tokens
        self.length = needed
        self.request.output.extend(tokens.tolist())

    def explains(self, row: Row) -> bool:
        """Return whether a row is this request one step later: same tokens, and accepted ones from its draft."""
        if self.length != row.num_old or row.num_new > len(self.draft) + 1:
            return False
        accepted = row.tokens[row.num_old : -1].tolist()
        return accepted == list(self.draft[: len(accepted)]) and np.array_equal(self.tokens, row.tokens[: row.num_old])


@dataclass
class RowTracker:
    """Requests by the tokens of their rows, each with a slot that it keeps.

    Attributes:
        context_length: longest sequence, in tokens.
        end_ids: token ids that end an output.
    """

    context_length: int
    end_ids: frozenset[int] = frozenset()
    _by_tail: dict[tuple[int, ...], list[TrackedRequest]] = field(default_factory=dict)
    _free_slots: list[int] = field(default_factory=list)
    _num_slots: int = 0
    _call: int = 0

    def __len__(self) -> int:
        return sum(map(len, self._by_tail.values()))

    def match(self, rows: Sequence[Row]) -> list[TrackedRequest | None]:
        """Return the request of each row as it was before the last step; None for a row that is new."""
        self._call += 1
        found: list[TrackedRequest | None] = []
        for row in rows:
            candidates = self._by_tail.get(_make_key(row.tokens[: row.num_old]), [])
            match = next((one for one in candidates if one.last_call < self._call and one.explains(row)), None)
            if match is not None:
                match.last_call = self._call
            found.append(match)
        return found

    def add(self, row: Row) -> TrackedRequest:
        """Return a new request for a row: its tokens before the last step are the prompt, and it has no output yet."""
        spec = RequestSpec(
            prompt=tuple(row.tokens[: row.num_old].tolist()),
            # The likeliest draft: the engine verifies it with a one-hot q, whatever the request's sampling is.
            sampling=Sampling(temperature=0, max_tokens=self.context_length),
            seed=0,
            eos_ids=self.end_ids,
            max_length=self.context_length,
            rule=BLOCK,  # drafts are chains; with greedy sampling no drafter makes a q
        )
        request = Request(self._take_slot(), spec, status=RequestStatus.RUNNING)
        buffer = np.array(row.tokens[: row.num_old])
        tracked = TrackedRequest(request, buffer, row.num_old, self._call)
        self._by_tail.setdefault(_make_key(tracked.tokens), []).append(tracked)
        return tracked

    def extend(self, tracked: TrackedRequest, row: Row) -> None:
        """Append the new tokens of a row to its request."""
        self._remove(tracked)
        tracked.append(row.tokens[row.num_old :])
        tracked.request.num_computed = tracked.length - 1  # the last token has no KV yet
        self._by_tail.setdefault(_make_key(tracked.tokens), []).append(tracked)

    def drop_absent(self) -> list[int]:
        """Finish the requests that many calls did not have. Returns their slots, which are free then."""
        absent = [
            tracked
            for group in self._by_tail.values()
            for tracked in group
            if self._call - tracked.last_call >= (1 if self._has_ended(tracked) else ABSENT_CALLS)
        ]
        for tracked in absent:
            self._remove(tracked)
            tracked.request.status = RequestStatus.FINISHED
            self._free_slots.append(tracked.request.slot)
        return [tracked.request.slot for tracked in absent]

    def _has_ended(self, tracked: TrackedRequest) -> bool:
        """Return whether the last token ends the output. A request may go on behind it, if it ignores that token."""
        request = tracked.request
        return tracked.length >= self.context_length or bool(request.output and request.output[-1] in self.end_ids)

    def _take_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        self._num_slots += 1
        return self._num_slots - 1

    def _remove(self, tracked: TrackedRequest) -> None:
        key = _make_key(tracked.tokens)
        group = self._by_tail[key]
        group.remove(tracked)
        if not group:
            del self._by_tail[key]


def _make_key(tokens: TokenIds) -> tuple[int, ...]:
    """Return the key of a sequence: its length and its last tokens."""
    return (len(tokens), *tokens[-TAIL:].tolist())
