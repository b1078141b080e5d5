"""Prompts from the argument, files or standard input: bytes in, checked strings out."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from foredraft.cli.shell import UsageError

EXAMPLE = 'foredraft generate "def fibonacci(n):"'
STDIN = "-"


def read_prompts(argument: str | None, files: Sequence[str]) -> list[str]:
    """The prompts, in order, exactly as given: no line break is added or taken away.

    One prompt per file; `-` is standard input, which is also read when nothing is given and it is not a terminal.
    Raises UsageError with the fix in the message.
    """
    if argument is not None and files:
        raise UsageError("give the prompt as an argument or with --file, not both")
    if argument is not None and argument != STDIN:
        return [_require_text(_repair_encoding(argument), "the prompt")]
    if argument is None and not files and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError(f"no prompt; give one as in: {EXAMPLE}, or use --file PATH, or pipe text in")
    return [_read_prompt(name) for name in files or [STDIN]]


def read_template_file(name: str) -> str:
    """Source of a chat template. Raises UsageError if the file cannot be read."""
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"--chat-template {name!r} cannot be read: {reason.lower()}") from None


def _read_prompt(name: str) -> str:
    if name == STDIN:
        return _require_text(_decode(sys.stdin.buffer.read(), "standard input"), "standard input")
    try:
        data = Path(name).read_bytes()
    except FileNotFoundError:
        raise UsageError(f"prompt file {name!r} does not exist; check the path given to --file") from None
    except OSError as error:
        raise UsageError(f"prompt file {name!r} cannot be read: {error.strerror}") from None
    return _require_text(_decode(data, f"prompt file {name!r}"), f"prompt file {name!r}")


def _decode(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8-sig")  # a byte-order mark is an editor's, not the author's
    except UnicodeDecodeError as error:
        byte = f"byte 0x{error.object[error.start]:02x} at offset {error.start}"
        raise UsageError(f"{source} is not UTF-8 ({byte}); save it as UTF-8 first") from None


def _repair_encoding(text: str) -> str:
    """The argument as its bytes read in UTF-8: those that the locale's encoding lacks arrive as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        try:
            return os.fsencode(text).decode("utf-8")
        except UnicodeError:
            words = f"the prompt is not UTF-8 (at character {error.start}); pass it as UTF-8 text"
            raise UsageError(words) from None
    return text


def _require_text(text: str, source: str) -> str:
    if not text:
        raise UsageError(f"{source} is empty; give a prompt as in: {EXAMPLE}")
    return text
