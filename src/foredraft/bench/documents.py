"""Work over given text: summaries, answers to questions, and talks in turns about the documentation of Python modules.

The text is the docstrings of held-out modules. What a good answer would be stands in it, and the prompt shows by
examples that it is to be taken from there; no model had a part in it.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from foredraft.zoo.corpus import Source

SHORTEST, LONGEST = 20, 140  # characters of a first sentence
TEXT = (160, 520)  # characters of a text to summarise
TOLD, ASKED = 7, 3  # functions that a page describes; turns of a talk
_END = re.compile(r"(?<=[.!?])\s")


@dataclass(frozen=True)
class Entry:
    """A documented class or function."""

    name: str
    first: str  # sentence of its docstring
    text: str  # its docstring on one line


def entries(file: Source) -> list[Entry]:
    """What a file documents in prose, in its order, each name once."""
    module = file.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    found: dict[str, Entry] = {}
    for node in ast.walk(ast.parse(file.text)):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
            continue
        text = " ".join((ast.get_docstring(node) or "").split())
        first = _END.split(text)[0]
        if SHORTEST <= len(first) <= LONGEST and first.isascii() and first[-1] == "." and ">>>" not in first:
            found.setdefault(node.name, Entry(f"{module}.{node.name}", first, text))
    return list(found.values())


def summaries(files: Sequence[Source]) -> Iterator[str]:
    """Two texts with their first sentences as summaries, and a third without."""
    every = [entry for file in files for entry in entries(file)]
    fitting = [
        e for e in every if TEXT[0] <= len(e.text) <= TEXT[1] and len(e.first) < len(e.text) and _is_prose(e.text)
    ]
    for number, asked in enumerate(fitting):
        shown = [fitting[(number + step) % len(fitting)] for step in (1, 2)]
        yield "\n\n".join([*(f"Text: {e.text}\nSummary: {e.first}" for e in shown), f"Text: {asked.text}\nSummary:"])


def _is_prose(text: str) -> bool:
    return not any(mark in text for mark in (">>>", "::", "--", "|", "\\"))


def answers(files: Sequence[Source]) -> Iterator[str]:
    """A page of documentation, a question about it with its answer, and another question."""
    for file in files:
        for page in _pages(file):
            for number, asked in enumerate(page):
                shown = page[number - 1]
                yield f"{_page(page)}\n\n{_question(shown)} {shown.first}\n\n{_question(asked)}"


def talks(files: Sequence[Source]) -> Iterator[tuple[str, ...]]:
    """The same page once, then question after question in turns."""
    for file in files:
        for page in _pages(file):
            shown, *asked = page
            opening = f"{_page(page)}\n\n{_question(shown)} {shown.first}\n\n"
            for start in range(len(asked) - ASKED + 1):
                first, *later = (_question(entry) for entry in asked[start : start + ASKED])
                yield (opening + first, *later)


def _pages(file: Source) -> list[list[Entry]]:
    """The entries of a file, so many together, as long as there are enough for a talk."""
    every = entries(file)
    cut = [every[i : i + TOLD] for i in range(0, len(every), TOLD)]
    return [page for page in cut if len(page) > ASKED]


def _page(page: Sequence[Entry]) -> str:
    return "\n".join(f"{entry.name}: {entry.first}" for entry in page)


def _question(entry: Entry) -> str:
    return f"Question: What is {entry.name}?\nAnswer:"
