"""Upper limits on draft lengths by the number of requests in a step.

They are vLLM's table `num_speculative_tokens_per_batch_size` and its older limit `disable_by_batch_size`. The adaptive
policy needs neither: it measures at which batch size drafts stop to save time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.errors import ForedraftError

TABLE_FIELD, DISABLE_FIELD = "num_speculative_tokens_per_batch_size", "disable_by_batch_size"


@dataclass(frozen=True)
class DraftLimitRange:
    """Longest draft of a request while a step has `first` to `last` requests, both included."""

    first: int
    last: int
    num_tokens: int


@dataclass(frozen=True)
class BatchSizeLimits:
    """Longest draft of a request by the number of requests in a step.

    Attributes:
        ranges: adjacent ranges from one request on. The last one holds for all larger batches too. Empty = no limit.
        max_requests: no request drafts while a step has more requests than this; None = no such limit.
    """

    ranges: tuple[DraftLimitRange, ...] = ()
    max_requests: int | None = None

    def cut(self, num_tokens: int, num_requests: int) -> int:
        """Return a draft length in tokens, cut to its limit in a step with `num_requests` requests."""
        if self.max_requests is not None and num_requests > self.max_requests:
            return 0
        for entry in self.ranges:
            if num_requests <= entry.last:
                return min(num_tokens, entry.num_tokens)
        return min(num_tokens, self.ranges[-1].num_tokens) if self.ranges else num_tokens

    @property
    def max_tokens(self) -> int | None:
        """Longest draft of the table in tokens; None without a table."""
        return max((entry.num_tokens for entry in self.ranges), default=None)

    @classmethod
    def parse(cls, table: Any, max_requests: Any) -> "BatchSizeLimits":
        """Parse the values of vLLM's two fields.

        Args:
            table: list of [first, last, tokens]; None = no table.
            max_requests: largest batch that drafts; None = no limit.

        Raises:
            ForedraftError: for a value of another form.
        """
        if max_requests is not None and (not _is_count(max_requests) or max_requests < 1):
            raise ForedraftError(f"{DISABLE_FIELD} takes a whole number from 1 up, got {max_requests!r}")
        return cls(() if table is None else _parse_table(table), max_requests)


NO_LIMITS = BatchSizeLimits()


def _parse_table(table: Any) -> tuple[DraftLimitRange, ...]:
    form = f"{TABLE_FIELD} takes a list of [first, last, tokens], such as [[1, 4, 5], [5, 32, 2]]"
    if not isinstance(table, Sequence) or isinstance(table, str) or not table:
        raise ForedraftError(f"{form}; got {table!r:.80}")
    ranges: list[DraftLimitRange] = []
    for entry in table:
        if not isinstance(entry, Sequence) or len(entry) != 3 or not all(map(_is_count, entry)):
            raise ForedraftError(f"{form}; got {entry!r:.80}")
        found = DraftLimitRange(*entry)
        expected = ranges[-1].last + 1 if ranges else 1
        if found.first != expected or found.last < found.first:
            raise ForedraftError(f"{form}: this range begins at {expected}; got {entry!r:.80}")
        ranges.append(found)
    if not any(entry.num_tokens for entry in ranges):
        raise ForedraftError(f"{form}: one of them has to draft; use drafter=None for plain decoding")
    return tuple(ranges)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
