"""Texts given at start, to draft from: one automaton over all of them, shared by every request and never written to."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.drafters.base import Context
from foredraft.errors import ForedraftError
from foredraft.kernels.automaton import BREAK, Automaton

LINES = (".jsonl", ".ndjson")
IDS = ".npy"


def read(paths: Sequence[str], context: Context, text: Automaton) -> Automaton:
    """Append every text of the files to `text`, a BREAK after each.

    `.jsonl`: a text per line, as a string, a list of token ids, or an object with one of them as "text" or "tokens".
    `.npy`: token ids, [n] or a text per row [r, n]. Anything else is one text in UTF-8. Raises ForedraftError for what
    cannot be read.
    """
    for path in paths:
        for ids in _texts(Path(path), context):
            text.extend([*_checked(ids, path, context.vocab_size), BREAK])
    return text


def _texts(path: Path, context: Context) -> Iterator[Sequence[int]]:
    """Token ids of the texts of one file."""
    if not path.is_file():
        kind = "is a folder; name the files in it" if path.is_dir() else "does not exist"
        raise ForedraftError(f"the file {path} to draft from {kind}")
    try:
        if path.suffix == IDS:
            yield from _rows(path)
        elif path.suffix in LINES:
            yield from _lines(path, context)
        else:
            yield _encoded(path.read_text(encoding="utf-8"), path, context)
    except OSError as error:
        raise ForedraftError(f"the file {path} to draft from cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ForedraftError(f"the file {path} to draft from is not UTF-8 text; give text, .jsonl or .npy") from error


def _rows(path: Path) -> Iterator[Sequence[int]]:
    try:
        rows = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ForedraftError(f"the file {path} to draft from is no array of numpy: {error}") from error
    if rows.ndim not in (1, 2) or not np.issubdtype(rows.dtype, np.integer):
        raise ForedraftError(
            f"the file {path} holds {rows.dtype} {list(rows.shape)}; token ids are integers [n] or [r, n]"
        )
    for row in np.atleast_2d(rows):
        yield row.tolist()


def _lines(path: Path, context: Context) -> Iterator[Sequence[int]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except json.JSONDecodeError as error:
                raise ForedraftError(f"line {number} of {path} is no JSON: {error.msg}") from error
            if isinstance(entry, dict):
                entry = entry.get("text", entry.get("tokens"))
            if isinstance(entry, str):
                yield _encoded(entry, path, context)
            elif isinstance(entry, list) and all(type(token) is int for token in entry):
                yield entry
            else:
                raise ForedraftError(f'line {number} of {path} is neither {{"text": "..."}} nor {{"tokens": [...]}}')


def _encoded(text: str, path: Path, context: Context) -> list[int]:
    tokenizer: Any = context.tokenizer
    if tokenizer is None:
        raise ForedraftError(
            f"{context.target_name} has no tokenizer for the text of {path}; give token ids, as .npy or .jsonl"
        )
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def _checked(ids: Sequence[int], path: str, vocab_size: int) -> Sequence[int]:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise ForedraftError(f"{path} holds token {wrong}, which is outside the vocabulary of {vocab_size} tokens")
    return ids
