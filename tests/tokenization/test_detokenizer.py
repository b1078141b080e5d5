"""Text as it comes, token by token: together the pieces are the text of the whole, and no piece is half a character."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.tokenization.detokenizer import (
    REPLACEMENT_CHARACTER,
    ByteDetokenizer,
    WindowDetokenizer,
    make_detokenizer,
)
from tests.support import tiny_models

TEXTS = [
    "plain words",
    "naïve café",
    "東京の寿司",
    "🍣🍣👩‍🚀",
    "a🍣b你c€",
    "你好你好",
    " leading space",
    "πάντα ῥεῖ",
]


def pieces(tokenizer: object, prompt: list[int], ids: list[int]) -> list[str]:
    """Detokenize by the fast path if there is one, and check that the general path gives the same text."""
    quick, general = make_detokenizer(tokenizer, prompt), WindowDetokenizer(tokenizer, prompt)
    found = [quick.push(token) for token in ids]
    assert "".join(found).rstrip(REPLACEMENT_CHARACTER) == "".join(map(general.push, ids)).rstrip(REPLACEMENT_CHARACTER)
    return found


def test_both_detokenizers_show_special_tokens_if_they_are_not_skipped() -> None:
    tokenizer = tiny_models.tokenizer()
    ids = [*tokenizer("ab").input_ids, 1, *tokenizer("c€").input_ids, 2]
    quick, general = make_detokenizer(tokenizer, [1], False), WindowDetokenizer(tokenizer, [1], False)
    assert isinstance(quick, ByteDetokenizer)
    assert "".join(map(quick.push, ids)) == "".join(map(general.push, ids)) == "ab<stop>c€<pad>"
    assert "".join(pieces(tokenizer, [1], ids)) == "abc€"


def fallback_ids(text: str) -> list[int]:
    """Encode every character beyond ASCII in bytes, as a vocabulary without it does."""
    ids: list[int] = []
    for char in text:
        ids += [258] if char == " " else [2 + byte for byte in char.encode()]
    return ids


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_to_the_text(text: str) -> None:
    """Byte-level BPE splits these characters over up to four tokens."""
    tokenizer = tiny_models.tokenizer()
    ids = tokenizer(text).input_ids
    found = pieces(tokenizer, [], ids)
    assert "".join(found) == text
    assert not any("\ufffd" in piece for piece in found)
    assert text.isascii() or "" in found, "no character was split: the test shows nothing"


@pytest.mark.parametrize("text", TEXTS)
def test_characters_spelt_in_bytes_may_follow_each_other(text: str) -> None:
    """Byte fallback decodes a run of bytes as a whole: with the last byte of one character as context, the next was
    garbled for good (Llama 2, Mistral and Gemma write every emoji so)."""
    found = pieces(tiny_models.fallback_tokenizer(), fallback_ids("ab 你"), fallback_ids(text))
    assert "".join(found) == text


def test_a_token_may_hold_a_character_and_the_beginning_of_another() -> None:
    """Its whole characters are not held back with the incomplete one, nor lost when the text ends there."""
    tokenizer = tiny_models.tokenizer()
    known = tokenizer.get_vocab()
    both = [token for token, i in known.items() if token.isascii() and len(token) > 1]
    assert both, "a vocabulary with merges"
    made = WindowDetokenizer(_Spliced(tokenizer), [])
    assert made.push(0) == "ab"
    assert made.push(1) == "é"


class _Spliced:
    """Token 0 is 'ab' and the first byte of é, token 1 the second."""

    def __init__(self, tokenizer: object) -> None:
        self.bytes = {0: b"ab\xc3", 1: b"\xa9"}

    def decode(self, ids: list[int], **options: object) -> str:
        return b"".join(self.bytes[i] for i in ids).decode(errors="replace")


def test_a_prompt_cut_inside_a_character_is_completed() -> None:
    """The bytes that complete the character are new text. They used to vanish."""
    tokenizer = tiny_models.tokenizer()
    ids = tokenizer("x€").input_ids
    assert "".join(pieces(tokenizer, ids[:-1], ids[-1:])) == "€"
    assert "".join(pieces(tokenizer, ids[:-1], tokenizer("y").input_ids)) == "y"


def test_a_prompt_that_ends_with_a_replacement_character_adds_none() -> None:
    tokenizer = tiny_models.tokenizer()
    assert "".join(pieces(tokenizer, tokenizer("x\ufffd").input_ids, tokenizer("yz").input_ids)) == "yz"


def test_invalid_bytes_are_shown_and_do_not_swallow_what_follows() -> None:
    """A run of bytes that is no text, longer than the window, and then text."""
    tokenizer = tiny_models.tokenizer()
    alone = tokenizer.convert_tokens_to_ids("ÿ")  # the byte 0xFF in the alphabet of byte-level BPE
    ids = [alone] * 50 + tokenizer("é fin").input_ids
    assert "".join(pieces(tokenizer, [], ids)) == "\ufffd" * 50 + "é fin"


def test_special_tokens_have_no_text_and_cost_no_space() -> None:
    """A special token between two words is not the context of the second."""
    tokenizer = tiny_models.fallback_tokenizer()
    the, end = tokenizer.convert_tokens_to_ids("▁the"), tokenizer.convert_tokens_to_ids("<end>")
    assert pieces(tokenizer, [the], [end, the, end, end, the]) == ["", " the", "", "", " the"]


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert pieces(None, [1, 2], [3, 4]) == ["", ""]


@given(st.text(max_size=20), st.text(max_size=20))
def test_any_text_comes_back_whole(before: str, after: str) -> None:
    """The result is right for any characters, split into tokens anywhere."""
    tokenizer = tiny_models.tokenizer()
    found = "".join(pieces(tokenizer, tokenizer(before).input_ids, tokenizer(after).input_ids))
    assert found.removesuffix("\ufffd").rstrip("\ufffd") == after.rstrip("\ufffd")


@given(st.lists(st.integers(3, 319), max_size=60))
def test_any_tokens_decode_as_the_whole_does(ids: list[int]) -> None:
    """Random tokens are mostly invalid bytes: given out are all but the last three replacement characters at most."""
    tokenizer = tiny_models.tokenizer()
    whole = tokenizer.backend_tokenizer.decode(ids)
    found = "".join(pieces(tokenizer, [], ids))
    assert whole.startswith(found)
    assert whole[len(found) :] in ("", "\ufffd", "\ufffd" * 2, "\ufffd" * 3)


def test_tokens_that_are_bytes_take_the_quick_way() -> None:
    assert isinstance(make_detokenizer(tiny_models.tokenizer(), []), ByteDetokenizer)
    assert isinstance(make_detokenizer(tiny_models.fallback_tokenizer(), []), WindowDetokenizer)


@given(st.text(max_size=9), st.lists(st.integers(0, 330), max_size=30))
def test_quick_and_general_agree_on_any_tokens(prompt: str, ids: list[int]) -> None:
    """Special tokens and ids of nothing included."""
    tokenizer = tiny_models.tokenizer()
    pieces(tokenizer, tokenizer(prompt).input_ids, ids)


@pytest.mark.parametrize("prompt", [[], ["í", "§"], ["a", "ï"]])
def test_the_first_bytes_of_a_surrogate_are_shown_at_once(prompt: list[str]) -> None:
    """No third byte makes ED A7 a character. Python's decoder kept both, and a request that ended there lost them."""
    tokenizer = tiny_models.tokenizer()
    known = tokenizer.get_vocab()
    decoder = make_detokenizer(tokenizer, [known[letter] for letter in prompt])
    found = "".join(decoder.push(known[letter]) for letter in "í§")
    assert found == 2 * REPLACEMENT_CHARACTER
