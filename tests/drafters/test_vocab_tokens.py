"""Tokens as bytes, texts cut to the byte, and readings that grow.

Guards against seams that lose or double a byte, halves of characters, tokenizers that put a space before a text or
change what they read, control tokens taken for text and text taken for control tokens, and a memory held right beyond
the first token that changed.
"""

import random
from itertools import pairwise

import pytest

import models_made
import vocab_made
from foredraft.drafters.foreign import Side, pair_of, way
from foredraft.drafters.intersection import Pair
from foredraft.drafters.readings import STRETCH, Reading
from foredraft.drafters.slem import Retokenising
from foredraft.drafters.tli import Intersecting
from foredraft.drafters.vocabularies import UNKNOWN, TokenizerVocabulary, whole
from foredraft.errors import ForedraftError

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
    "bytes": models_made.tokenizer,
    "other bytes": vocab_made.byte_tokenizer,
    "pieces": vocab_made.piece_tokenizer,
}


def vocabulary(name: str) -> TokenizerVocabulary:
    tokenizer = TOKENIZERS[name]()
    return TokenizerVocabulary(tokenizer, len(tokenizer))


def spelt(vocabulary: TokenizerVocabulary, ids: list[int]) -> bytes:
    pieces = [vocabulary.spelt[token] for token in ids]
    assert None not in pieces
    return b"".join(pieces)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_is_spelt_to_the_byte_wherever_it_is_cut(name: str, text: str) -> None:
    """Within characters too; and every part goes on from the one before."""
    made, data = vocabulary(name), text.encode()
    for cut in range(1, len(data)):
        ids = made.continued(data[:cut], data[cut:])
        assert UNKNOWN not in ids
        assert spelt(made, ids) == data[cut:]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_whole_text_is_cut_as_its_tokenizer_does(text: str) -> None:
    """The space before a text included, which pieces have; a text that looks like a control token is text."""
    for name, make in TOKENIZERS.items():
        made, data = vocabulary(name), text.encode()
        ids = made.continued(b"", data)
        plain = make().encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ids == plain
        assert not any(token in made.controls.values() for token in ids)


def test_a_seam_within_a_token_keeps_the_tokens_after_it() -> None:
    made = vocabulary("other bytes")
    [_, canonical] = made.continued(b"", b"x then"), made.continued(b"", b" the then")
    assert made.continued(b"x t", b"hen the")[-2:] == made.continued(b"x", b" the")
    assert spelt(made, made.continued(b" t", b"he then")) == b"he then"
    assert made.continued(b" t", b"he then")[-2:] == canonical[-2:]


def test_bytes_that_are_no_text_are_spelt_one_by_one() -> None:
    data = b"a\xf0\x9f\xf0\x9f\x8d\xa3\x80the\xe4\xbb"
    for name in TOKENIZERS:
        made = vocabulary(name)
        assert spelt(made, made.continued(b"xy", data)) == data


def test_what_a_vocabulary_lacks_is_unknown_byte_by_byte() -> None:
    made = vocab_made.letters().draft
    assert made.continued(b"", b"a!6b")[1:3] == [UNKNOWN, UNKNOWN]
    assert [token for token in made.continued(b"", b"a!6b") if token != UNKNOWN] == [made.ids[b"a"], made.ids[b"b"]]


def test_a_tokenizer_that_changes_what_it_reads_spells_by_its_tokens() -> None:
    tokenizer = vocab_made.lower_tokenizer()
    made = TokenizerVocabulary(tokenizer, len(tokenizer))
    assert made.spelt[tokenizer.convert_tokens_to_ids("the")] == b" the"
    assert made.spelt[tokenizer.convert_tokens_to_ids("##e")] == b"e"
    assert spelt(made, made.continued(b"x", b" the end")) == b" the end"
    assert UNKNOWN in made.continued(b"x", b" THE")


@pytest.mark.parametrize(
    ("data", "kept"),
    [("a🍣".encode(), 5), ("a🍣".encode()[:-1], 1), ("aé".encode()[:-1], 1), (b"\x80\x80", 2), (b"", 0), (b"ab", 2)],
)
def test_the_beginning_of_a_character_is_left_out(data: bytes, kept: int) -> None:
    assert whole(data) == data[:kept]


