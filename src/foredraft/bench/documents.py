"""Work over given text: summaries, answers to questions, and talks in turns about the documentation of Python modules.

The text is the docstrings of held-out modules. What a good answer would be stands in it, and the prompt shows by
examples that it is to be taken from there; no model had a part in it.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from foredraft.zoo.corpus import SourceFile

MIN_SENTENCE_CHARS, MAX_SENTENCE_CHARS = 20, 140  # characters of a first sentence
TEXT_CHARS = (160, 520)  # characters of a text to summarise
ENTRIES_PER_PAGE, TURNS_PER_CONVERSATION = 7, 3  # functions that a page describes; turns of a talk
_SENTENCE_END = re.compile(r"(?<=[.!?])\s")


@dataclass(frozen=True)
class DocumentedName:
    """A documented class or function."""

    name: str
    first_sentence: str  # sentence of its docstring
    docstring: str  # its docstring on one line


def extract_entries(file: SourceFile) -> list[DocumentedName]:
    """Extract the names that a file documents in prose, in file order, each once."""
    module = file.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    found: dict[str, DocumentedName] = {}
    for node in ast.walk(ast.parse(file.text)):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
            continue
        text = " ".join((ast.get_docstring(node) or "").split())
        first = _SENTENCE_END.split(text)[0]
        if (
            MIN_SENTENCE_CHARS <= len(first) <= MAX_SENTENCE_CHARS
            and first.isascii()
            and first[-1] == "."
            and ">>>" not in first
        ):
            found.setdefault(node.name, DocumentedName(f"{module}.{node.name}", first, text))
    return list(found.values())


def generate_summary_prompts(files: Sequence[SourceFile]) -> Iterator[str]:
    """Two texts with their first sentences as summaries, and a third without."""
    every = [entry for file in files for entry in extract_entries(file)]
    fitting = [
        e
        for e in every
        if TEXT_CHARS[0] <= len(e.docstring) <= TEXT_CHARS[1]
        and len(e.first_sentence) < len(e.docstring)
        and _is_prose(e.docstring)
    ]
    for number, asked in enumerate(fitting):
        shown = [fitting[(number + step) % len(fitting)] for step in (1, 2)]
        yield "\n\n".join(
            [
                *(f"Text: {e.docstring}\nSummary: {e.first_sentence}" for e in shown),
                f"Text: {asked.docstring}\nSummary:",
            ]
        )


def _is_prose(text: str) -> bool:
    return not any(mark in text for mark in (">>>", "::", "--", "|", "\\"))


def generate_question_prompts(files: Sequence[SourceFile]) -> Iterator[str]:
    """A page of documentation, a question about it with its answer, and another question."""
    for file in files:
        for page in _split_pages(file):
            for number, asked in enumerate(page):
                shown = page[number - 1]
                example = f"{_format_question(shown)} {shown.first_sentence}"
                yield f"{_format_page(page)}\n\n{example}\n\n{_format_question(asked)}"


def generate_conversations(files: Sequence[SourceFile]) -> Iterator[tuple[str, ...]]:
    """The same page once, then question after question in turns."""
    for file in files:
        for page in _split_pages(file):
            shown, *asked = page
            opening = f"{_format_page(page)}\n\n{_format_question(shown)} {shown.first_sentence}\n\n"
            for start in range(len(asked) - TURNS_PER_CONVERSATION + 1):
                first, *later = (_format_question(entry) for entry in asked[start : start + TURNS_PER_CONVERSATION])
                yield (opening + first, *later)


def _split_pages(file: SourceFile) -> list[list[DocumentedName]]:
    """The entries of a file, so many together, as long as there are enough for a talk."""
    every = extract_entries(file)
    cut = [every[i : i + ENTRIES_PER_PAGE] for i in range(0, len(every), ENTRIES_PER_PAGE)]
    return [page for page in cut if len(page) > TURNS_PER_CONVERSATION]


def _format_page(page: Sequence[DocumentedName]) -> str:
    return "\n".join(f"{entry.name}: {entry.first_sentence}" for entry in page)


def _format_question(entry: DocumentedName) -> str:
    return f"Question: What is {entry.name}?\nAnswer:"
