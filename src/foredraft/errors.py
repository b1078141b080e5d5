"""Errors meant for the user: one line that says what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


class ForedraftError(ValueError):
    """Error caused by the user's input: its message is one line that says what to do. Shown without a traceback."""


class TargetLostError(ForedraftError):
    """Error of a target that cannot compute any more, such as one whose process was killed. Every later pass fails."""


def suggest(word: str, candidates: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" with the candidate nearest to a mistyped word; empty if none is near."""
    matches = get_close_matches(word, list(candidates), 1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def is_panic(error: BaseException) -> bool:
    """Whether an error is a panic of a Rust extension (tokenizer or grammar).

    Every extension has its own panic class, which cannot be imported and is not an Exception.
    """
    return type(error).__name__ == "PanicException" and type(error).__module__ == "pyo3_runtime"


def format_install_command(extra: str) -> str:
    """Return the commands that install an extra, from a checkout and by name."""
    return (
        f"pip install -e '.[{extra}]' in the checkout, or pip install 'foredraft[{extra}]' if it was installed by name"
    )
