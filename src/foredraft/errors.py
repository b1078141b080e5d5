"""Errors meant for the user: one line that says what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


class ForedraftError(ValueError):
    """Bad input, an unsupported model, an impossible combination. The message is the whole story."""


def suggest(word: str, known: Iterable[str]) -> str:
    """The known word nearest to a mistyped one, as the end of a message; empty where none is near."""
    found = get_close_matches(word, list(known), 1)
    return f"; did you mean {found[0]!r}?" if found else ""
