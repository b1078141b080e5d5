"""Prose of the standard library: its docstrings and comments, cut to passages of a few sentences.

This file does not know about models or tokenizers.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator

from foredraft.zoo.corpus import SourceFile

MIN_PASSAGE_CHARS, MAX_PASSAGE_CHARS = 24, 320  # characters of a passage
MIN_LETTER_SHARE = 0.7  # share of letters and spaces below which a line is a table, a formula or a piece of code
_SENTENCE = re.compile(r"(?<=[.!?:;])\s+")


def extract_passages(files: Iterable[SourceFile]) -> list[str]:
    """Every passage once, in a fixed order."""
    found: dict[str, None] = {}
    for file in files:
        for paragraph in extract_paragraphs(file.text):
            found.update(dict.fromkeys(_split_passages(paragraph)))
    return list(found)


def extract_paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of docstrings and the runs of comments, each on one line. A file that is no Python has none."""
    try:
        tree = ast.parse(text)
        comments = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT]
    except (SyntaxError, ValueError, tokenize.TokenError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for block in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                yield from _join_paragraph(block.splitlines())
    run: list[str] = []
    last = -2
    for comment in comments:
        line = comment.start[0]
        if line != last + 1:
            yield from _join_paragraph(run)
            run = []
        run.append(comment.string.lstrip("#! "))
        last = line
    yield from _join_paragraph(run)


def _join_paragraph(lines: list[str]) -> Iterator[str]:
    """One paragraph if it is prose; none if it is anything else."""
    text = " ".join(" ".join(lines).split())
    is_code = any(mark in text for mark in (">>>", "...  ", "# ", "==", "--", "__", "](", "://", "\\"))
    share = sum(c.isalpha() or c == " " for c in text) / max(len(text), 1)
    if len(text) >= MIN_PASSAGE_CHARS and text.isascii() and not is_code and share >= MIN_LETTER_SHARE:
        yield text


def _split_passages(paragraph: str) -> Iterator[str]:
    """Passages of whole sentences, none longer than LONGEST."""
    held = ""
    for sentence in _SENTENCE.split(paragraph):
        if held and len(held) + 1 + len(sentence) > MAX_PASSAGE_CHARS:
            yield held
            held = ""
        held = f"{held} {sentence}" if held else sentence
        if len(held) > MAX_PASSAGE_CHARS:
            held = ""
    if len(held) >= MIN_PASSAGE_CHARS:
        yield held
