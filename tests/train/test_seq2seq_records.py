"""Records with a source: the ids of a document are those that the decoder reads when it serves the request."""

from difflib import SequenceMatcher

import numpy as np
import pytest

from foredraft import LLM, Sampling
from foredraft.errors import ForedraftError
from foredraft.source import EncoderSource, PreparedPrompt
from foredraft.train.data import BUILTIN, DocumentReader
from foredraft.train.documents import Document, digest, hold_out
from foredraft.train.evaluate import select_prompts
from foredraft.train.prompts import get_ids, get_source
from foredraft.train.seq2seq_records import Seq2SeqEncoding, write_record
from tests.support import tiny_seq2seq
from tests.support.seq2seq_training import END, SETUPS, make_pair, make_reader, write_lines
from tests.support.tiny_models import tokenizer as plain_tokenizer

# What the tokenizer writes before a text and the decoder has to write itself, if nothing is forced.
OWN_BEGINNING = {"bart": "<s>", "mbart50": "ro_RO"}


@pytest.fixture(scope="module", params=SETUPS)
def named(request):
    model, tokenizer = make_pair(request.param)
    return request.param, LLM(model, None, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def llm():
    model, tokenizer = make_pair("bart, forced")
    return LLM(model, None, tokenizer=tokenizer)


def read(llm, tmp_path, *records):
    return make_reader(llm).read_documents([write_lines(tmp_path / "a.jsonl", records)])


def test_a_document_is_what_the_decoder_reads_and_writes(named, tmp_path):
    """Fault: after mBART's end token came its language, and a second end token."""
    name, llm = named
    [document] = read(llm, tmp_path, {"source": "teh end", "text": "the end 5"})
    [served] = llm.generate("teh end", Sampling(max_tokens=1))
    prefix = served.prompt_token_ids
    setup, tokenizer = SETUPS[name], llm.tokenizer
    begins = [setup.start] if setup.forced is None else [setup.start, setup.forced]
    assert prefix == tokenizer.convert_tokens_to_ids(begins)
    own = [tokenizer.convert_tokens_to_ids(OWN_BEGINNING[name])] if name in OWN_BEGINNING else []
    text = tokenizer("the end 5", add_special_tokens=False).input_ids
    assert document.ids.tolist() == [*prefix, *own, *text, END]
    assert document.loss_mask.tolist() == [False] * len(prefix) + [True] * (len(own) + len(text) + 1)
    assert document.prompt == prefix
    assert document.source == tuple(tokenizer("teh end").input_ids)


def test_a_prompt_is_what_a_request_for_the_source_reads(named, tmp_path):
    _, llm = named
    [prompt] = make_reader(llm).read_prompts([write_lines(tmp_path / "a.jsonl", [{"source": "teh end"}])], 8)
    greedy = Sampling(max_tokens=12, temperature=0)
    [given], [served] = llm.generate([prompt], greedy), llm.generate("teh end", greedy)
    assert (given.prompt_token_ids, given.token_ids) == (served.prompt_token_ids, served.token_ids)


def test_the_text_may_contain_what_ends_it(llm, tmp_path):
    """A text that spells the end token ends there, as an output does."""
    [document] = read(llm, tmp_path, {"source": "a", "text": "the end </s> of it"})
    assert document.ids.tolist().count(END) == 2  # one is BART's start token
    assert document.ids[-1] == END


def test_a_tokenizer_without_an_end_token_takes_the_models(tmp_path):
    model, tokenizer = make_pair("t5, the tokenizer adds no end")
    encoding = Seq2SeqEncoding.from_model(LLM(model, None, tokenizer=tokenizer).target, tokenizer)

    class Endless:
        eos_token_id = None

        def __call__(self, *args, **options):
            return tokenizer(*args, **options)

    document = Seq2SeqEncoding(
        "it", Endless(), encoding.prefix, encoding.end_ids, encoding.max_source, encoding.vocab_size
    ).parse_document({"source": "a", "text": "b"}, "line")
    assert document.ids[-1] == END


def test_a_record_without_a_text_has_a_source_and_nothing_to_learn(llm, tmp_path):
    with_text, without = read(llm, tmp_path, {"source": "a", "text": "b"}, {"source": "a b"})
    assert without.loss_mask.sum() == 0
    assert with_text.loss_mask.sum() > 0


@pytest.mark.parametrize("answer", [[7, 8, END], [], [9]])
def test_a_written_answer_is_read_back(llm, tmp_path, answer):
    prompt = PreparedPrompt(EncoderSource((5, 6, END)), [END, 0])
    [document] = read(llm, tmp_path, write_record(prompt, answer) | {"text": "ignored"})
    assert document.ids.tolist() == [END, 0, *answer]
    assert document.loss_mask.tolist() == [False, False, *[True] * len(answer)]
    assert document.source == (5, 6, END)
    assert write_record([4, 5], answer) == {"ids": [4, 5, *answer], "prompt_tokens": 2}


def test_equal_texts_with_other_sources_are_other_documents():
    ids, mask = np.array([2, 5]), np.array([False, True])
    first, second = Document(ids, mask, (4,)), Document(ids, mask, (5,))
    assert digest([first]) != digest([second]) != digest([Document(ids, mask)])
    prompts = select_prompts([first, second, first], 3, 8)
    assert [get_source(prompt).tokens for prompt in prompts] == [(4,), (5,)]
    assert [get_ids(prompt) for prompt in prompts] == [[2], [2]]
    assert hold_out([first], 0.5) == ([first], [])  # the end of an output is no output of the source


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "b"}, r"a\.jsonl:1 has no source \(its keys: text\), and .* give JSON Lines with {\"source\""),
        ({"prompt": "a", "completion": "b"}, r"no source \(its keys: prompt, completion\)"),
        ({"messages": [{"role": "user", "content": "a"}]}, r"no source \(its keys: messages\)"),
        ({"ids": [2, 0, 5], "prompt_tokens": 2}, r"no source \(its keys: ids, prompt_tokens\)"),
        ({"source": "", "text": "b"}, "no source"),
        ({"source": ["a"], "text": "b"}, "no source"),
        ({"source": "a", "text": 5}, "the text is not a string"),
        ({"source": "a" * 200, "text": "b"}, r"the source has 20\d tokens and the encoder of .* takes 128; shorten it"),
        ({"source_ids": [5]}, "source_ids without lists of token ids"),
        ({"source_ids": 5, "ids": [2, 0, 5], "prompt_tokens": 2}, "source_ids without lists of token ids"),
        ({"source_ids": [5], "ids": ["x"], "prompt_tokens": 2}, "source_ids without lists of token ids"),
        ({"source_ids": [], "ids": [2, 0, 5], "prompt_tokens": 2}, "no source or no tokens"),
        ({"source_ids": [5], "ids": [2, 0, 5], "prompt_tokens": 0}, "no source or no tokens"),
        ({"source_ids": [5] * 200, "ids": [2, 0, 5], "prompt_tokens": 2}, "has 200 tokens"),
        ({"source_ids": [5000], "ids": [2, 0, 5], "prompt_tokens": 2}, "outside the vocabulary"),
        ({"source_ids": [5], "ids": [2, 0, 5000], "prompt_tokens": 2}, "outside the target's vocabulary"),
    ],
)
def test_a_record_that_cannot_be_used_is_named(llm, tmp_path, record, message):
    with pytest.raises(ForedraftError, match=message) as error:
        read(llm, tmp_path, record)
    assert "\n" not in str(error.value)