# readings


def pairs() -> list[Pair]:
    made = [vocabulary(name) for name in TOKENIZERS]
    return [Pair(a, b) for a in made for b in made if a is not b]


def shown(reading: Reading) -> bytes:
    draft = reading.pair.draft
    return b"".join(draft.spelt[token] or b"|" for token in reading.tokens[len(draft.opening) :])


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_reading_says_what_was_read_token_by_token(text: str) -> None:
    """Though tokens of the target end within characters, and are not those that its tokenizer would give."""
    long = text * (2 * STRETCH // len(text.encode()) + 2)
    for pair in pairs():
        ids = pair.target.continued(b"", long.encode())
        reading = Reading(pair)
        for count, token in enumerate(ids):
            reading.extend([token])
            assert reading.num_read == count + 1
        assert shown(reading).strip() == long.encode().strip()
        letters = [pair.target.ids[bytes([byte])] for byte in long.encode() if bytes([byte]) in pair.target.ids]
        apart = Reading(pair)
        apart.extend(letters)
        assert shown(apart).strip() == long.encode().strip()


def test_only_the_newest_stretch_is_written_again() -> None:
    """However long the text is; and it is cut as it would be at once, where words end."""
    pair = Pair(vocabulary("bytes"), vocabulary("other bytes"))
    text = ("the end of the naïve " * 400).encode()
    ids = pair.target.continued(b"", text)
    reading, changed = Reading(pair), []
    for token in ids:
        before = list(reading.tokens)
        reading.num_valid = len(before)
        reading.extend([token])
        changed.append(len(before) - reading.num_valid)
        assert reading.tokens[: reading.num_valid] == before[: reading.num_valid]
    assert max(changed) <= 8
    assert len(reading._bytes) <= STRETCH + 16
    assert reading.tokens == pair.draft.continued(b"", text)


def test_what_is_held_right_ends_where_the_text_came_to_be_another() -> None:
    pair = Pair(vocabulary("bytes"), vocabulary("other bytes"))
    one = pair.draft.ids
    reading = Reading(pair)
    reading.extend(pair.target.spell(b"x"))
    reading.expect([one[b" t"], one[b"h"]], 3)
    reading.extend(pair.target.spell(b" ta"))
    assert reading.tokens == [one[b"x"], one[b" t"], one[b"a"]]
    assert reading.num_valid == 2
    reading.expect([one[b"n"]], 4)
    reading.extend(pair.target.spell(b"n"))
    assert reading.tokens == [one[b"x"], one[b" t"], one[b"an"]]
    assert reading.num_valid == 2, "`an` is one token of the draft"


def test_control_tokens_by_their_part_and_by_their_name() -> None:
    """A beginning that both have stands once; the end is the end; a name that the draft has not is text."""
    target, draft = vocabulary("other bytes"), vocabulary("pieces")
    reading = Reading(Pair(target, draft))
    assert reading.tokens == [draft.bos] or not draft.opening
    reading.extend([target.bos, *target.spell(b"ab"), target.controls["<stop>"], *target.spell(b"c"), target.eos])
    tokens = [token for token in reading.tokens if token in (draft.bos, draft.eos)]
    assert tokens == [draft.bos, draft.eos]
    assert shown(reading).replace(b" ", b"").strip(b"|") == b"ab<stop>c"
    back = Reading(Pair(vocabulary("other bytes"), vocabulary("bytes")))
    back.extend([target.controls["<stop>"]])
    assert back.tokens == [back.pair.draft.controls["<stop>"]]


def test_an_id_that_is_no_token_is_passed_over() -> None:
    reading = Reading(vocab_made.letters())
    reading.extend([50, 10_000, 51])
    assert len(reading.tokens) == 2


def test_random_bytes_are_read_by_every_pair() -> None:
    rng = random.Random(0)
    for pair in pairs():
        reading, text = Reading(pair), b""
        ids = [i for i, piece in enumerate(pair.target.spelt) if piece]
        for _ in range(60):
            new = [rng.choice(ids) for _ in range(rng.randint(1, 5))]
            text += b"".join(pair.target.spelt[token] or b"" for token in new)
            reading.extend(new)
            assert shown(reading) in (text, b" " + text)


# the two side by side


def test_shared_tokens_stand_for_the_same_bytes_one_to_one() -> None:
    for pair in pairs():
        control = {pair.target.eos: pair.draft.eos, pair.target.bos: pair.draft.bos}
        for token, own in pair.shared.items():
            same_name = [n for n, i in pair.target.controls.items() if i == token and pair.draft.controls.get(n) == own]
            assert pair.target.spelt[token] == pair.draft.spelt[own]
            assert pair.target.spelt[token] or control.get(token) == own or same_name
        assert len(set(pair.shared.values())) == len(pair.shared)
        assert all(a < b for a, b in pairwise(pair.shared))
        assert pair.shared[pair.target.eos] == pair.draft.eos  # type: ignore[index]
    pieces, bytes_ = vocabulary("pieces"), vocabulary("other bytes")
    assert Pair(bytes_, pieces).shared[bytes_.ids[b"\n"]] == 3 + ord("\n"), "a byte token is a token as any"


def side(name: str, size: int | None = None) -> Side:
    tokenizer = TOKENIZERS[name]()
    return Side(f"org/{name}", tokenizer, size or len(tokenizer))


def made_by(vocab: str, target: Side, draft: Side, has_tree: bool = False) -> type | None:
    make = way(vocab, target, draft, has_tree)
    return None if make is None else make.__closure__[0].cell_contents  # type: ignore[index]


def test_auto_is_nothing_for_the_same_tokens_and_tli_where_enough_is_shared() -> None:
    assert made_by("auto", side("bytes"), side("bytes", 400)) is None
    assert made_by("auto", Side("a", None, 9), Side("b", None, 9)) is None
    # both spell the sample in single bytes, but for a few merges
    assert made_by("auto", side("other bytes"), side("bytes")) is Intersecting
    few = Side("org/few", vocab_made.letter_tokenizer(["<end>", "a", "e"], []), 3)
    with pytest.raises(ForedraftError, match="cannot spell each other's text; use a draft with the target's tokenizer"):
        way("auto", side("bytes"), few)


def test_slem_where_little_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.drafters.foreign.ENOUGH", 1.1)
    assert made_by("auto", side("other bytes"), side("bytes")) is Retokenising
    assert made_by("auto", side("other bytes"), side("bytes"), has_tree=True) is Intersecting
    assert made_by("slem", side("bytes"), side("bytes")) is Retokenising
    assert made_by("tli", side("bytes"), side("bytes")) is Intersecting


def test_the_choice_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "foredraft.drafters.foreign"):
        way("tli", side("bytes"), side("other bytes"))
    [said] = caplog.messages
    assert said.startswith("org/other bytes drafts for org/bytes by tli: ")


@pytest.mark.parametrize("vocab", ["slem", "tli", "auto"])
def test_without_a_tokenizer_the_side_is_named(vocab: str) -> None:
    with pytest.raises(ForedraftError, match="small has no tokenizer, and a draft of another vocabulary needs both"):
        way(vocab, side("bytes"), Side("small", None, 99))
    with pytest.raises(ForedraftError, match="big has no tokenizer"):
        way(vocab, Side("big", None, 98), side("bytes"))


def test_too_few_shared_tokens_are_refused_with_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.drafters.foreign.LEAST", 1.1)
    with pytest.raises(ForedraftError, match=r"share 2\d\d tokens, .* use vocab slem \(--spec-vocab slem\)"):
        way("tli", side("bytes"), side("other bytes"))


def test_a_tokenizer_of_no_text_is_refused() -> None:
    empty = vocab_made.letter_tokenizer(["<end>"], [])
    with pytest.raises(ForedraftError, match="none: no token of this tokenizer stands for any text"):
        pair_of(side("bytes"), Side("none", empty, 1))
