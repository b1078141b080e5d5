"""The built-in prompts: the requested number, all different, and of the stated kind."""

import random
import re

import pytest

from foredraft.bench.questions import load_questions
from foredraft.bench.workloads import WORKLOADS, make_clean_passages, make_correction_prompts
from foredraft.zoo.corpus import SourceFile, split
from foredraft.zoo.prose import extract_passages
from foredraft.zoo.typos import EDITS, add_typos


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_every_workload_gives_different_prompts_the_same_each_time(name):
    made = WORKLOADS[name](8)
    assert len(set(made)) == 8
    assert made == WORKLOADS[name](8)


def test_a_workload_is_asked_for_by_its_name():
    assert [q.turns[0] for q in load_questions("logs", 3)] == WORKLOADS["logs"](3)
    assert [q.name for q in load_questions("logs", 3)] == ["logs 1", "logs 2", "logs 3"]


def test_an_edit_begins_as_the_source_that_stands_before_it():
    for prompt in WORKLOADS["editing"](8):
        old, new = prompt.rstrip("\n").split("\n\n\n")[0], prompt.rstrip("\n").split("\n\n\n")[-1]
        first = new.splitlines()[0]
        assert "new_" in new
        assert old.splitlines()[0] == first.replace("new_", "")


def test_what_is_to_be_corrected_is_held_out_and_wrong():
    """None of these passages is in the training text of the built-in models."""
    wrong, right = make_correction_prompts(20), make_clean_passages(20)
    learnt = re.sub(r"[\s#]+", " ", "\n".join(file.text for file in split()[0]))
    assert not [text for text in right if text in learnt]
    assert sum(w != r for w, r in zip(wrong, right, strict=True)) > 14


@pytest.mark.parametrize("edit", sorted(set(EDITS), key=lambda e: e.__name__))
def test_an_error_changes_one_word_a_little(edit):
    rng = random.Random(0)
    for word in ("quick", "the", "function's", "a.b.c", "(brown)"):
        made = edit(rng, word)
        assert abs(len(made) - len(word)) <= 1
        assert sum(c not in word for c in made) <= 1


def test_the_rate_of_errors_is_what_was_asked_for():
    text = "these quick words stand here without any errors whatever" * 50
    words = text.split(" ")
    changed = sum(a != b for a, b in zip(words, add_typos(text, random.Random(1), 0.1).split(" "), strict=False))
    assert add_typos(text, random.Random(1), 0.0) == text
    assert changed > 0.05 * len(words)


def test_prose_is_docstrings_and_comments_and_no_code():
    text = (
        '"""A module that says what it is made for."""\nx = 1\n\n# A comment that goes on\n# over two lines.\ny = 2\n'
    )
    assert extract_passages([SourceFile("a.py", text)]) == [
        "A module that says what it is made for.",
        "A comment that goes on over two lines.",
    ]
    assert extract_passages([SourceFile("b.py", "def broken(:")]) == []
