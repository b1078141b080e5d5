"""Extraction of prose from Python files: docstrings and comments, split into passages of a few sentences.

This file does not know about models or tokenizers.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator

from foredraft.zoo.corpus import SourceFile

MIN_PASSAGE_CHARS, MAX_PASSAGE_CHARS = 24, 320  # length of a passage, in characters
MIN_LETTER_SHARE = 0.7  # a paragraph with a smaller share of letters and spaces is a table, a formula or code
_SENTENCE = re.compile(r"(?<=[.!?:;])\s+")


def extract_passages(files: Iterable[SourceFile]) -> list[str]:
    """Return the distinct passages of the files, in order."""
    passages: dict[str, None] = {}
    for file in files:
        for paragraph in extract_paragraphs(file.text):
            passages.update(dict.fromkeys(_split_passages(paragraph)))
    return list(passages)


def extract_paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of docstrings and the blocks of comments, each as one line.

    Text that is not valid Python has none.
    """
    try:
        tree = ast.parse(text)
        comments = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT]
    except (SyntaxError, ValueError, tokenize.TokenError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for block in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                yield from _join_paragraph(block.splitlines())
    block_lines: list[str] = []
    last = -2
    for comment in comments:
        line = comment.start[0]
        if line != last + 1:
            yield from _join_paragraph(block_lines)
            block_lines = []
        block_lines.append(comment.string.lstrip("#! "))
        last = line
    yield from _join_paragraph(block_lines)


def _join_paragraph(lines: list[str]) -> Iterator[str]:
    """Yield the lines as one paragraph if they are prose, otherwise nothing."""
    text = " ".join(" ".join(lines).split())
    is_code = any(mark in text for mark in (">>>", "...  ", "# ", "==", "--", "__", "](", "://", "\\"))
    share = sum(c.isalpha() or c == " " for c in text) / max(len(text), 1)
    if len(text) >= MIN_PASSAGE_CHARS and text.isascii() and not is_code and share >= MIN_LETTER_SHARE:
        yield text


def _split_passages(paragraph: str) -> Iterator[str]:
    """Yield passages of whole sentences with at most `MAX_PASSAGE_CHARS`; a longer sentence is dropped."""
    passage = ""
    for sentence in _SENTENCE.split(paragraph):
        if passage and len(passage) + 1 + len(sentence) > MAX_PASSAGE_CHARS:
            yield passage
            passage = ""
        passage = f"{passage} {sentence}" if passage else sentence
        if len(passage) > MAX_PASSAGE_CHARS:
            passage = ""
    if len(passage) >= MIN_PASSAGE_CHARS:
        yield passage
