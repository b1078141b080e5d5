"""Near-duplicates among files, found by the lines that they share.

A line counts if it is long enough to mean something. A file is a near-duplicate if most of its lines stand in files
that were kept before it, in whichever of them: exact-line containment, which sees copied parts as well as copied files.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from foredraft.zoo.corpus import SourceFile

MIN_LINE_CHARS = 16  # characters without the indent
DUPLICATE_SHARE = 0.5  # share of a file's lines that make it a near-duplicate of what was kept
HELD_OUT_OVERLAP = 0.3  # share of the smaller file's lines that make a training file too close to a held-out one
MIN_LINES = 4  # lines of a file, below which it is no more than boilerplate


def compute_line_keys(text: str) -> set[int]:
    """A 64-bit key for every different line that counts."""
    lines = {line.strip() for line in text.splitlines()}
    return {_hash_line(line) for line in lines if len(line) >= MIN_LINE_CHARS}


def _hash_line(line: str) -> int:
    return int.from_bytes(hashlib.blake2b(line.encode("utf-8", "replace"), digest_size=8).digest(), "little")


class DuplicateFilter:
    """Decides file by file, in the order given, what is new. Held-out files are what nothing may come close to."""

    def __init__(self, held_out: Iterable[SourceFile]) -> None:
        self._kept_keys: set[int] = set()
        self._held_out_by_key: dict[int, list[int]] = defaultdict(list)  # key -> held-out files
        self._held_out_sizes: list[int] = []
        for number, file in enumerate(held_out):
            keys = compute_line_keys(file.text)
            self._held_out_sizes.append(len(keys))
            for key in keys:
                self._held_out_by_key[key].append(number)

    def select_new(self, files: Sequence[SourceFile]) -> Iterator[SourceFile]:
        """Those of the files that are new."""
        for file in files:
            keys = compute_line_keys(file.text)
            if (
                len(keys) >= MIN_LINES
                and len(keys & self._kept_keys) < DUPLICATE_SHARE * len(keys)
                and not self._is_near_held_out(keys)
            ):
                self._kept_keys |= keys
                yield file

    def add(self, files: Iterable[SourceFile]) -> None:
        """Count the files as kept, whatever they are."""
        for file in files:
            self._kept_keys |= compute_line_keys(file.text)

    def _is_near_held_out(self, keys: set[int]) -> bool:
        shared = Counter(number for key in keys for number in self._held_out_by_key.get(key, ()))
        return any(
            count >= MIN_LINES and count >= HELD_OUT_OVERLAP * min(len(keys), self._held_out_sizes[number])
            for number, count in shared.items()
        )
