"""Prompts over given documentation: each answer is in the text, and no question gives its answer away."""

import pytest

from foredraft.bench.documents import (
    extract_entries,
    generate_conversations,
    generate_question_prompts,
    generate_summary_prompts,
)
from foredraft.bench.questions import load_questions
from foredraft.bench.workloads import CONVERSATIONS, WORKLOADS
from foredraft.zoo.corpus import SourceFile

MODULE = SourceFile(
    "pkg/shapes.py",
    '"""Shapes."""\n'
    + "\n".join(
        f'def {name}():\n    """{first} It is kept as it was given\n    until it is needed again. Nothing else '
        'is touched here, and so there is nothing to undo afterwards."""\n'
        for name, first in [
            ("area", "Give the area of a shape in square metres."),
            ("edge", "Give the longest edge of a shape."),
            ("join", "Join two shapes along their longest edge."),
            ("turn", "Turn a shape about its centre."),
            ("_hidden", "Hide a shape from everyone else."),
            ("odd", "No sentence"),
        ]
    )
    + "def bare():\n    pass\n",
)


def test_entries_are_public_names_with_a_first_sentence():
    found = extract_entries(MODULE)
    assert [entry.name for entry in found[:4]] == [f"pkg.shapes.{n}" for n in ("area", "edge", "join", "turn")]
    assert found[0].first_sentence == "Give the area of a shape in square metres."
    assert found[0].docstring.startswith(f"{found[0].first_sentence} It is kept as it was given until")
    assert not {"pkg.shapes._hidden", "pkg.shapes.bare"} & {entry.name for entry in found}


def test_a_summary_is_asked_for_after_two_that_are_given():
    for prompt in generate_summary_prompts([MODULE]):
        *shown, asked = prompt.split("\n\n")
        assert len(shown) == 2
        assert asked.startswith("Text: ")
        assert asked.endswith("\nSummary:")
        for example in shown:
            text, summary = example.removeprefix("Text: ").split("\nSummary: ")
            assert text.startswith(summary)
            assert text != summary
        assert asked not in "".join(shown)


def test_an_answer_stands_on_the_page_and_not_after_the_question():
    found = {entry.name: entry.first_sentence for entry in extract_entries(MODULE)}
    for prompt in generate_question_prompts([MODULE]):
        page, shown, asked = prompt.split("\n\n")
        name = asked.removeprefix("Question: What is ").split("?")[0]
        assert f"{name}: {found[name]}" in page.splitlines()
        assert asked.endswith("Answer:")
        assert f"What is {name}?" not in shown


def test_a_talk_asks_about_one_page_turn_after_turn():
    (first, *later), *_ = generate_conversations([MODULE])
    assert first.startswith("pkg.shapes.area: ")
    assert len(later) == 2
    assert all(turn.startswith("Question: What is pkg.shapes.") for turn in later)
    assert len({first.split("\n\n")[-1], *later}) == 3


@pytest.mark.parametrize("name", ["summaries", "answers", "chat"])
def test_every_kind_has_as_many_prompts_as_a_benchmark_takes(name):
    found = load_questions(name, 40)
    assert len({question.turns for question in found}) == 40
    assert found == load_questions(name, 40)
    assert {len(question.turns) for question in found} == ({3} if name in CONVERSATIONS else {1})
    assert name in {**WORKLOADS, **CONVERSATIONS}
    assert all(sum(map(len, question.turns)) <= 1500 for question in found)
