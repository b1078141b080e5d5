"""Filter for near-duplicate files, by exact-line containment.

Only lines of some length count. A file is a near-duplicate if most of its lines occur in the files accepted before it,
taken together. This detects copied parts as well as copied files.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from foredraft.zoo.corpus import SourceFile

MIN_LINE_CHARS = 16  # characters of a line that counts, without the indent
DUPLICATE_SHARE = 0.5  # a file is a near-duplicate if this share of its lines occurs in the accepted files
HELD_OUT_OVERLAP = 0.3  # a file is too close to a held-out one if they share this part of the smaller one's lines
MIN_LINES = 4  # distinct lines of a file that is more than boilerplate


def compute_line_keys(text: str) -> set[int]:
    """Return a 64-bit hash of every distinct line that counts."""
    lines = {line.strip() for line in text.splitlines()}
    return {_hash_line(line) for line in lines if len(line) >= MIN_LINE_CHARS}


def _hash_line(line: str) -> int:
    return int.from_bytes(hashlib.blake2b(line.encode("utf-8", "replace"), digest_size=8).digest(), "little")


class DuplicateFilter:
    """Filter that accepts a file if it is not close to the accepted files and to any held-out file.

    The result depends on the order of the files.

    Args:
        held_out: held-out files.
    """

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
        """Yield the files that are no near-duplicates, and accept them."""
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
        """Accept files without a check."""
        for file in files:
            self._kept_keys |= compute_line_keys(file.text)

    def _is_near_held_out(self, keys: set[int]) -> bool:
        shared = Counter(number for key in keys for number in self._held_out_by_key.get(key, ()))
        return any(
            count >= MIN_LINES and count >= HELD_OUT_OVERLAP * min(len(keys), self._held_out_sizes[number])
            for number, count in shared.items()
        )
