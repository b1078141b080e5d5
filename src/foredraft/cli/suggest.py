"""Suggestions for unknown options: options of other programs, and misspelt options."""

import difflib
from collections.abc import Sequence

from foredraft.cli.foreign_options import FOREIGN_OPTIONS, NO_OPTION_PREFIX, SERVE_ONLY

MIN_SIMILARITY = 0.7  # least difflib ratio at which a known option is suggested


def is_short_word(word: str) -> bool:
    """Return whether a word is an option of another program with one dash and several letters."""
    return word in FOREIGN_OPTIONS and not word.startswith("--") and len(word) > 2


def format_unknown_option(wrong: str, known: Sequence[str]) -> str:
    """Return the message for an unknown option: the option to use, or why there is none.

    Args:
        wrong: the unknown option.
        known: options of the command.
    """
    suggestion = suggest_option(wrong, known)
    if suggestion is None:
        names = [option.split()[0] for option in (_normalise(wrong), *_counterparts(wrong))]
        reasons = [SERVE_ONLY[name] for name in names if name in SERVE_ONLY]
        return f"unknown option {wrong}" + (f"; there is none here: {reasons[0]}" if reasons else "")
    reason = suggestion.removeprefix(NO_OPTION_PREFIX)
    return f"unknown option {wrong}; " + (
        f"use {suggestion}" if reason == suggestion else f"there is none here: {reason}"
    )


def suggest_option(wrong: str, known: Sequence[str]) -> str | None:
    """Return the option to use instead of an unknown one, or advice; None if no option is similar."""
    wrong = _normalise(wrong)
    if wrong in known:
        return wrong
    if wrong in SERVE_ONLY:
        return None
    if wrong in FOREIGN_OPTIONS:
        usable = (entry for entry in _counterparts(wrong) if not entry.startswith("--") or entry.split()[0] in known)
        return next(usable, None)
    similar = difflib.get_close_matches(wrong, known, n=1, cutoff=MIN_SIMILARITY)
    return similar[0] if similar else None


def _normalise(option: str) -> str:
    """Return an option with dashes in place of underscores, which vLLM accepts too."""
    return option.replace("_", "-")


def _counterparts(wrong: str) -> tuple[str, ...]:
    entries = FOREIGN_OPTIONS.get(_normalise(wrong), ())
    return (entries,) if isinstance(entries, str) else entries
