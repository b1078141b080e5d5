"""Errors meant for the user: one line that says what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


class ForedraftError(ValueError):
    """Bad input, an unsupported model, an impossible combination. The message is the whole story."""


def suggest(word: str, known: Iterable[str]) -> str:
    """The known word nearest to a mistyped one, as the end of a message; empty where none is near."""
    found = get_close_matches(word, list(known), 1)
    return f"; did you mean {found[0]!r}?" if found else ""


def is_panic(error: BaseException) -> bool:
    """Whether a Rust extension (a tokenizer, a grammar) stopped in the middle. Every extension has a class of its own
    for that, which cannot be imported and is no Exception."""
    return type(error).__name__ == "PanicException" and type(error).__module__ == "pyo3_runtime"


def how_to_install(extra: str) -> str:
    """The command for what an extra brings, whether Foredraft was installed from a checkout or by name."""
    return (
        f"pip install -e '.[{extra}]' in the checkout, or pip install 'foredraft[{extra}]' if it was installed by name"
    )
