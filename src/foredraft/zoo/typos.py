"""Simulated typing errors: swapped, missing, doubled and neighbouring letters; missing and doubled words."""

import random
from collections.abc import Callable

WORD_ERROR_RATE = 0.08  # share of the words that get an error in training
CLEAN_SHARE = 0.08  # share of the training passages without an error
SMALL_WORDS = frozenset("a an the of to in is are on for and or by be it as with that this at from".split())
SMALL_WORD_EDIT_SHARE = 0.5  # probability that a small word is removed or doubled
DOUBLE_WORD_SHARE = 0.25  # probability that such a word is doubled instead of removed
MIN_EDIT_LETTERS = 3  # letters of a word in which a letter is changed
MOVE_WORD_SHARE = 0.3  # probability that another word is moved before the last one
_KEYBOARD_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
KEY_NEIGHBOURS = {
    key: "".join(row[max(i - 1, 0) : i] + row[i + 1 : i + 2]) for row in _KEYBOARD_ROWS for i, key in enumerate(row)
}

Edit = Callable[[random.Random, str], str]


def add_typos(text: str, rng: random.Random, rate: float = WORD_ERROR_RATE) -> str:
    """Return the text with errors in about `rate` of its words.

    A small word may be removed or doubled, a longer one gets a wrong letter, and others may move before the last word.

    Args:
        text: words separated by spaces.
        rng: source of the errors.
        rate: share of the words, in 0..1. Default 0.08.
    """
    words = text.split(" ")
    output: list[str] = []
    for word in words:
        if rng.random() >= rate:
            output.append(word)
        elif word.lower() in SMALL_WORDS and rng.random() < SMALL_WORD_EDIT_SHARE:
            output += [word, word] if rng.random() < DOUBLE_WORD_SHARE else []
        elif sum(c.isalpha() for c in word) >= MIN_EDIT_LETTERS:
            output.append(rng.choice(EDITS)(rng, word))
        elif output and rng.random() < MOVE_WORD_SHARE:
            output.insert(len(output) - 1, word)
        else:
            output.append(word)
    return " ".join(output) or text


def swap_letters(rng: random.Random, word: str) -> str:
    """Exchange two adjacent letters."""
    offset = _choose_offset(rng, word, 2)
    return word[:offset] + word[offset + 1] + word[offset] + word[offset + 2 :]


def drop_letter(rng: random.Random, word: str) -> str:
    """Remove a letter."""
    offset = _choose_offset(rng, word, 1)
    return word[:offset] + word[offset + 1 :]


def double_letter(rng: random.Random, word: str) -> str:
    """Repeat a letter."""
    offset = _choose_offset(rng, word, 1)
    return word[:offset] + word[offset] + word[offset:]


def replace_letter(rng: random.Random, word: str) -> str:
    """Replace a letter by a neighbour on the keyboard."""
    offset = _choose_offset(rng, word, 1)
    return word[:offset] + rng.choice(KEY_NEIGHBOURS.get(word[offset].lower(), "e")) + word[offset + 1 :]


EDITS: tuple[Edit, ...] = (swap_letters, swap_letters, drop_letter, double_letter, replace_letter)


def _choose_offset(rng: random.Random, word: str, count: int) -> int:
    """Choose the offset of `count` adjacent letters, after the first letter of the word if possible."""
    offsets = [i for i in range(len(word) - count + 1) if all(c.isalpha() and c.isascii() for c in word[i : i + count])]
    later = [i for i in offsets if i > 0]
    return rng.choice(later or offsets) if offsets else 0
