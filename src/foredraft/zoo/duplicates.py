"""Near-duplicates among files, found by the lines that they share.

A line counts if it is long enough to mean something. A file is a near-duplicate if most of its lines stand in files
that were kept before it, in whichever of them: exact-line containment, which sees copied parts as well as copied files.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from foredraft.zoo.corpus import Source

SHORTEST_LINE = 16  # characters without the indent
SEEN = 0.5  # share of a file's lines that make it a near-duplicate of what was kept
OVERLAP = 0.3  # share of the smaller file's lines that make a training file too close to a held-out one
FEWEST = 4  # lines of a file, below which it is no more than boilerplate


def line_keys(text: str) -> set[int]:
    """A 64-bit key for every different line that counts."""
    lines = {line.strip() for line in text.splitlines()}
    return {_key(line) for line in lines if len(line) >= SHORTEST_LINE}


def _key(line: str) -> int:
    return int.from_bytes(hashlib.blake2b(line.encode("utf-8", "replace"), digest_size=8).digest(), "little")


class Sieve:
    """Decides file by file, in the order given, what is new. Held-out files are what nothing may come close to."""

    def __init__(self, held_out: Iterable[Source]) -> None:
        self._seen: set[int] = set()
        self._holders: dict[int, list[int]] = defaultdict(list)  # key -> held-out files
        self._sizes: list[int] = []
        for number, file in enumerate(held_out):
            keys = line_keys(file.text)
            self._sizes.append(len(keys))
            for key in keys:
                self._holders[key].append(number)

    def keep(self, files: Sequence[Source]) -> Iterator[Source]:
        """Those of the files that are new."""
        for file in files:
            keys = line_keys(file.text)
            if len(keys) >= FEWEST and len(keys & self._seen) < SEEN * len(keys) and not self._is_held_out(keys):
                self._seen |= keys
                yield file

    def note(self, files: Iterable[Source]) -> None:
        """Count the files as kept, whatever they are."""
        for file in files:
            self._seen |= line_keys(file.text)

    def _is_held_out(self, keys: set[int]) -> bool:
        shared = Counter(number for key in keys for number in self._holders.get(key, ()))
        return any(
            count >= FEWEST and count >= OVERLAP * min(len(keys), self._sizes[number])
            for number, count in shared.items()
        )
