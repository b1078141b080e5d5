"""Question files and conversations: fields that are read, lines that are refused, and the messages for the model."""

import json

import pytest

from foredraft import ForedraftError
from foredraft.bench.questions import PromptBuilder, load_questions, read
from tests.support import tiny_models


def write(path, *lines: str):
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_lines_in_the_form_of_spec_bench_are_read(tmp_path):
    line = {"question_id": 81, "category": "writing", "turns": ["one", "two\n"], "reference": []}
    file = write(tmp_path / "q.jsonl", json.dumps(line), "", json.dumps({"turns": ["three"]}))
    assert [q.turns for q in read(file)] == [("one", "two\n"), ("three",)]
    assert [q.category for q in read(file)] == ["writing", ""]


def test_a_separator_inside_a_text_ends_no_line(tmp_path):
    turn = "one\u2028two\x85three"
    file = tmp_path / "q.jsonl"
    file.write_bytes(json.dumps({"turns": [turn]}, ensure_ascii=False).encode() + b'\r\n{"turns": ["next"]}\r\n')
    assert [q.turns for q in read(file)] == [(turn,), ("next",)]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", r"line 2 is not JSON \(Expecting"),
        ("[]", 'line 2 has no list of texts under "turns"'),
        ("{}", 'line 2 has no list of texts under "turns"'),
        ('{"turns": []}', 'line 2 has no list of texts under "turns"'),
        ('{"turns": "one"}', 'line 2 has no list of texts under "turns"'),
        ('{"turns": ["one", 2]}', 'line 2 has no list of texts under "turns"'),
        ('{"turns": [""]}', 'line 2 has no list of texts under "turns"'),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, complaint):
    file = write(tmp_path / "q.jsonl", '{"turns": ["good"]}', line)
    with pytest.raises(ForedraftError, match=complaint):
        read(file)


def test_files_that_cannot_be_read_are_one_line(tmp_path):
    with pytest.raises(ForedraftError, match="does not exist; check the path"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(ForedraftError, match="or name a built-in set: answers, chat, code"):
        read(tmp_path / "chats")
    with pytest.raises(ForedraftError, match="cannot be read"):
        read(tmp_path)
    with pytest.raises(ForedraftError, match="is empty"):
        read(write(tmp_path / "empty.jsonl", "", " "))
    (tmp_path / "latin.jsonl").write_bytes(b'{"turns": ["\xe9"]}')
    with pytest.raises(ForedraftError, match="not UTF-8"):
        read(tmp_path / "latin.jsonl")


def test_fewer_questions_than_there_are_cover_the_whole_file(tmp_path):
    file = write(tmp_path / "q.jsonl", *(json.dumps({"turns": [str(i)]}) for i in range(100)))
    assert [q.turns[0] for q in load_questions(file, 4)] == ["0", "25", "50", "75"]
    assert len(load_questions(file, None)) == 100
    assert len(load_questions(file, 1000)) == 100


def test_built_in_prompts_need_no_file():
    assert len({q.turns for q in load_questions(None, 3)}) == 3


def test_an_answer_goes_into_the_next_prompt():
    tokenizer = tiny_models.tokenizer()
    talk = PromptBuilder(tokenizer)
    first = talk.add_user_turn("the end")
    talk.add_answer([5, 6, 7], "ignored without a template")
    second = talk.add_user_turn("then")
    assert second[: len(first) + 3] == [*first, 5, 6, 7]
    assert tokenizer.decode(second[len(first) + 3 :]) == "\n\nthen"


def test_a_chat_template_is_used_where_there_is_one():
    class Templated:
        chat_template = "yes"

        def apply_chat_template(self, messages, tokenize, add_generation_prompt):
            assert not tokenize
            assert add_generation_prompt
            return "|".join(f"{m['role']}:{m['content']}" for m in messages)

        def __call__(self, text, add_special_tokens):
            assert not add_special_tokens
            return type("Encoding", (), {"input_ids": [text]})

    talk = PromptBuilder(Templated())
    talk.add_user_turn("one")
    talk.add_answer([1], "answer")
    assert talk.add_user_turn("two") == ["user:one|assistant:answer|user:two"]
