"""Tokens as bytes, texts cut to the byte, and readings that grow.

Guards against seams that lose or double a byte, halves of characters, tokenizers that put a space before a text or
change what they read, control tokens taken for text and text taken for control tokens, and a memory held right beyond
the first token that changed.
"""

import random
from itertools import pairwise

import pytest

from foredraft.drafters.draft_model.cross_vocab.retokenizer import MAX_OPEN_BYTES, IncrementalRetokenizer
from foredraft.drafters.draft_model.cross_vocab.select import VocabInfo, build_vocab_map, select_translation
from foredraft.drafters.draft_model.cross_vocab.slem import SlemDrafter
from foredraft.drafters.draft_model.cross_vocab.tli import TliDrafter
from foredraft.drafters.draft_model.cross_vocab.vocab_map import VocabMap
from foredraft.errors import ForedraftError
from foredraft.tokenization.byte_vocabulary import UNKNOWN_BYTE, TokenizerVocabulary
from foredraft.tokenization.token_bytes import strip_partial_character
from tests.support import tiny_models, tiny_vocabularies

TEXTS = {
    "words": "the end and then the ende",
    "spaces": "a  b   c\n\n\n   the\t\tend \n",
    "emoji": "🍣🍣 sushi 👩‍🚀👩‍🚀 and 🍣",
    "cjk": "今天天气很好。世界你好世界你好",
    "accents": "naïve café größe Где вокзал",
    "controls": "a<end>b <stop> </s> <s>the<|x|>",
    "bytes": "\x00\x01\x7f",
}
TOKENIZERS = {
    "bytes": tiny_models.tokenizer,
    "other bytes": tiny_vocabularies.byte_tokenizer,
    "pieces": tiny_vocabularies.piece_tokenizer,
}


def vocabulary(name: str) -> TokenizerVocabulary:
    tokenizer = TOKENIZERS[name]()
    return TokenizerVocabulary(tokenizer, len(tokenizer))


def join_bytes(vocabulary: TokenizerVocabulary, ids: list[int]) -> bytes:
    pieces = [vocabulary.token_bytes[token] for token in ids]
    assert None not in pieces
    return b"".join(pieces)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_is_spelt_to_the_byte_wherever_it_is_cut(name: str, text: str) -> None:
    """Within characters too; and every part goes on from the one before."""
    made, data = vocabulary(name), text.encode()
    for cut in range(1, len(data)):
        ids = made.encode_continuation(data[:cut], data[cut:])
        assert UNKNOWN_BYTE not in ids
        assert join_bytes(made, ids) == data[cut:]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_whole_text_is_cut_as_its_tokenizer_does(text: str) -> None:
    """The space before a text included, which pieces have; a text that looks like a control token is text."""
    for name, make in TOKENIZERS.items():
        made, data = vocabulary(name), text.encode()
        ids = made.encode_continuation(b"", data)
        plain = make().encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ids == plain
        assert not any(token in made.control_tokens.values() for token in ids)


def test_a_seam_within_a_token_keeps_the_tokens_after_it() -> None:
    made = vocabulary("other bytes")
    [_, canonical] = made.encode_continuation(b"", b"x then"), made.encode_continuation(b"", b" the then")
    assert made.encode_continuation(b"x t", b"hen the")[-2:] == made.encode_continuation(b"x", b" the")
    assert join_bytes(made, made.encode_continuation(b" t", b"he then")) == b"he then"
    assert made.encode_continuation(b" t", b"he then")[-2:] == canonical[-2:]


def test_bytes_that_are_no_text_are_spelt_one_by_one() -> None:
    data = b"a\xf0\x9f\xf0\x9f\x8d\xa3\x80the\xe4\xbb"
    for name in TOKENIZERS:
        made = vocabulary(name)
        assert join_bytes(made, made.encode_continuation(b"xy", data)) == data


def test_what_a_vocabulary_lacks_is_unknown_byte_by_byte() -> None:
    made = tiny_vocabularies.letters().draft
    assert made.encode_continuation(b"", b"a!6b")[1:3] == [UNKNOWN_BYTE, UNKNOWN_BYTE]
    assert [token for token in made.encode_continuation(b"", b"a!6b") if token != UNKNOWN_BYTE] == [
        made.token_by_bytes[b"a"],
        made.token_by_bytes[b"b"],
    ]


def test_a_tokenizer_that_changes_what_it_reads_spells_by_its_tokens() -> None:
    tokenizer = tiny_vocabularies.lower_tokenizer()
    made = TokenizerVocabulary(tokenizer, len(tokenizer))
    assert made.token_bytes[tokenizer.convert_tokens_to_ids("the")] == b" the"
    assert made.token_bytes[tokenizer.convert_tokens_to_ids("##e")] == b"e"
    assert join_bytes(made, made.encode_continuation(b"x", b" the end")) == b" the end"
    assert UNKNOWN_BYTE in made.encode_continuation(b"x", b" THE")