def test_text_and_arrays_have_no_source(llm, tmp_path):
    (tmp_path / "a.txt").write_text("the end")
    np.save(tmp_path / "a.npy", np.array([2, 5, 6]))
    for name in ("a.txt", "a.npy"):
        with pytest.raises(ForedraftError, match=r"a\.\w+ has no source.*; give JSON Lines with"):
            make_reader(llm).read_documents([str(tmp_path / name)])
        with pytest.raises(ForedraftError, match=r"a\.\w+ has no source.*; give JSON Lines with"):
            make_reader(llm).read_prompts([str(tmp_path / name)], 4)


def test_a_source_for_a_target_without_an_encoder_is_refused(tmp_path):
    """Fault: the source was left out without a word, and texts were learnt that no request asks for."""
    reader = DocumentReader(plain_tokenizer(), 1000, frozenset({3}))
    for record in ({"source": "a", "text": "b"}, {"source_ids": [4], "ids": [2, 5], "prompt_tokens": 1}):
        with pytest.raises(ForedraftError, match="the target has no encoder; give the source as prompt"):
            reader.read_documents([write_lines(tmp_path / "a.jsonl", [record])])
    columns = {"text": "the end", "source": "web", "id": 5}  # a column that names the text's origin
    [document] = reader.read_documents([write_lines(tmp_path / "a.jsonl", [columns])])
    assert plain_tokenizer().decode(document.ids, skip_special_tokens=True) == "the end"


def test_audio_is_refused():
    llm = LLM(tiny_seq2seq.make_model("whisper"), None)
    with pytest.raises(ForedraftError, match="reads audio; drafters are trained only for encoders that read text"):
        Seq2SeqEncoding.from_model(llm.target, None)


def test_a_target_without_a_tokenizer_reads_answers_alone(tmp_path):
    llm = LLM(make_pair("t5")[0], None)
    [document] = read(llm, tmp_path, {"source_ids": [5], "ids": [1, 7], "prompt_tokens": 1})
    assert document.source == (5,)
    with pytest.raises(ForedraftError, match=r"has no tokenizer, so .* cannot be read; add its tokenizer"):
        read(llm, tmp_path, {"source": "a", "text": "b"})


def test_the_builtin_pairs_are_corrections_for_the_builtin_model():
    llm = LLM("builtin-seq2seq", None)
    found = make_reader(llm).read_documents([BUILTIN], is_held_out=True)
    documents = found[:: len(found) // 20]
    sources, texts = [[llm.tokenizer.decode(ids, skip_special_tokens=True) for ids in side] for side in (
        [document.source for document in documents], [document.ids for document in documents],
    )]  # fmt: skip
    assert sources != texts
    similarities = [SequenceMatcher(None, *pair).ratio() for pair in zip(sources, texts, strict=True)]
    assert 0.7 < min(similarities) < 1
