"""Files as documents, documents as rows, and the order they are read in."""

import copy
import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foredraft.errors import ForedraftError
from foredraft.train.data import DocumentReader
from foredraft.train.documents import Document, digest, hold_out
from foredraft.train.windows import RowOrder, TokenWindows
from tests.support.tiny_models import TEXT, tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def chatty():
    made = copy.deepcopy(tokenizer())
    made.chat_template = TEMPLATE
    return made


def reader(tok=None):
    return DocumentReader(tok or tokenizer(), 1000, frozenset({3}))


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_a_text_file_is_one_document_that_ends(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    [document] = reader().read_documents([str(tmp_path / "a.txt")])
    ids = document.ids.tolist()
    assert tokenizer().decode(ids).startswith(tokenizer().decode(tokenizer()(TEXT).input_ids)[:40])
    assert document.loss_mask.tolist() == [False] + [True] * (len(ids) - 1)


def test_of_a_completion_the_prompt_is_read_and_not_learnt(tmp_path):
    file = write(tmp_path / "a.jsonl", [{"prompt": "the end of", "completion": " the end"}])
    [document] = reader().read_documents([file])
    assert tokenizer().decode(document.ids[document.loss_mask]).startswith(" the end")
    assert tokenizer().decode(document.prompt) == "the end of"


def test_of_a_chat_only_the_assistant_is_learnt(tmp_path, chatty):
    messages = [
        {"role": "user", "content": "the"}, {"role": "assistant", "content": "there"},
        {"role": "user", "content": "then"}, {"role": "assistant", "content": "these"},
    ]  # fmt: skip
    [document] = reader(chatty).read_documents([write(tmp_path / "a.jsonl", [{"messages": messages}])])
    assert chatty.decode(document.ids[document.loss_mask]) == "there\nthese\n"
    assert chatty.decode(document.prompt) == "<user>the\n<assistant>"


def test_a_chat_is_answered_from_its_last_question(tmp_path, chatty):
    messages = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "end"}]
    [prompt] = reader(chatty).read_prompts([write(tmp_path / "a.jsonl", [{"messages": messages}])], 8)
    assert chatty.decode(prompt) == "<user>the\n<assistant>"


def test_a_bare_prompt_becomes_a_question_where_there_is_a_template(tmp_path, chatty):
    file = write(tmp_path / "a.jsonl", [{"prompt": "the"}])
    assert chatty.decode(reader(chatty).read_prompts([file], 8)[0]) == "<user>the\n<assistant>"
    assert tokenizer().decode(reader().read_prompts([file], 8)[0]) == "the"


def test_an_array_is_cut_where_texts_begin(tmp_path):
    np.save(tmp_path / "a.npy", np.array([3, 5, 6, 3, 7, 8, 9], dtype=np.uint16))
    found = reader().read_documents([str(tmp_path / "a.npy")])
    assert [document.ids.tolist() for document in found] == [[3, 5, 6], [3, 7, 8, 9]]


@pytest.mark.parametrize("kind", ["saved", "parquet", "arrow"])
def test_a_dataset_folder_is_read(tmp_path, kind):
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"text": ["the end", "then the end"]})
    if kind == "parquet":
        made.to_parquet(str(tmp_path / "a.parquet"))
    else:
        made.save_to_disk(str(tmp_path / "saved"))
    place = {"saved": tmp_path / "saved", "parquet": tmp_path, "arrow": tmp_path / "saved"}[kind]
    if kind == "arrow":
        (place / "state.json").unlink()
    found = reader().read_documents([str(place)])
    assert [tokenizer().decode(d.ids, skip_special_tokens=True) for d in found] == ["the end", "then the end"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "no text in it"),
        ("a.jsonl", b"{", r"a\.jsonl:1 is not JSON"),
        ("a.jsonl", b"[1]", r"a\.jsonl:1 is not a JSON object"),
        ("a.jsonl", b'{"body": "x"}', r"a\.jsonl:1 has the keys body; a record is"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}', "no chat template"),
        ("a.txt", b"\xff\xfe", "is not UTF-8"),
        ("a.npy", b"nothing", "cannot be read as an array"),
        ("a.parquet", b"nothing", "cannot be read as a table"),
    ],
)
def test_a_bad_file_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ForedraftError, match=message) as error:
        reader().read_documents([str(tmp_path / name)])
    assert "\n" not in str(error.value)


def test_an_array_of_pickles_is_not_opened(tmp_path):
    np.save(tmp_path / "a.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ForedraftError, match="array of token ids"):
        reader().read_documents([str(tmp_path / "a.npy")])


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ForedraftError, match=r"holds no dataset and no \.jsonl"):
        reader().read_documents([str(tmp_path)])


