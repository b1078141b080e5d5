"""Prompts of the benchmarks: a question file in the format of Spec-Bench and MT-bench, or a built-in workload.

Every line of a file is a JSON object with "turns", a list of texts, and optionally "category"; other keys are ignored.
The prompt of a turn contains the answers to earlier turns.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.errors import ForedraftError

DEFAULT_NUM_PROMPTS = 20  # prompts of a built-in workload if no number is given


@dataclass(frozen=True)
class Question:
    """One question with all its turns."""

    turns: tuple[str, ...]
    name: str  # as messages name it
    category: str = ""


def load_questions(file: Path | None, count: int | None) -> list[Question]:
    """Load questions of a file or of a built-in workload.

    Args:
        file: question file, or the name of a built-in workload; None = workload `code`.
        count: number of questions, spread evenly over a file; None = the whole file, or DEFAULT_NUM_PROMPTS.

    Raises:
        ForedraftError: the file cannot be read, or a line has no list of turns.
    """
    from foredraft.bench.workloads import CONVERSATIONS, WORKLOADS

    name = "code" if file is None else str(file)
    num_built_in = DEFAULT_NUM_PROMPTS if count is None else count
    if name in WORKLOADS:
        return [Question((text,), f"{name} {i + 1}") for i, text in enumerate(WORKLOADS[name](num_built_in))]
    if name in CONVERSATIONS:
        return [Question(turns, f"{name} {i + 1}") for i, turns in enumerate(CONVERSATIONS[name](num_built_in))]
    assert file is not None
    questions = read(file)
    num_questions = len(questions) if count is None else min(count, len(questions))
    # Files are sorted by category, so the first lines alone would be of one category.
    return [questions[i * len(questions) // num_questions] for i in range(num_questions)]


def list_built_in_sets() -> list[str]:
    """List the names of the built-in workloads, as `--questions` takes them."""
    from foredraft.bench.workloads import CONVERSATIONS, WORKLOADS

    return sorted([*WORKLOADS, *CONVERSATIONS])


def read(file: Path) -> list[Question]:
    """Read all questions of a JSONL file.

    Raises:
        ForedraftError: the file cannot be read or is empty, or a line, which the message names, is invalid.
    """
    try:
        # JSON strings may contain U+2028, at which splitlines() would split.
        lines = file.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise ForedraftError(
            f"question file {str(file)!r} does not exist; check the path given to --questions, or name a built-in set: "
            f"{', '.join(list_built_in_sets())}"
        ) from None
    except OSError as error:
        raise ForedraftError(f"question file {str(file)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ForedraftError(f"question file {str(file)!r} is not UTF-8; save it as UTF-8 first") from None
    questions = [_parse_question(line, f"{file}, line {i + 1}") for i, line in enumerate(lines) if line.strip()]
    if not questions:
        raise ForedraftError(f'question file {str(file)!r} is empty; a line of it is {{"turns": ["..."]}}')
    return questions


def _parse_question(line: str, location: str) -> Question:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ForedraftError(f"{location} is not JSON ({error.msg}); every line is one object") from None
    turns = entry.get("turns") if isinstance(entry, dict) else None
    is_texts = isinstance(turns, list) and all(isinstance(turn, str) and turn for turn in turns)
    if not turns or not is_texts:
        raise ForedraftError(f'{location} has no list of texts under "turns"; write {{"turns": ["first", "second"]}}')
    category = entry.get("category")
    return Question(tuple(turns), location, category if isinstance(category, str) else "")


class PromptBuilder:
    """Builder of the prompts of one question, in the chat template of the model or, without one, as plain text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._messages: list[dict[str, str]] = []
        self._ids: list[int] = []

    def add_user_turn(self, turn: str) -> list[int]:
        """Add a turn of the user and return the token ids of the whole conversation."""
        if getattr(self._tokenizer, "chat_template", None):
            self._messages.append({"role": "user", "content": turn})
            text = self._tokenizer.apply_chat_template(self._messages, tokenize=False, add_generation_prompt=True)
            return list(self._tokenizer(text, add_special_tokens=False).input_ids)
        is_first = not self._ids
        self._ids += self._tokenizer(turn if is_first else f"\n\n{turn}", add_special_tokens=is_first).input_ids
        return list(self._ids)

    def add_answer(self, ids: Sequence[int], text: str) -> None:
        """Add an answer of the model, as token ids and as text."""
        self._messages.append({"role": "assistant", "content": text})
        self._ids += ids
