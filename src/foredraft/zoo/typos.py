"""Errors as people make them when they type: letters swapped, lost, doubled, missed by a key; words lost or doubled."""

import random
from collections.abc import Callable

WORD_ERROR_RATE = 0.08  # of the words, in training
CLEAN_SHARE = 0.08  # of the passages have no error at all
SMALL_WORDS = frozenset("a an the of to in is are on for and or by be it as with that this at from".split())
_KEYBOARD_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
KEY_NEIGHBOURS = {
    key: "".join(row[max(i - 1, 0) : i] + row[i + 1 : i + 2]) for row in _KEYBOARD_ROWS for i, key in enumerate(row)
}

Edit = Callable[[random.Random, str], str]


def add_typos(text: str, rng: random.Random, rate: float = WORD_ERROR_RATE) -> str:
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


def swap_letters(rng: random.Random, word: str) -> str:
    at = _choose_offset(rng, word, 2)
    return word[:at] + word[at + 1] + word[at] + word[at + 2 :]


def drop_letter(rng: random.Random, word: str) -> str:
    at = _choose_offset(rng, word, 1)
    return word[:at] + word[at + 1 :]


def double_letter(rng: random.Random, word: str) -> str:
    at = _choose_offset(rng, word, 1)
    return word[:at] + word[at] + word[at:]


def replace_letter(rng: random.Random, word: str) -> str:
    """Another key than the one that was meant."""
    at = _choose_offset(rng, word, 1)
    return word[:at] + rng.choice(KEY_NEIGHBOURS.get(word[at].lower(), "e")) + word[at + 1 :]


EDITS: tuple[Edit, ...] = (swap_letters, swap_letters, drop_letter, double_letter, replace_letter)


def _choose_offset(rng: random.Random, word: str, count: int) -> int:
    """Choose the offset of `count` adjacent letters, after the first letter of the word if possible."""
    places = [i for i in range(len(word) - count + 1) if all(c.isalpha() and c.isascii() for c in word[i : i + count])]
    later = [i for i in places if i > 0]
    return rng.choice(later or places) if places else 0
