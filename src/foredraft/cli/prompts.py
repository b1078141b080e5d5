"""Prompts from the command line, files or standard input, decoded as UTF-8 and checked."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from foredraft.cli.shell import UsageError

EXAMPLE = 'foredraft generate "def fibonacci(n):"'
STDIN = "-"


def read_prompts(argument: str | None, files: Sequence[str]) -> list[str]:
    """Return the prompts in order and unchanged: no line break is added or removed.

    Args:
        argument: prompt of the command line; "-" = standard input, None = not given.
        files: files with one prompt each. Without an argument and files, standard input is read, unless it is a
            terminal.

    Raises:
        UsageError: no prompt, two sources, or an unreadable source; the message says what to do.
    """
    if argument is not None and files:
        raise UsageError("give the prompt as an argument or with --file, not both")
    if argument is not None and argument != STDIN:
        return [_require_text(_repair_encoding(argument), "the prompt")]
    if argument is None and not files and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError(f"no prompt; give one as in: {EXAMPLE}, or use --file PATH, or pipe text in")
    return [_read_prompt(name) for name in files or [STDIN]]


def read_predictions(files: Sequence[str], num_prompts: int) -> list[str]:
    """Return the expected output of each prompt, "" = none.

    Args:
        files: files with one expected output each: none, one for all prompts, or one per prompt.
        num_prompts: number of prompts.

    Raises:
        UsageError: there are files for some prompts only, or a file is empty or cannot be read.
    """
    if len(files) not in (0, 1, num_prompts):
        raise UsageError(f"{num_prompts} prompts and {len(files)} predictions; give one --prediction or one per prompt")
    texts = [_read_file(name, "prediction file", "--prediction") for name in files] or [""]
    for name, text in zip(files, texts, strict=False):
        if not text:
            raise UsageError(f"prediction file {name!r} is empty; leave --prediction out")
    return texts * num_prompts if len(texts) == 1 else texts


def read_template_file(name: str) -> str:
    """Return the source of a chat template. Raises UsageError if the file cannot be read."""
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"--chat-template {name!r} cannot be read: {reason.lower()}") from None


def _read_prompt(name: str) -> str:
    if name == STDIN:
        return _require_text(_decode(sys.stdin.buffer.read(), "standard input"), "standard input")
    return _require_text(_read_file(name, "prompt file", "--file"), f"prompt file {name!r}")


def _read_file(name: str, kind: str, option: str) -> str:
    try:
        data = Path(name).read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{kind} {name!r} does not exist; check the path given to {option}") from None
    except OSError as error:
        raise UsageError(f"{kind} {name!r} cannot be read: {error.strerror}") from None
    return _decode(data, f"{kind} {name!r}")


def _decode(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8-sig")  # a byte-order mark, which some editors write, is no part of the prompt
    except UnicodeDecodeError as error:
        byte = f"byte 0x{error.object[error.start]:02x} at offset {error.start}"
        raise UsageError(f"{source} is not UTF-8 ({byte}); save it as UTF-8 first") from None


def _repair_encoding(text: str) -> str:
    """Decode the bytes of a command-line argument as UTF-8.

    Bytes that are invalid in the encoding of the locale arrive as lone surrogates.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        try:
            return os.fsencode(text).decode("utf-8")
        except UnicodeError:
            message = f"the prompt is not UTF-8 (at character {error.start}); pass it as UTF-8 text"
            raise UsageError(message) from None
    return text


def _require_text(text: str, source: str) -> str:
    if not text:
        raise UsageError(f"{source} is empty; give a prompt as in: {EXAMPLE}")
    return text