@pytest.mark.parametrize(
    ("data", "kept"),
    [("a🍣".encode(), 5), ("a🍣".encode()[:-1], 1), ("aé".encode()[:-1], 1), (b"\x80\x80", 2), (b"", 0), (b"ab", 2)],
)
def test_the_beginning_of_a_character_is_left_out(data: bytes, kept: int) -> None:
    assert strip_partial_character(data) == data[:kept]


# readings


def pairs() -> list[VocabMap]:
    made = [vocabulary(name) for name in TOKENIZERS]
    return [VocabMap(a, b) for a in made for b in made if a is not b]


def join_draft_bytes(reading: IncrementalRetokenizer) -> bytes:
    draft = reading.vocab_map.draft
    return b"".join(draft.token_bytes[token] or b"|" for token in reading.tokens[len(draft.prefix_tokens) :])


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_reading_says_what_was_read_token_by_token(text: str) -> None:
    """Though tokens of the target end within characters, and are not those that its tokenizer would give."""
    long = text * (2 * MAX_OPEN_BYTES // len(text.encode()) + 2)
    for pair in pairs():
        ids = pair.target.encode_continuation(b"", long.encode())
        reading = IncrementalRetokenizer(pair)
        for count, token in enumerate(ids):
            reading.extend([token])
            assert reading.num_read == count + 1
        assert join_draft_bytes(reading).strip() == long.encode().strip()
        letters = [
            pair.target.token_by_bytes[bytes([byte])]
            for byte in long.encode()
            if bytes([byte]) in pair.target.token_by_bytes
        ]
        apart = IncrementalRetokenizer(pair)
        apart.extend(letters)
        assert join_draft_bytes(apart).strip() == long.encode().strip()


def test_only_the_newest_stretch_is_written_again() -> None:
    """The bound holds for any length of text, and the result equals encoding all at once, cut at word ends."""
    pair = VocabMap(vocabulary("bytes"), vocabulary("other bytes"))
    text = ("the end of the naïve " * 400).encode()
    ids = pair.target.encode_continuation(b"", text)
    reading, changed = IncrementalRetokenizer(pair), []
    for token in ids:
        before = list(reading.tokens)
        reading.num_valid = len(before)
        reading.extend([token])
        changed.append(len(before) - reading.num_valid)
        assert reading.tokens[: reading.num_valid] == before[: reading.num_valid]
    assert max(changed) <= 8
    assert len(reading._open_bytes) <= MAX_OPEN_BYTES + 16
    assert reading.tokens == pair.draft.encode_continuation(b"", text)


def test_what_is_held_right_ends_where_the_text_came_to_be_another() -> None:
    pair = VocabMap(vocabulary("bytes"), vocabulary("other bytes"))
    one = pair.draft.token_by_bytes
    reading = IncrementalRetokenizer(pair)
    reading.extend(pair.target.encode_greedily(b"x"))
    reading.append_draft([one[b" t"], one[b"h"]], 3)
    reading.extend(pair.target.encode_greedily(b" ta"))
    assert reading.tokens == [one[b"x"], one[b" t"], one[b"a"]]
    assert reading.num_valid == 2
    reading.append_draft([one[b"n"]], 4)
    reading.extend(pair.target.encode_greedily(b"n"))
    assert reading.tokens == [one[b"x"], one[b" t"], one[b"an"]]
    assert reading.num_valid == 2, "`an` is one token of the draft"


def test_control_tokens_by_their_part_and_by_their_name() -> None:
    """A beginning that both have stands once; the end is the end; a name that the draft has not is text."""
    target, draft = vocabulary("other bytes"), vocabulary("pieces")
    reading = IncrementalRetokenizer(VocabMap(target, draft))
    assert reading.tokens == [draft.bos] or not draft.prefix_tokens
    reading.extend(
        [
            target.bos,
            *target.encode_greedily(b"ab"),
            target.control_tokens["<stop>"],
            *target.encode_greedily(b"c"),
            target.eos,
        ]
    )
    tokens = [token for token in reading.tokens if token in (draft.bos, draft.eos)]
    assert tokens == [draft.bos, draft.eos]
    assert join_draft_bytes(reading).replace(b" ", b"").strip(b"|") == b"ab<stop>c"
    back = IncrementalRetokenizer(VocabMap(vocabulary("other bytes"), vocabulary("bytes")))
    back.extend([target.control_tokens["<stop>"]])
    assert back.tokens == [back.vocab_map.draft.control_tokens["<stop>"]]


def test_an_id_that_is_no_token_is_passed_over() -> None:
    reading = IncrementalRetokenizer(tiny_vocabularies.letters())
    reading.extend([50, 10_000, 51])
    assert len(reading.tokens) == 2


def test_random_bytes_are_read_by_every_pair() -> None:
    rng = random.Random(0)
    for pair in pairs():
        reading, text = IncrementalRetokenizer(pair), b""
        ids = [i for i, piece in enumerate(pair.target.token_bytes) if piece]
        for _ in range(60):
            new = [rng.choice(ids) for _ in range(rng.randint(1, 5))]
            text += b"".join(pair.target.token_bytes[token] or b"" for token in new)
            reading.extend(new)
            assert join_draft_bytes(reading) in (text, b" " + text)


# the two side by side


def test_shared_tokens_stand_for_the_same_bytes_one_to_one() -> None:
    for pair in pairs():
        control = {pair.target.eos: pair.draft.eos, pair.target.bos: pair.draft.bos}
        for token, own in pair.shared_tokens.items():
            same_name = [
                n
                for n, i in pair.target.control_tokens.items()
                if i == token and pair.draft.control_tokens.get(n) == own
            ]
            assert pair.target.token_bytes[token] == pair.draft.token_bytes[own]
            assert pair.target.token_bytes[token] or control.get(token) == own or same_name
        assert len(set(pair.shared_tokens.values())) == len(pair.shared_tokens)
        assert all(a < b for a, b in pairwise(pair.shared_tokens))
        assert pair.shared_tokens[pair.target.eos] == pair.draft.eos  # type: ignore[index]
    pieces, bytes_ = vocabulary("pieces"), vocabulary("other bytes")
    assert VocabMap(bytes_, pieces).shared_tokens[bytes_.token_by_bytes[b"\n"]] == 3 + ord("\n"), (
        "a byte token is a token as any"
    )


def side(name: str, size: int | None = None) -> VocabInfo:
    tokenizer = TOKENIZERS[name]()
    return VocabInfo(f"org/{name}", tokenizer, size or len(tokenizer))


def find_drafter_class(vocab: str, target: VocabInfo, draft: VocabInfo, has_tree: bool = False) -> type | None:
    make = select_translation(vocab, target, draft, has_tree)
    return None if make is None else make.__closure__[0].cell_contents  # type: ignore[index]


def test_auto_is_nothing_for_the_same_tokens_and_tli_where_enough_is_shared() -> None:
    assert find_drafter_class("auto", side("bytes"), side("bytes", 400)) is None
    assert find_drafter_class("auto", VocabInfo("a", None, 9), VocabInfo("b", None, 9)) is None
    # both spell the sample in single bytes, but for a few merges
    assert find_drafter_class("auto", side("other bytes"), side("bytes")) is TliDrafter
    few = VocabInfo("org/few", tiny_vocabularies.letter_tokenizer(["<end>", "a", "e"], []), 3)
    with pytest.raises(ForedraftError, match="cannot spell each other's text; use a draft with the target's tokenizer"):
        select_translation("auto", side("bytes"), few)


def test_slem_where_little_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.drafters.draft_model.cross_vocab.select.MIN_AUTO_COVERAGE", 1.1)
    assert find_drafter_class("auto", side("other bytes"), side("bytes")) is SlemDrafter
    assert find_drafter_class("auto", side("other bytes"), side("bytes"), has_tree=True) is TliDrafter
    assert find_drafter_class("slem", side("bytes"), side("bytes")) is SlemDrafter
    assert find_drafter_class("tli", side("bytes"), side("bytes")) is TliDrafter


def test_the_choice_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "foredraft.drafters.draft_model.cross_vocab.select"):
        select_translation("tli", side("bytes"), side("other bytes"))
    [said] = caplog.messages
    assert said.startswith("org/other bytes drafts for org/bytes by tli: ")


@pytest.mark.parametrize("vocab", ["slem", "tli", "auto"])
def test_without_a_tokenizer_the_side_is_named(vocab: str) -> None:
    with pytest.raises(ForedraftError, match="small has no tokenizer, and a draft of another vocabulary needs both"):
        select_translation(vocab, side("bytes"), VocabInfo("small", None, 99))
    with pytest.raises(ForedraftError, match="big has no tokenizer"):
        select_translation(vocab, VocabInfo("big", None, 98), side("bytes"))


def test_too_few_shared_tokens_are_refused_with_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.drafters.draft_model.cross_vocab.select.MIN_COVERAGE", 1.1)
    with pytest.raises(ForedraftError, match=r"share 2\d\d tokens, .* use vocab slem \(--spec-vocab slem\)"):
        select_translation("tli", side("bytes"), side("other bytes"))


def test_a_tokenizer_of_no_text_is_refused() -> None:
    empty = tiny_vocabularies.letter_tokenizer(["<end>"], [])
    with pytest.raises(ForedraftError, match="none: no token of this tokenizer stands for any text"):
        build_vocab_map(side("bytes"), VocabInfo("none", empty, 1))
