"""Prompts about a given text: summaries, questions and conversations on the documentation of Python modules.

The text consists of docstrings of held-out modules; no model wrote any of it. Its words contain a good answer, and
examples in the prompt show that the answer is to be copied from it. Such prompts favour drafters that copy.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from foredraft.zoo.corpus import SourceFile

MIN_SENTENCE_CHARS, MAX_SENTENCE_CHARS = 20, 140  # length limits of a first sentence
TEXT_CHARS = (160, 520)  # length limits of a text to summarise, in characters
ENTRIES_PER_PAGE = 7  # names that a page describes
TURNS_PER_CONVERSATION = 3
_SENTENCE_END = re.compile(r"(?<=[.!?])\s")


@dataclass(frozen=True)
class DocumentedName:
    """A documented class or function."""

    name: str  # with its module
    first_sentence: str  # first sentence of the docstring
    docstring: str  # whole docstring on one line


def extract_entries(file: SourceFile) -> list[DocumentedName]:
    """Extract the public names of a file whose docstrings open with a plain sentence, in file order, each once."""
    module = file.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    entries: dict[str, DocumentedName] = {}
    for node in ast.walk(ast.parse(file.text)):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
            continue
        docstring = " ".join((ast.get_docstring(node) or "").split())
        first_sentence = _SENTENCE_END.split(docstring)[0]
        if (
            MIN_SENTENCE_CHARS <= len(first_sentence) <= MAX_SENTENCE_CHARS
            and first_sentence.isascii()
            and first_sentence[-1] == "."
            and ">>>" not in first_sentence
        ):
            entries.setdefault(node.name, DocumentedName(f"{module}.{node.name}", first_sentence, docstring))
    return list(entries.values())


def generate_summary_prompts(files: Sequence[SourceFile]) -> Iterator[str]:
    """Generate prompts of two texts with their first sentences as summaries, and a third text without a summary."""
    entries = [entry for file in files for entry in extract_entries(file)]
    candidates = [
        e
        for e in entries
        if TEXT_CHARS[0] <= len(e.docstring) <= TEXT_CHARS[1]
        and len(e.first_sentence) < len(e.docstring)
        and _is_prose(e.docstring)
    ]
    for number, target in enumerate(candidates):
        examples = [candidates[(number + step) % len(candidates)] for step in (1, 2)]
        yield "\n\n".join(
            [
                *(f"Text: {e.docstring}\nSummary: {e.first_sentence}" for e in examples),
                f"Text: {target.docstring}\nSummary:",
            ]
        )


def _is_prose(text: str) -> bool:
    """Return whether a docstring has no code, lists or tables."""
    return not any(mark in text for mark in (">>>", "::", "--", "|", "\\"))


def generate_question_prompts(files: Sequence[SourceFile]) -> Iterator[str]:
    """Generate prompts of a page of documentation, a question with its answer, and a question without."""
    for file in files:
        for page in _split_pages(file):
            for number, target in enumerate(page):
                example = page[number - 1]
                answered = f"{_format_question(example)} {example.first_sentence}"
                yield f"{_format_page(page)}\n\n{answered}\n\n{_format_question(target)}"


def generate_conversations(files: Sequence[SourceFile]) -> Iterator[tuple[str, ...]]:
    """Generate conversations: a page of documentation once, then one question per turn."""
    for file in files:
        for page in _split_pages(file):
            example, *targets = page
            opening = f"{_format_page(page)}\n\n{_format_question(example)} {example.first_sentence}\n\n"
            for start in range(len(targets) - TURNS_PER_CONVERSATION + 1):
                first, *later = (_format_question(entry) for entry in targets[start : start + TURNS_PER_CONVERSATION])
                yield (opening + first, *later)


def _split_pages(file: SourceFile) -> list[list[DocumentedName]]:
    """Split the entries of a file into pages; a page too short for a conversation is dropped."""
    entries = extract_entries(file)
    pages = [entries[i : i + ENTRIES_PER_PAGE] for i in range(0, len(entries), ENTRIES_PER_PAGE)]
    return [page for page in pages if len(page) > TURNS_PER_CONVERSATION]


def _format_page(page: Sequence[DocumentedName]) -> str:
    return "\n".join(f"{entry.name}: {entry.first_sentence}" for entry in page)


def _format_question(entry: DocumentedName) -> str:
    return f"Question: What is {entry.name}?\nAnswer:"
