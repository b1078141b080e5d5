"""Text that spells control tokens, kept apart from the control tokens themselves."""

import re
import secrets
from typing import Any

from foredraft.models.tokenizing import encode
from foredraft.server.errors import ApiError
from foredraft.server.vocabulary import Vocabulary


class Hidden:
    """Replaces what spells a control token by marks nobody can guess, and turns the marks into ordinary tokens."""

    def __init__(self, spellings: tuple[str, ...]) -> None:
        longest_first = sorted(filter(None, spellings), key=len, reverse=True)
        self._spelt = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._nonce = f"{secrets.randbits(64):020d}"
        self._mark = re.compile(f"\ue000{self._nonce}:(\\d+)\ue001")
        self._words: list[str] = []

    def hide(self, text: str) -> str:
        return text if self._spelt is None else self._spelt.sub(self._hide, text)

    def _hide(self, found: re.Match[str]) -> str:
        self._words.append(found[0])
        return f"\ue000{self._nonce}:{len(self._words) - 1}\ue001"

    def encode(self, text: str, tokenizer: Any, vocabulary: Vocabulary) -> list[int]:
        """Control tokens of the rest as such, hidden ones as text."""
        parts = self._mark.split(text)
        texts = list(filter(None, parts[::2]))
        # in one call and each word once: a message may be nothing but a million such words
        plain = iter(encode(tokenizer, texts, has_special=False).input_ids if texts else ())
        words = {word: as_text(word, tokenizer, vocabulary) for word in dict.fromkeys(self._words)}
        ids: list[int] = []
        for i, part in enumerate(parts):
            if i % 2:
                ids += words[self._words[int(part)]]
            elif part:
                ids += next(plain)
        return ids


def as_text(word: str, tokenizer: Any, vocabulary: Vocabulary) -> list[int]:
    """A control token's spelling as ordinary tokens: cut in two, it is one no longer. Raises ApiError if even so the
    tokenizer reads a control token."""
    special = set(vocabulary.special.values())
    for cut in range(1, len(word)):
        halves = [encode(tokenizer, part, has_special=False).input_ids for part in (word[:cut], word[cut:])]
        ids = [token for half in halves for token in half]
        if special.isdisjoint(ids):
            return ids
    raise ApiError(400, "a message holds text that this tokenizer can read only as a control token", "messages")
