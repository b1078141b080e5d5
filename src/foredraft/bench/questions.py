"""Prompts of the benchmarks: a question file in the form of Spec-Bench and MT-bench, or a built-in workload.

A line of such a file is a JSON object with "turns", a list of texts, and perhaps "category"; other keys do not
matter. The answer to one turn goes into the prompt of the next.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.errors import ForedraftError

DEFAULT_NUM_PROMPTS = 20  # prompts, where nothing else is asked for


@dataclass(frozen=True)
class Question:
    turns: tuple[str, ...]
    name: str  # as a message would name it
    category: str = ""


def load_questions(file: Path | None, count: int | None) -> list[Question]:
    """`count` questions, spread evenly over a file, or built-in ones: of the workload whose name stands for a file, of
    `code` where there is none. Raises ForedraftError."""
    from foredraft.bench.workloads import CONVERSATIONS, WORKLOADS

    name = "code" if file is None else str(file)
    built_in = DEFAULT_NUM_PROMPTS if count is None else count
    if name in WORKLOADS:
        return [Question((text,), f"{name} {i + 1}") for i, text in enumerate(WORKLOADS[name](built_in))]
    if name in CONVERSATIONS:
        return [Question(turns, f"{name} {i + 1}") for i, turns in enumerate(CONVERSATIONS[name](built_in))]
    assert file is not None
    found = read(file)
    wanted = len(found) if count is None else min(count, len(found))
    # a file is sorted by category: its first lines alone would be a single one
    return [found[i * len(found) // wanted] for i in range(wanted)]


def list_built_in_sets() -> list[str]:
    """Names of the built-in workloads, as `--questions` takes them."""
    from foredraft.bench.workloads import CONVERSATIONS, WORKLOADS

    return sorted([*WORKLOADS, *CONVERSATIONS])


def read(file: Path) -> list[Question]:
    """Every question of a JSONL file. Raises ForedraftError that names the line."""
    try:
        # not splitlines(): JSON may hold U+2028 and its like, which are no ends of lines there
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
    found = [_parse_question(line, f"{file}, line {i + 1}") for i, line in enumerate(lines) if line.strip()]
    if not found:
        raise ForedraftError(f'question file {str(file)!r} is empty; a line of it is {{"turns": ["..."]}}')
    return found


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
    """The prompts of one question: the model's chat template where it has one, plain text otherwise."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._messages: list[dict[str, str]] = []
        self._ids: list[int] = []

    def add_user_turn(self, turn: str) -> list[int]:
        """Token ids of all that was said, with `turn` last."""
        if getattr(self._tokenizer, "chat_template", None):
            self._messages.append({"role": "user", "content": turn})
            text = self._tokenizer.apply_chat_template(self._messages, tokenize=False, add_generation_prompt=True)
            return list(self._tokenizer(text, add_special_tokens=False).input_ids)
        is_first = not self._ids
        self._ids += self._tokenizer(turn if is_first else f"\n\n{turn}", add_special_tokens=is_first).input_ids
        return list(self._ids)

    def add_answer(self, ids: Sequence[int], text: str) -> None:
        """Add the answer of the model."""
        self._messages.append({"role": "assistant", "content": text})
        self._ids += ids
