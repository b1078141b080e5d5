"""Files to draft from: one automaton over all of their texts, read-only and shared by all requests."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.drafters.method import DrafterContext
from foredraft.drafters.suffix.automaton import TEXT_BREAK, SuffixAutomaton
from foredraft.errors import ForedraftError

JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")
ARRAY_SUFFIX = ".npy"


def read_corpus(paths: Sequence[str], context: DrafterContext, automaton: SuffixAutomaton) -> SuffixAutomaton:
    """Append every text of the files to an automaton, with TEXT_BREAK after each.

    `.jsonl`: one text per line: a string, a list of token ids, or an object with one of these as "text" or "tokens".
    `.npy`: token ids, [n] or one text per row [r, n]. Any other file is one UTF-8 text.

    Args:
        paths: files.
        context: source of the tokenizer and the vocabulary size.
        automaton: automaton to extend.

    Returns:
        The automaton.

    Raises:
        ForedraftError: for a missing, unreadable or invalid file.
    """
    for path in paths:
        for ids in _read_sequences(Path(path), context):
            automaton.extend([*_check_ids(ids, path, context.vocab_size), TEXT_BREAK])
    return automaton


def _read_sequences(path: Path, context: DrafterContext) -> Iterator[Sequence[int]]:
    """Yield the token ids of each text of one file."""
    if not path.is_file():
        problem = "is a folder; name the files in it" if path.is_dir() else "does not exist"
        raise ForedraftError(f"the file {path} to draft from {problem}")
    try:
        if path.suffix == ARRAY_SUFFIX:
            yield from _read_array(path)
        elif path.suffix in JSON_LINES_SUFFIXES:
            yield from _read_json_lines(path, context)
        else:
            yield _encode_text(path.read_text(encoding="utf-8"), path, context)
    except OSError as error:
        raise ForedraftError(f"the file {path} to draft from cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ForedraftError(f"the file {path} to draft from is not UTF-8 text; give text, .jsonl or .npy") from error


def _read_array(path: Path) -> Iterator[Sequence[int]]:
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


def _read_json_lines(path: Path, context: DrafterContext) -> Iterator[Sequence[int]]:
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
                yield _encode_text(entry, path, context)
            elif isinstance(entry, list) and all(type(token) is int for token in entry):
                yield entry
            else:
                raise ForedraftError(f'line {number} of {path} is neither {{"text": "..."}} nor {{"tokens": [...]}}')


def _encode_text(text: str, path: Path, context: DrafterContext) -> list[int]:
    tokenizer: Any = context.tokenizer
    if tokenizer is None:
        raise ForedraftError(
            f"{context.target_name} has no tokenizer for the text of {path}; give token ids, as .npy or .jsonl"
        )
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def _check_ids(ids: Sequence[int], path: str, vocab_size: int) -> Sequence[int]:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        invalid = next(token for token in ids if not 0 <= token < vocab_size)
        raise ForedraftError(f"{path} holds token {invalid}, which is outside the vocabulary of {vocab_size} tokens")
    return ids
