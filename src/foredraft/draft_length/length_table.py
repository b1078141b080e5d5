"""Least and most draft length of a request by the number of requests in a step.

A value is a length, as in `4`, a range, as in `2-6`, or `auto`, which is any length that the method has. A table is
`1:6,4:2-4,32:0`: every value holds from its number of requests on. vLLM's table
`num_speculative_tokens_per_batch_size` and its older limit `disable_by_batch_size` become such tables.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from foredraft.errors import ForedraftError

TOKENS_FIELD, TABLE_FIELD = "num_speculative_tokens", "num_speculative_tokens_per_batch_size"
DISABLE_FIELDS = ("disable_by_batch_size", "speculative_disable_by_batch_size")  # the second is that of old releases
LENGTH_FIELDS = (TOKENS_FIELD, TABLE_FIELD, *DISABLE_FIELDS)
AUTO = "auto"
NO_LIMIT = 2**31  # length, in tokens, above that of any draft
FORM = "a number, a range such as 2-6, auto, or a table by batch size such as 1:6,4:2-4,32:0"


class LengthBounds(NamedTuple):
    """Least and most draft length of a request, in tokens. The length is fixed if they are equal."""

    least: int = 0
    most: int = NO_LIMIT

    @property
    def is_fixed(self) -> bool:
        """Whether no length is left to choose."""
        return self.least >= self.most

    def narrow(self, inner: "LengthBounds") -> "LengthBounds":
        """Return the bounds of a request with bounds `inner`. It cannot exceed these, but may go below their least."""
        most = min(self.most, inner.most)
        return LengthBounds(min(max(self.least, inner.least), most), most)


@dataclass(frozen=True)
class LengthTable:
    """Bounds on the draft length of a request by the number of requests in the step.

    Attributes:
        entries: (number of requests from which the bounds hold, bounds), with rising numbers from 1 on.
    """

    entries: tuple[tuple[int, LengthBounds], ...] = ((1, LengthBounds()),)

    def find(self, num_requests: int) -> LengthBounds:
        """Return the bounds in a step with `num_requests` requests."""
        if len(self.entries) == 1:
            return self.entries[0][1]
        return self.entries[max(bisect_right(self.entries, num_requests, key=lambda entry: entry[0]) - 1, 0)][1]

    @property
    def most(self) -> int | None:
        """Longest draft of the table in tokens; None = that of the method."""
        most = max(bounds.most for _, bounds in self.entries)
        return None if most == NO_LIMIT else most

    @property
    def is_fixed(self) -> bool:
        """Whether no entry leaves a length to choose."""
        return all(bounds.is_fixed for _, bounds in self.entries)

    @property
    def is_uniform(self) -> bool:
        """Whether the bounds are the same for all numbers of requests."""
        return len(self.entries) == 1

    def narrow(self, inner: "LengthTable") -> "LengthTable":
        """Return the bounds that respect both tables; see `LengthBounds.narrow`."""
        counts = sorted({count for count, _ in (*self.entries, *inner.entries)})
        return LengthTable(tuple((count, self.find(count).narrow(inner.find(count))) for count in counts))

    def lift(self, longest: int) -> "LengthTable":
        """Return the table in draft nodes, for a drafter that was made for drafts of `longest` tokens.

        Such a drafter has at most this depth, and a tree has more nodes. A bound of `longest` is thus no limit.
        """
        return LengthTable(tuple(
            (count, LengthBounds(*(NO_LIMIT if length >= longest else length for length in (b.least, b.most))))
            for count, b in self.entries
        ))  # fmt: skip

    def list_ranges(self, longest: int) -> tuple[tuple[int, int, int], ...]:
        """Return (first, last, tokens) of every entry of a table, as vLLM's field has them; empty without a table.

        Args:
            longest: tokens of an entry without a limit.
        """
        if self.is_uniform:
            return ()
        firsts = [count for count, _ in self.entries]
        lasts = [*(count - 1 for count in firsts[1:]), firsts[-1]]  # the last range holds for larger batches too
        return tuple(
            (first, last, min(bounds.most, longest)) for (first, bounds), last in zip(self.entries, lasts, strict=True)
        )

    def __str__(self) -> str:
        if self.is_uniform:
            return _format_bounds(self.entries[0][1])
        return ",".join(f"{count}:{_format_bounds(bounds)}" for count, bounds in self.entries)

    @classmethod
    def parse(cls, value: Any, name: str = TOKENS_FIELD) -> "LengthTable":
        """Parse a length, a range, "auto" or a table.

        Args:
            value: a whole number, or text.
            name: name of the field or option, for error messages.

        Raises:
            ForedraftError: for a value of another form.
        """
        if value is None:
            return cls()
        if isinstance(value, str):
            return cls(_parse_text(value, name))
        if not _is_count(value):
            raise ForedraftError(f"{name} takes {FORM}; got {value!r:.80}")
        return cls(((1, LengthBounds(value, value)),))

    @classmethod
    def parse_vllm(cls, table: Any, max_requests: Any) -> "LengthTable":
        """Parse the values of vLLM's two fields.

        Args:
            table: list of [first, last, tokens]; None = no table. A gap has the length of the range before it, and the
                last range holds for all larger batches too.
            max_requests: largest batch that drafts; None = no limit.

        Raises:
            ForedraftError: for a value of another form.
        """
        if max_requests is not None and (not _is_count(max_requests) or max_requests < 1):
            raise ForedraftError(f"{DISABLE_FIELDS[0]} takes a whole number from 1 up, got {max_requests!r:.80}")
        found = cls() if table is None else cls(_parse_ranges(table))
        if max_requests is None:
            return found
        return found.narrow(cls(((1, LengthBounds()), (max_requests + 1, LengthBounds(0, 0)))))


AUTO_LENGTHS = LengthTable()  # any length that the method has


def _format_bounds(bounds: LengthBounds) -> str:
    if bounds.most == NO_LIMIT:
        return AUTO
    return str(bounds.most) if bounds.is_fixed else f"{bounds.least}-{bounds.most}"


def _parse_text(text: str, name: str) -> tuple[tuple[int, LengthBounds], ...]:
    """Parse "auto", "4", "2-6" or "1:6,4:2-4,32:0"."""
    if ":" not in text:
        return ((1, _parse_bounds(text, text, name)),)
    entries: list[tuple[int, LengthBounds]] = []
    for part in text.split(","):
        key, colon, value = (word.strip() for word in part.partition(":"))
        if not colon or not re.fullmatch(r"[0-9]{1,9}", key):
            raise ForedraftError(
                f"{name} takes BATCH:TOKENS in every entry, as in 1:6,4:2-4,32:0; got {part.strip()!r:.80}"
            )
        count = int(key)
        if not entries and count != 1:
            raise ForedraftError(f"{name}: the first batch size has to be 1, as in 1:6,4:2-4; got {text!r:.80}")
        if entries and count <= entries[-1][0]:
            raise ForedraftError(
                f"{name}: batch sizes rise and occur once, as in 1:6,4:2-4,32:0; {count} follows {entries[-1][0]}"
            )
        entries.append((count, _parse_bounds(value, text, name)))
    if not any(bounds.most for _, bounds in entries):
        raise ForedraftError(f"{name} {text!r:.80} drafts at no batch size; give 0 for plain decoding, or one length")
    return tuple(entries)


def _parse_bounds(value: str, text: str, name: str) -> LengthBounds:
    """Parse "auto", "4" or "2-6", a part of `text`."""
    value = value.strip()
    if value == AUTO:
        return LengthBounds()
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", value)
    if match is None:
        raise ForedraftError(f"{name} takes {FORM}; got {text!r:.80}")
    least = int(match[1])
    most = least if match[2] is None else int(match[2])
    if most < least:
        raise ForedraftError(f"{name}: a range is LEAST-MOST, as in {most}-{least}; got {value!r}")
    return LengthBounds(least, most)


def _parse_ranges(table: Any) -> tuple[tuple[int, LengthBounds], ...]:
    form = f"{TABLE_FIELD} takes a list of [first, last, tokens], such as [[1, 4, 5], [5, 32, 2]]"
    if not isinstance(table, Sequence) or isinstance(table, str) or not table:
        raise ForedraftError(f"{form}; got {table!r:.80}")
    for entry in table:
        if not isinstance(entry, Sequence) or len(entry) != 3 or not all(map(_is_count, entry)):
            raise ForedraftError(f"{form}; got {entry!r:.80}")
    entries: list[tuple[int, LengthBounds]] = []
    previous = 0  # last number of requests of the range before
    for first, last, tokens in sorted(map(tuple, table)):
        if not entries and first != 1:
            raise ForedraftError(f"{form}: the first range begins at 1; got {[first, last, tokens]}")
        if last < first:
            raise ForedraftError(f"{form}: a range ends where it begins or later; got {[first, last, tokens]}")
        if first <= previous:
            raise ForedraftError(f"{form}: ranges do not overlap, so this one begins at {previous + 1} or later; got "
                                 f"{[first, last, tokens]}")  # fmt: skip
        entries.append((first, LengthBounds(tokens, tokens)))
        previous = last
    if not any(bounds.most for _, bounds in entries):
        raise ForedraftError(f"{form}: one of them has to draft; use drafter=None for plain decoding")
    return tuple(entries)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
