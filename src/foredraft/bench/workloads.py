"""Prompts of several kinds of work for the built-in target, and texts to correct for the built-in encoder-decoder.

All are made from modules of the standard library that no built-in model has learnt from, the logs by a fixed recipe.
"""

import ast
import random
import re
from collections.abc import Callable, Iterator
from typing import TypeVar

from foredraft.bench import documents
from foredraft.zoo.corpus import SourceFile, make_held_out_prompts, split
from foredraft.zoo.prose import extract_passages
from foredraft.zoo.typos import add_typos

MAX_PROMPT_CHARS = 1500  # of a prompt
Prompt = TypeVar("Prompt", str, tuple[str, ...])
ERROR_RATE = 0.05  # of the words of a text to correct


def make_code_prompts(count: int) -> list[str]:
    """Openings of functions, with what stands before them."""
    return make_held_out_prompts(count)


def make_editing_prompts(count: int) -> list[str]:
    """A function, and the first lines of it again with one name exchanged for another."""
    return _select_evenly(("\n".join(_edit_lines(text, name)) for text, name in _find_editable_functions()), count)


def _edit_lines(text: str, name: str) -> Iterator[str]:
    lines = text.splitlines()
    yield from lines
    yield ""
    yield ""
    yield from (_rename_identifier(line, name) for line in lines[: 2 + len(lines) // 6])
    yield ""


def _rename_identifier(line: str, name: str) -> str:
    return re.sub(rf"\b{name}\b", f"new_{name}", line)


def _find_editable_functions() -> Iterator[tuple[str, str]]:
    """Functions of held-out files that are worth editing, with the name of their first parameter that is used often."""
    for file in _load_held_out_files():
        for node in ast.walk(ast.parse(file.text)):
            if not isinstance(node, ast.FunctionDef) or node.col_offset:
                continue
            text = ast.get_source_segment(file.text, node) or ""
            names = [a.arg for a in node.args.args if a.arg not in ("self", "cls")]
            often = [name for name in names if len(re.findall(rf"\b{name}\b", text)) >= 4]
            if often and 500 <= len(text) <= MAX_PROMPT_CHARS:
                yield text, often[0]


def make_log_prompts(count: int) -> list[str]:
    """Lines of a server's log: times that rise, a few kinds of messages, a few names."""
    return ["\n".join(_generate_log_lines(random.Random(seed), 22)) + "\n" for seed in range(count)]


def _generate_log_lines(rng: random.Random, count: int) -> Iterator[str]:
    modules = rng.sample(["http.server", "socketserver", "asyncio", "logging.handlers", "xmlrpc.server"], 2)
    paths = [f"/{name}/index.html" for name in rng.sample(["lib", "docs", "static", "archive", "tools"], 3)]
    second = rng.randrange(3600)
    for number in range(count):
        second += rng.randrange(1, 4)
        time = f"2026-03-{1 + count % 28:02d} {second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}"
        path, module = rng.choice(paths), rng.choice(modules)
        if rng.random() < 0.15:
            yield f"{time} WARNING {module}: connection reset by peer while reading {path}"
        else:
            yield f'{time} INFO {module}: "GET {path} HTTP/1.1" 200 {512 * (1 + number % 3)}'


def make_prose_prompts(count: int) -> list[str]:
    """Module docstrings and long comments, broken off in the middle."""
    found = (
        text[: 2 * len(text) // 3].rsplit(" ", 1)[0]
        for text in extract_passages(_load_held_out_files())
        if len(text) >= 200
    )
    return _select_evenly((f'"""{text}' for text in found), count)


def make_correction_prompts(count: int) -> list[str]:
    """Passages with errors of typing: for an encoder-decoder that undoes them."""
    rng = random.Random(0)
    return [add_typos(text, rng, ERROR_RATE) for text in make_clean_passages(count)]


def make_clean_passages(count: int) -> list[str]:
    """The passages that `corrections` spoils."""
    return _select_evenly((text for text in extract_passages(_load_held_out_files()) if 160 <= len(text) <= 320), count)


def make_summary_prompts(count: int) -> list[str]:
    """Documentation to summarise, after two examples."""
    return _select_evenly(documents.generate_summary_prompts(_load_held_out_files()), count)


def make_question_prompts(count: int) -> list[str]:
    """A page of documentation and a question whose answer stands in it."""
    return _select_evenly(documents.generate_question_prompts(_load_held_out_files()), count)


def make_chat_turns(count: int) -> list[tuple[str, ...]]:
    """Questions about one page of documentation, turn after turn."""
    return _select_evenly(documents.generate_conversations(_load_held_out_files()), count)


WORKLOADS: dict[str, Callable[[int], list[str]]] = {
    "code": make_code_prompts,
    "editing": make_editing_prompts,
    "logs": make_log_prompts,
    "prose": make_prose_prompts,
    "summaries": make_summary_prompts,
    "answers": make_question_prompts,
    "corrections": make_correction_prompts,
}
# the turns of every question
CONVERSATIONS: dict[str, Callable[[int], list[tuple[str, ...]]]] = {"chat": make_chat_turns}


def _load_held_out_files() -> list[SourceFile]:
    return [file for file in split()[1] if not file.name.startswith("test/")]


def _select_evenly(texts: Iterator[Prompt], count: int) -> list[Prompt]:
    """`count` of them, spread evenly over all."""
    every = list(dict.fromkeys(texts))
    count = min(count, len(every))
    return [every[i * len(every) // count] for i in range(count)]
