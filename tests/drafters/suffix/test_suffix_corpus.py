"""Files to draft from: the content read from each kind of file, and the errors for unreadable ones."""

import numpy as np
import pytest

from foredraft.drafters.method import DrafterContext
from foredraft.drafters.suffix.automaton import TEXT_BREAK, ReferenceAutomaton
from foredraft.drafters.suffix.corpus import read_corpus
from foredraft.errors import ForedraftError
from tests.support import tiny_models

VOCAB = 400


class Recorded(ReferenceAutomaton):
    """Records the tokens it is given."""

    def __init__(self):
        super().__init__()
        self.given = []

    def extend(self, tokens):
        self.given.append(list(tokens))


def read_tokens(*paths, tokenizer=None):
    context = DrafterContext(vocab_size=VOCAB, tokenizer=tokenizer)
    return read_corpus([str(path) for path in paths], context, Recorded()).given


def write_file(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content) if isinstance(content, bytes) else path.write_text(content, encoding="utf-8")
    return path


def test_a_file_of_text_is_one_text(tmp_path):
    tokenizer = tiny_models.tokenizer()
    path = write_file(tmp_path, "a.py", "def café(): pass\n")
    (ids,) = read_tokens(path, tokenizer=tokenizer)
    assert ids.pop() == TEXT_BREAK
    assert tokenizer.decode(ids) == "def café(): pass\n"


def test_lines_are_texts_or_token_ids(tmp_path):
    tokenizer = tiny_models.tokenizer()
    path = write_file(tmp_path, "a.jsonl", '{"text": "ab"}\n\n"ab"\n[1, 2]\n{"tokens": [3]}\n[]\n')
    ab = [*tokenizer("ab", add_special_tokens=False).input_ids, TEXT_BREAK]
    assert read_tokens(path, tokenizer=tokenizer) == [ab, ab, [1, 2, TEXT_BREAK], [3, TEXT_BREAK], [TEXT_BREAK]]


def test_arrays_are_token_ids_a_text_or_a_row_each(tmp_path):
    np.save(tmp_path / "one.npy", np.array([1, 2, 3], dtype=np.uint16))
    np.save(tmp_path / "rows.npy", np.array([[1, 2], [3, 4]]))
    assert read_tokens(tmp_path / "one.npy", tmp_path / "rows.npy") == [
        [1, 2, 3, TEXT_BREAK],
        [1, 2, TEXT_BREAK],
        [3, 4, TEXT_BREAK],
    ]


def test_what_is_not_there_or_no_text_is_said_with_its_name(tmp_path):
    np.save(tmp_path / "float.npy", np.zeros(3))
    np.save(tmp_path / "far.npy", np.array([VOCAB]))
    np.save(tmp_path / "object.npy", np.array([{}], dtype=object))
    for path, why in [
        (tmp_path / "none.txt", "does not exist"),
        (tmp_path, "is a folder"),
        (write_file(tmp_path, "bytes.txt", b"\xff\xfe\x00"), "not UTF-8"),
        (write_file(tmp_path, "b.jsonl", b"\xff\xfe\x00"), "not UTF-8"),
        (write_file(tmp_path, "a.txt", "text"), "no tokenizer"),
        (write_file(tmp_path, "c.jsonl", "[1]\nnot json"), "line 2 .*no JSON"),
        (write_file(tmp_path, "d.jsonl", "[1]\n{}"), "line 2 .*neither"),
        (write_file(tmp_path, "e.jsonl", "[true]"), "line 1 .*neither"),
        (write_file(tmp_path, "f.jsonl", "[-1]"), "token -1, which is outside"),
        (write_file(tmp_path, "a.npy", "no array"), "no array of numpy"),
        (tmp_path / "float.npy", "float64"),
        (tmp_path / "object.npy", "no array of numpy"),
        (tmp_path / "far.npy", f"token {VOCAB}, which is outside"),
    ]:
        with pytest.raises(ForedraftError, match=why):
            read_tokens(path)


def test_a_file_that_may_not_be_read_is_said(tmp_path, monkeypatch):
    path = write_file(tmp_path, "a.txt", "text")

    def refuse(*args, **more):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_text", refuse)
    with pytest.raises(ForedraftError, match="cannot be read: Permission denied"):
        read_tokens(path, tokenizer=tiny_models.tokenizer())
