"""Errors as people make them when they type: letters swapped, lost, doubled, missed by a key; words lost or doubled."""

import random
from collections.abc import Callable

RATE = 0.08  # of the words, in training
CLEAN = 0.08  # of the passages have no error at all
SMALL_WORDS = frozenset("a an the of to in is are on for and or by be it as with that this at from".split())
_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
NEIGHBOURS = {key: "".join(row[max(i - 1, 0) : i] + row[i + 1 : i + 2]) for row in _ROWS for i, key in enumerate(row)}

Edit = Callable[[random.Random, str], str]


def spoilt(text: str, rng: random.Random, rate: float = RATE) -> str:
    """The text with about `rate` of its words spoilt. Words are what stands between spaces."""
    words = text.split(" ")
    found: list[str] = []
    for word in words:
        if rng.random() >= rate:
            found.append(word)
        elif word.lower() in SMALL_WORDS and rng.random() < 0.5:
            found += [word, word] if rng.random() < 0.25 else []
        elif sum(c.isalpha() for c in word) >= 3:
            found.append(rng.choice(EDITS)(rng, word))
        elif found and rng.random() < 0.3:
            found.insert(len(found) - 1, word)
        else:
            found.append(word)
    return " ".join(found) or text


def swapped(rng: random.Random, word: str) -> str:
    at = _place(rng, word, 2)
    return word[:at] + word[at + 1] + word[at] + word[at + 2 :]


def lost(rng: random.Random, word: str) -> str:
    at = _place(rng, word, 1)
    return word[:at] + word[at + 1 :]


def doubled(rng: random.Random, word: str) -> str:
    at = _place(rng, word, 1)
    return word[:at] + word[at] + word[at:]


def missed(rng: random.Random, word: str) -> str:
    """Another key than the one that was meant."""
    at = _place(rng, word, 1)
    return word[:at] + rng.choice(NEIGHBOURS.get(word[at].lower(), "e")) + word[at + 1 :]


EDITS: tuple[Edit, ...] = (swapped, swapped, lost, doubled, missed)


def _place(rng: random.Random, word: str, count: int) -> int:
    """Where `count` letters stand side by side, not the first of the word if it can be helped."""
    places = [i for i in range(len(word) - count + 1) if all(c.isalpha() and c.isascii() for c in word[i : i + count])]
    later = [i for i in places if i > 0]
    return rng.choice(later or places) if places else 0
