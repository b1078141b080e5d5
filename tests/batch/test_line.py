"""Lines of a batch file: what is a request, what is an error, and which fields are added."""

import json

import pytest

from foredraft.batch.line import CHAT, COMPLETIONS, LineFormat, examine_input, parse_line, read_lines
from foredraft.errors import ForedraftError

PLAIN = LineFormat(plain_fields={"temperature": 0.0, "max_tokens": 9}, seed=100)


def parse(value, line_format=PLAIN):
    return parse_line(value if isinstance(value, str) else json.dumps(value), 4, line_format)


@pytest.mark.parametrize("value", ['"a prompt"', {"prompt": "a prompt"}])
def test_a_prompt_is_a_completion_request_with_the_fields_of_plain_prompts(value):
    line = parse(value)
    assert (line.number, line.custom_id, line.url, line.error) == (4, "line-4", COMPLETIONS, "")
    assert line.body == {"prompt": "a prompt", "temperature": 0.0, "max_tokens": 9, "seed": 104}


def test_a_line_of_a_text_file_is_a_prompt_even_if_it_looks_like_json():
    assert parse('{"prompt": 1}', LineFormat(is_text=True)).body["prompt"] == '{"prompt": 1}'


def test_a_prompt_becomes_a_message_of_the_user_for_a_chat():
    line = parse('"hello"', LineFormat(is_chat=True))
    assert line.url == CHAT
    assert line.body["messages"] == [{"role": "user", "content": "hello"}]
    assert "prompt" not in line.body


def test_a_request_of_openai_has_no_field_of_plain_prompts():
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "seed": 7}
    line = parse({"custom_id": "one", "method": "POST", "url": CHAT, "body": body})
    assert (line.custom_id, line.url, line.body, line.error) == ("one", CHAT, body, "")


def test_fields_of_the_command_are_added_only_where_a_request_leaves_them_out():
    line_format = LineFormat(plain_fields={"max_tokens": 9}, fields={"max_tokens": 3, "top_p": 0.5})
    assert parse({"prompt": "x", "top_p": 0.9}, line_format).body["top_p"] == 0.9
    assert parse({"prompt": "x"}, line_format).body["max_tokens"] == 3
    assert parse({"url": COMPLETIONS, "body": {"prompt": "x"}}, line_format).body["max_tokens"] == 3


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("9" * 5000, "not JSON"),
        ("7", "JSON object or a string"),
        ({"custom_id": 3, "prompt": "x"}, "custom_id must be a string"),
        ('{"custom_id": "\\ud800", "prompt": "x"}', "custom_id must be a string of Unicode"),
        ({"custom_id": "", "prompt": "x"}, "custom_id must be a string"),
        ({}, "needs a prompt, or messages"),
        ({"prompt": "x", "messages": []}, "needs a prompt, or messages"),
        ({"url": "/v1/embeddings", "body": {}}, "url must be /v1/completions or"),
        ({"url": CHAT, "method": "GET", "body": {}}, "method must be POST"),
        ({"url": CHAT}, "body must be a JSON object"),
        ({"url": CHAT, "body": {}, "bdoy": 1}, "unknown field 'bdoy'"),
        ({"prompt": "x", "stream": True}, "a batch has no streams"),
    ],
)
def test_a_line_that_is_no_request_has_an_error(value, message):
    line = parse(value)
    assert message in line.error
    assert line.body == {}


def test_reading_skips_empty_lines_and_counts_them(tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_bytes('\ufeff"a"\r\n\n  \n"b\u2028c"\n"d"'.encode())
    lines = list(read_lines(file, PLAIN))
    assert [(line.number, line.body["prompt"]) for line in lines] == [(1, "a"), (4, "b\u2028c"), (5, "d")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"custom_id": "a", "prompt": "x"}\n\n{"custom_id": "a", "prompt": "y"}\n', "lines 1 and 3 .*'a'"),
        (b'"x"\n{"custom_id": "line-1", "prompt": "y"}\n', "lines 1 and 2 .*'line-1'"),
        (b"\n\n", "has no lines"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_files_that_are_no_batch_are_refused(content, message, tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_bytes(content)
    with pytest.raises(ForedraftError, match=message):
        examine_input(file, PLAIN)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ForedraftError, match=r"missing\.jsonl' cannot be read: no such file"):
        examine_input(tmp_path / "missing.jsonl", PLAIN)


def test_the_digest_is_that_of_the_content(tmp_path):
    file = tmp_path / "in.txt"
    file.write_text("a\nb\n")
    first = examine_input(file, LineFormat(is_text=True))
    file.write_text("a\nc\n")
    assert (first.num_lines, first.digest != examine_input(file, LineFormat(is_text=True)).digest) == (2, True)
