"""Allowed tokens of one request with a grammar, after its output and any path of draft tokens."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from foredraft.sampling.grammar_cursor import GrammarCursor
from foredraft.sampling.grammar_tokens import AllowedTokens


@dataclass
class GrammarMatcher:
    """Follows the sequence of one request. Not thread-safe.

    `find_allowed` may be called in any order for draft paths after the same output; results are cached. Between calls
    the output grows, or restarts from an earlier length.
    """

    cursor: GrammarCursor
    error: str | None = None  # last error, also of a path that was rejected
    num_masks: int = 0  # masks computed so far
    clock: Callable[[], float] = time.perf_counter
    # Results by draft path after `_output_length` output tokens.
    _allowed_by_path: dict[tuple[int, ...], AllowedTokens] = field(default_factory=dict, init=False)
    _output_length: int = field(default=-1, init=False)
    _mask_seconds: float = field(default=0.0, init=False)

    def find_allowed(self, output: Sequence[int], draft_path: Sequence[int] = ()) -> AllowedTokens:
        """Return the tokens that may follow the output and a path of draft tokens after it."""
        if len(output) != self._output_length:
            self._allowed_by_path.clear()
            self._output_length = len(output)
        path = tuple(draft_path)
        found = self._allowed_by_path.get(path)
        if found is None:
            began = self.clock()
            is_new = self.cursor.needs_restart(output)
            found = self._compute_allowed(output, path)
            # llguidance's limits also count earlier paths, so an error is only reported if a new matcher repeats it.
            if found.error is not None and not is_new:
                retried = self._compute_allowed(output, path)
                found = found if retried.error is not None else retried
            self.error = found.error or self.error
            self._allowed_by_path[path] = found
            self._mask_seconds += self.clock() - began
        return found

    def restart(self) -> None:
        """Discard the matcher after an interrupted call; the next call reads the output from the start."""
        self.cursor.discard()
        self._output_length = -1

    def take_seconds(self) -> float:
        """Return the seconds spent on masks since the last call, and reset the counter."""
        seconds, self._mask_seconds = self._mask_seconds, 0.0
        return seconds

    def check_first(self) -> str | None:
        """Return why no first or second token is allowed; None if the grammar can start."""
        first = self.find_allowed(())
        if first.error is not None or first.mask is None or first.is_finished:
            return first.error
        tokens = first.mask.nonzero().flatten().tolist()
        inside = [token for token in tokens if token not in self.cursor.tokens.end_ids]
        # The last id is among the longest tokens of most vocabularies.
        return self.find_allowed((), inside[-1:]).error if inside else None

    def _compute_allowed(self, output: Sequence[int], path: Sequence[int]) -> AllowedTokens:
        cursor = self.cursor
        if not cursor.move_to_output(output):
            return self._fail(cursor.describe_error())
        if not cursor.move_to_path(path):
            if cursor.has_error or self._is_allowed(path, len(cursor.path)):
                return self._fail(cursor.describe_error())
            return AllowedTokens()
        bits = cursor.compute_bits()
        if bits is None:
            return self._fail(cursor.describe_error())
        self.num_masks += 1
        allowed = cursor.tokens.convert_bits(bits)
        return self._fail("no token of the vocabulary goes on with the grammar") if allowed is None else allowed

    def _is_allowed(self, path: Sequence[int], depth: int) -> bool:
        """Whether the mask allowed the token of a path at this depth, so that a failure to follow it is an error."""
        if not self.cursor.tokens.can_read(path[depth:]):  # llguidance was not called
            return False
        before = self._allowed_by_path.get(tuple(path[:depth]))
        return before is not None and before.mask is not None and bool(before.mask[path[depth]])

    def _fail(self, reason: str) -> AllowedTokens:
        """Record an error and discard the matcher."""
        self.error = reason
        self.cursor.discard()
        return AllowedTokens(torch.zeros(self.cursor.tokens.vocab_size, dtype=torch.bool), error=reason)
