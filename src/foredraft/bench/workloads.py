"""Built-in workloads: prompts for the built-in target, and texts to correct for the built-in encoder-decoder.

All texts come from modules of the standard library that no built-in model was trained on. Only logs are generated, from
fixed seeds.
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

MAX_PROMPT_CHARS = 1500
MIN_EDIT_CHARS = 500  # length of a function to edit
MIN_NAME_USES = 4  # uses of the parameter that is renamed
NUM_LOG_LINES = 22
WARNING_SHARE = 0.15  # of the lines of a log
MIN_PROSE_CHARS = 200
MIN_CORRECTION_CHARS, MAX_CORRECTION_CHARS = 160, 320
Prompt = TypeVar("Prompt", str, tuple[str, ...])
ERROR_RATE = 0.05  # share of words with an error in a text to correct


def make_code_prompts(count: int) -> list[str]:
    """Make prompts that end in the opening of a function, with the code before it."""
    return make_held_out_prompts(count)


def make_editing_prompts(count: int) -> list[str]:
    """Make prompts of a function and a copy of its first lines in which one parameter is renamed."""
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
    """Find functions of held-out files with a frequently used parameter; yield their text and its name."""
    for file in _load_held_out_files():
        for node in ast.walk(ast.parse(file.text)):
            if not isinstance(node, ast.FunctionDef) or node.col_offset:
                continue
            text = ast.get_source_segment(file.text, node) or ""
            names = [a.arg for a in node.args.args if a.arg not in ("self", "cls")]
            frequent_names = [name for name in names if len(re.findall(rf"\b{name}\b", text)) >= MIN_NAME_USES]
            if frequent_names and MIN_EDIT_CHARS <= len(text) <= MAX_PROMPT_CHARS:
                yield text, frequent_names[0]


def make_log_prompts(count: int) -> list[str]:
    """Make prompts of lines of a server log with increasing times, a few kinds of messages and a few names."""
    return ["\n".join(_generate_log_lines(random.Random(seed), NUM_LOG_LINES)) + "\n" for seed in range(count)]


def _generate_log_lines(rng: random.Random, count: int) -> Iterator[str]:
    modules = rng.sample(["http.server", "socketserver", "asyncio", "logging.handlers", "xmlrpc.server"], 2)
    paths = [f"/{name}/index.html" for name in rng.sample(["lib", "docs", "static", "archive", "tools"], 3)]
    second = rng.randrange(3600)
    for number in range(count):
        second += rng.randrange(1, 4)
        time = f"2026-03-{1 + count % 28:02d} {second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}"
        path, module = rng.choice(paths), rng.choice(modules)
        if rng.random() < WARNING_SHARE:
            yield f"{time} WARNING {module}: connection reset by peer while reading {path}"
        else:
            yield f'{time} INFO {module}: "GET {path} HTTP/1.1" 200 {512 * (1 + number % 3)}'


def make_prose_prompts(count: int) -> list[str]:
    """Make prompts of module docstrings and long comments, cut off after two thirds."""
    passages = (
        text[: 2 * len(text) // 3].rsplit(" ", 1)[0]
        for text in extract_passages(_load_held_out_files())
        if len(text) >= MIN_PROSE_CHARS
    )
    return _select_evenly((f'"""{text}' for text in passages), count)


def make_correction_prompts(count: int) -> list[str]:
    """Make passages with typing errors, which the built-in encoder-decoder corrects."""
    rng = random.Random(0)
    return [add_typos(text, rng, ERROR_RATE) for text in make_clean_passages(count)]


def make_clean_passages(count: int) -> list[str]:
    """Make the passages of `make_correction_prompts`, without errors."""
    return _select_evenly(
        (
            text
            for text in extract_passages(_load_held_out_files())
            if MIN_CORRECTION_CHARS <= len(text) <= MAX_CORRECTION_CHARS
        ),
        count,
    )


def make_summary_prompts(count: int) -> list[str]:
    """Make prompts of documentation to summarise, after two examples."""
    return _select_evenly(documents.generate_summary_prompts(_load_held_out_files()), count)


def make_question_prompts(count: int) -> list[str]:
    """Make prompts of a page of documentation and a question that the page answers."""
    return _select_evenly(documents.generate_question_prompts(_load_held_out_files()), count)


def make_chat_turns(count: int) -> list[tuple[str, ...]]:
    """Make conversations of questions about one page of documentation."""
    return _select_evenly(documents.generate_conversations(_load_held_out_files()), count)


# Name for --questions -> function that makes prompts.
WORKLOADS: dict[str, Callable[[int], list[str]]] = {
    "code": make_code_prompts,
    "editing": make_editing_prompts,
    "logs": make_log_prompts,
    "prose": make_prose_prompts,
    "summaries": make_summary_prompts,
    "answers": make_question_prompts,
    "corrections": make_correction_prompts,
}
# Name for --questions -> function that makes the turns of conversations.
CONVERSATIONS: dict[str, Callable[[int], list[tuple[str, ...]]]] = {"chat": make_chat_turns}


def _load_held_out_files() -> list[SourceFile]:
    return [file for file in split()[1] if not file.name.startswith("test/")]


def _select_evenly(texts: Iterator[Prompt], count: int) -> list[Prompt]:
    """Select at most `count` distinct texts, spread evenly over all."""
    distinct = list(dict.fromkeys(texts))
    count = min(count, len(distinct))
    return [distinct[i * len(distinct) // count] for i in range(count)]