def doc(ids, learnt=None):
    return Document(np.array(ids), None if learnt is None else np.array(learnt))


def test_a_document_begins_a_row_and_ends_share_one():
    windows = TokenWindows.pack([doc(range(10, 20)), doc(range(30, 33))], 4)
    tokens, mask = windows.read(range(len(windows)))
    assert tokens.tolist() == [[10, 11, 12, 13, 14], [14, 15, 16, 17, 18], [18, 19, 30, 31, 32]]
    assert mask.tolist() == [
        [False, True, True, True, True], [False, True, True, True, True], [False, True, False, True, True],
    ]  # fmt: skip


def test_rows_of_a_question_alone_are_left_out():
    windows = TokenWindows.pack([doc(range(10, 21), [False] * 8 + [True] * 3)], 4)
    tokens, mask = windows.read(range(len(windows)))
    assert tokens.tolist() == [[14, 15, 16, 17, 18], [18, 19, 20, 0, 0]]
    assert mask.int().tolist() == [[0, 0, 0, 0, 1], [0, 1, 1, 0, 0]]


def test_nothing_to_learn_is_an_error():
    with pytest.raises(ForedraftError, match="no token to learn"):
        TokenWindows.pack([doc([1, 2, 3], [False] * 3)], 4)
    with pytest.raises(ForedraftError, match="no text to learn from"):
        TokenWindows.pack([], 4)


@given(st.lists(st.integers(2, 40), min_size=1, max_size=30), st.integers(2, 12))
def test_every_token_to_learn_is_learnt_once(lengths, context):
    # each token has a different id, so that a token lost or learnt twice would show
    starts = np.cumsum([1, *lengths])
    documents = [doc(range(a, b)) for a, b in itertools.pairwise(starts)]
    windows = TokenWindows.pack(documents, context)
    tokens, mask = windows.read(range(len(windows)))
    expected = [i for document in documents for i in document.ids[1:].tolist()]
    assert sorted(tokens[mask].tolist()) == expected
    assert windows.num_loss_tokens == len(expected)
    before = torch.where(mask, tokens - tokens.roll(1, 1), 1)
    assert (before == 1).all()  # what is learnt stands behind what precedes it in its text


def with_source(ids, source, num_prefix=1):
    return Document(np.array(ids), np.arange(len(ids)) >= num_prefix, source)


def test_a_document_with_a_source_has_a_row_of_its_own():
    documents = [
        with_source([2, 10, 11], (5,)), with_source([2, 0, 12], (6, 7), 2), with_source([2, 0], (8,), 2),
        with_source([2, *range(20, 30)], (9,)),
    ]  # fmt: skip
    windows = TokenWindows.pack(documents, 4)
    assert windows.sources == ((5,), (6, 7), (9,))  # one has nothing to learn
    tokens, mask, sources = windows.read_with_sources(range(3))
    assert tokens.tolist() == [[2, 10, 11, 0, 0], [2, 0, 12, 0, 0], [2, 20, 21, 22, 23]]
    assert mask.int().tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 0, 0], [0, 1, 1, 1, 1]]
    assert [source.tokens for source in sources] == [(5,), (6, 7), (9,)]
    assert windows.num_loss_tokens == 7
    tokens, mask, sources = windows.read_with_sources([1, 0])
    assert tokens.tolist() == [[2, 0, 12], [2, 10, 11]]
    assert mask.int().tolist() == [[0, 0, 1], [0, 1, 1]]
    assert [source.tokens for source in sources] == [(6, 7), (5,)]
    plain = TokenWindows.pack([doc([2, 10, 11])], 4)
    assert plain.read_with_sources([0])[0].tolist() == [[2, 10, 11, 0, 0]]
    assert plain.read_with_sources([0])[2] == ()


def test_every_pass_reads_all_rows_in_an_order_of_its_own():
    order = RowOrder(10, seed=1)
    first, second = order.take(0, 10), order.take(10, 10)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert RowOrder(10, seed=1).take(7, 6) == (first + second)[7:13]  # from the middle, as a resumed run does
    assert RowOrder(10, seed=2).take(0, 10) != first


def test_held_out_texts_are_not_learnt_from():
    documents = [doc([i, i + 1]) for i in range(20)]
    kept, held = hold_out(documents, 0.1)
    assert len(held) == 2
    assert digest(kept + held) != digest(documents)
    assert not {id(d) for d in kept} & {id(d) for d in held}
    assert hold_out(documents[:1], 0.5)[1] == []


def test_of_one_long_text_the_end_is_held_out():
    [kept], [held] = hold_out([doc(range(1000))], 0.1)
    assert (kept.ids.tolist(), held.ids.tolist()) == (list(range(900)), list(range(900, 1000)))
    assert hold_out([doc(range(100))], 0.1)[1] == []
